"""Attempts that nobody has claimed, until shortly before they can be quiet. There may be a million of them: what agents
without a queue began in half an hour. So they are kept as text, those of a sweep together, for a tenth of the memory
that each would need by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class Unclaimed:
    """Names by the time at which they are to be looked at, the first ones first."""

    def __init__(self) -> None:
        self._packed: deque[tuple[int, str]] = deque()

    def add(self, names: Iterable[tuple[str, str]], due_ns: int) -> None:
        """Rollouts and attempts; `due_ns` never goes back."""
        # No id has a space.
        if packed := " ".join(f"{rollout} {attempt}" for rollout, attempt in names):
            self._packed.append((due_ns, packed))

    def take(self, until_ns: int) -> Iterator[tuple[str, str, int]]:
        """Takes out those that are due until then, with their time."""
        while self._packed and self._packed[0][0] <= until_ns:
            due_ns, packed = self._packed.popleft()
            words = iter(packed.split(" "))
            yield from ((rollout, attempt, due_ns) for rollout, attempt in zip(words, words, strict=True))
