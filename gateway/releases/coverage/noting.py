"""What calls had, until it is added up: bounded, and cheap enough for every call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.gateway.dialects.text_spans import Place
from penstock.gateway.model.coverage import Unread, Why
from penstock.gateway.prompts.rewrite import Miss

HELD_BYTES: Final = 16 << 20
"""Texts that were not recognised, until they are looked at; what goes beyond is nobody's miss."""
MOST_CALLS: Final = 100_000
"""Calls that wait to be added up, at most; more are counted by the metrics only."""


class Missed(NamedTuple):
    """A text, or a request, that passed as it came."""

    why: Why | Unread
    """Why."""
    resource: str | None
    """What it was to be, where that is known."""
    place: Place | None = None
    """The text, from which that can be told otherwise."""


class Call(NamedTuple):
    """What a call had of registered prompts."""

    rollout: str
    """Its rollout."""
    matched: Collection[str]
    """The resources whose text it had."""
    missed: Collection[Missed]
    """What passed as it came."""


@dataclass(slots=True)
class Notes:
    """What calls had since it was taken the last time."""

    calls: list[Call] = field(default_factory=list[Call])
    """In their order."""
    _held: dict[bytes, Place] = field(default_factory=dict[bytes, Place])
    _bytes: int = 0

    def add(self, rollout: str, matched: Collection[str], misses: Iterable[Miss]) -> None:
        """Notes a call."""
        if len(self.calls) < MOST_CALLS:
            missed = [one for miss in misses if (one := self._kept(miss)) is not None]
            if matched or missed:
                self.calls.append(Call(rollout, matched, missed))

    def add_unread(self, rollout: str, why: Unread, resources: Collection[str]) -> None:
        """Notes a call whose request could not be read, of a rollout that was given these resources."""
        if resources and len(self.calls) < MOST_CALLS:
            self.calls.append(Call(rollout, (), [Missed(why, name) for name in resources]))

    def _kept(self, miss: Miss) -> Missed | None:
        if miss.resource is not None or miss.why == "placeholder":
            return None if miss.resource is None else Missed(miss.why, miss.resource)
        # Agents send the same text again and again: one of each is kept.
        place = self._held.get(miss.place.literal)
        if place is None or place.name != miss.place.name:
            if self._bytes + len(miss.place.literal) > HELD_BYTES:
                return None
            self._bytes += len(miss.place.literal)
            place = self._held[miss.place.literal] = miss.place
        return Missed(miss.why, None, place)

    def take(self) -> list[Call]:
        """What was noted, once."""
        calls, self.calls = self.calls, []
        self._held, self._bytes = {}, 0
        return calls
