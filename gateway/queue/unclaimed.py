"""Attempts that nobody has claimed, until shortly before they can be quiet. There may be a million of them: what agents
without a queue began in half an hour. So they are kept as text, those that are due at one time together, for a tenth of
the memory that each would need by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

STEP_NS: Final = 10**8
"""Times are rounded up to this; ns."""
PIECE: Final = 20_000
"""Of those that are on the tape so many are looked at in one sweep: each costs a look, and then memory of its own."""


class Unclaimed:
    """Names by the time at which they are to be looked at."""

    def __init__(self) -> None:
        self._packed: dict[int, bytearray] = {}

    def add(self, names: Iterable[tuple[str, str]], due_ns: int) -> None:
        """Rollouts and attempts."""
        # No id has a space.
        if packed := "".join(f"{rollout} {attempt} " for rollout, attempt in names):
            self._packed.setdefault(-(-due_ns // STEP_NS), bytearray()).extend(packed.encode("ascii"))

    def join(self, others: Unclaimed) -> None:
        """Adds all of these."""
        for step, packed in others._packed.items():
            self._packed.setdefault(step, bytearray()).extend(packed)

    def take(self, until_ns: int) -> Iterator[tuple[str, str, int]]:
        """Takes out those that are due until then, the first ones first, with their time."""
        for step in sorted(step for step in self._packed if step * STEP_NS <= until_ns):
            words = iter(self._packed.pop(step).decode("ascii").split())
            yield from ((rollout, attempt, step * STEP_NS) for rollout, attempt in zip(words, words, strict=True))


def spread(pieces: Iterable[Iterable[tuple[str, str]]], first_ns: int, every_ns: int) -> Unclaimed:
    """The names of the first piece are due then, and each next piece that much later."""
    found = Unclaimed()
    for at, names in enumerate(pieces):
        found.add(names, first_ns + at * every_ns)
    return found
