"""Every call of a soak as its client saw it: a few numbers each, so that a million of them fit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from time import monotonic

from bench.soak.kinds import Seen


@dataclass
class Calls:
    """All calls, by their numbers from 0."""

    salt: int
    """The first half of each call's name; not 0, and different in every soak."""
    kinds: array[int] = field(default_factory=lambda: array("B"))
    seen: array[int] = field(default_factory=lambda: array("B"))
    began: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of the monotonic clock, as `ended`."""
    ended: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.kinds)

    def begin(self, kind: int) -> int:
        """Note that a call begins; return its number."""
        self.kinds.append(kind)
        self.seen.append(Seen.PENDING)
        self.began.append(monotonic())
        self.ended.append(0.0)
        return len(self) - 1

    def end(self, number: int, seen: Seen) -> float:
        """Note that a call is over; return its seconds."""
        self.seen[number], self.ended[number] = seen, monotonic()
        return self.ended[number] - self.began[number]

    def name(self, number: int) -> bytes:
        """Return the name of a call: 16 hex digits."""
        return b"%08x%08x" % (self.salt, number)

    def number(self, name: str | None) -> int | None:
        """Return the number of the call of that name; None if it is no call of this soak."""
        if name is None or not name.startswith(f"{self.salt:08x}"):
            return None
        number = int(name[8:], 16)
        return number if number < len(self) else None
