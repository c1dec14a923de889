"""Attempts that nobody has claimed, until shortly before their quiet time is over. There may be a million of them:
those that agents without a queue began in half an hour. So they are kept as text, those that are due at one time
together, in a tenth of the memory that single names would need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

STEP_NS: Final = 10**8
"""Times are rounded up to multiples of this; ns."""
PIECE: Final = 20_000
"""Number of attempts on the tape that one sweep checks: each costs a read, and then memory of its own."""


class Unclaimed:
    """Names of attempts by the time of their next check."""

    def __init__(self) -> None:
        self._packed: dict[int, bytearray] = {}

    def add(self, names: Iterable[tuple[str, str]], due_ns: int) -> None:
        """Add attempts, as (rollout, attempt), that are due at this time."""
        # Ids have no spaces.
        if packed := "".join(f"{rollout} {attempt} " for rollout, attempt in names):
            self._packed.setdefault(-(-due_ns // STEP_NS), bytearray()).extend(packed.encode("ascii"))

    def join(self, others: Unclaimed) -> None:
        """Add all attempts of another object."""
        for step, packed in others._packed.items():
            self._packed.setdefault(step, bytearray()).extend(packed)

    def take(self, until_ns: int) -> Iterator[tuple[str, str, int]]:
        """Remove and yield the attempts that are due until then, the earliest first, with their time; ns."""
        for step in sorted(step for step in self._packed if step * STEP_NS <= until_ns):
            words = iter(self._packed.pop(step).decode("ascii").split())
            yield from ((rollout, attempt, step * STEP_NS) for rollout, attempt in zip(words, words, strict=True))


def spread(pieces: Iterable[Iterable[tuple[str, str]]], first_ns: int, every_ns: int) -> Unclaimed:
    """The names of the first piece are due at `first_ns`, those of each next piece `every_ns` later."""
    found = Unclaimed()
    for at, names in enumerate(pieces):
        found.add(names, first_ns + at * every_ns)
    return found
