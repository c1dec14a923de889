"""Every call that was made, as its client saw it: a few numbers each, so that a million of them fit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from time import monotonic

from bench.soak.kinds import Seen


@dataclass
class Calls:
    """All of them, by their numbers from 0."""

    salt: int
    """The first half of the name of each; not 0, and another one in every soak."""
    kinds: array[int] = field(default_factory=lambda: array("B"))
    seen: array[int] = field(default_factory=lambda: array("B"))
    began: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of the monotonic clock, as `ended`."""
    ended: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.kinds)

    def begin(self, kind: int) -> int:
        """A call is made; its number."""
        self.kinds.append(kind)
        self.seen.append(Seen.PENDING)
        self.began.append(monotonic())
        self.ended.append(0.0)
        return len(self) - 1

    def end(self, number: int, seen: Seen) -> float:
        """It is over; how long it took."""
        self.seen[number], self.ended[number] = seen, monotonic()
        return self.ended[number] - self.began[number]

    def name(self, number: int) -> bytes:
        """Of a call: 16 hex digits."""
        return b"%08x%08x" % (self.salt, number)

    def number(self, name: str | None) -> int | None:
        """Of the call of that name; None: it is nobody's here."""
        if name is None or not name.startswith(f"{self.salt:08x}"):
            return None
        number = int(name[8:], 16)
        return number if number < len(self) else None
