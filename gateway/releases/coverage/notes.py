"""Notes of calls and their prompts, until they are added up: bounded, and cheap enough for every call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.gateway.model.coverage import MissReason, UnreadReason
from penstock.gateway.releases.prompts.rewrite import TextMiss
from penstock.gateway.wire.dialects.text_spans import TextLocation

HELD_BYTES: Final = 16 << 20
"""Bytes of unrecognised texts that are held until they are searched; further ones are counted as no resource's miss."""
MOST_CALLS: Final = 100_000
"""Calls that wait to be added up, at most; the metrics alone count further ones."""


class MissNote(NamedTuple):
    """A text, or a request, that passed unchanged."""

    why: MissReason | UnreadReason
    resource: str | None
    """The resource that it should have been, where that is known."""
    place: TextLocation | None = None
    """The text, from which the resource can be found otherwise."""


class CallNote(NamedTuple):
    """A call and its registered prompts."""

    rollout: str
    matched: Collection[str]
    """The resources whose text it had."""
    missed: Collection[MissNote]
    """Texts that passed unchanged."""


@dataclass(slots=True)
class CallNotes:
    """Notes of calls since the last `take`."""

    calls: list[CallNote] = field(default_factory=list[CallNote])
    """The calls, in order."""
    _held: dict[bytes, TextLocation] = field(default_factory=dict[bytes, TextLocation])
    _bytes: int = 0

    def add(self, rollout: str, matched: Collection[str], misses: Iterable[TextMiss]) -> None:
        """Note a call with the resources that it matched and its misses."""
        if len(self.calls) < MOST_CALLS:
            missed = [one for miss in misses if (one := self._kept(miss)) is not None]
            if matched or missed:
                self.calls.append(CallNote(rollout, matched, missed))

    def add_unread(self, rollout: str, why: UnreadReason, resources: Collection[str]) -> None:
        """Note a call whose request could not be read, of a rollout that has pins of these resources."""
        if resources and len(self.calls) < MOST_CALLS:
            self.calls.append(CallNote(rollout, (), [MissNote(why, name) for name in resources]))

    def _kept(self, miss: TextMiss) -> MissNote | None:
        if miss.resource is not None or miss.why == "placeholder":
            return None if miss.resource is None else MissNote(miss.why, miss.resource)
        # Agents send the same text again and again: one of each is kept.
        place = self._held.get(miss.place.literal)
        if place is None or place.name != miss.place.name:
            if self._bytes + len(miss.place.literal) > HELD_BYTES:
                return None
            self._bytes += len(miss.place.literal)
            place = self._held[miss.place.literal] = miss.place
        return MissNote(miss.why, None, place)

    def take(self) -> list[CallNote]:
        """Return the notes and drop them."""
        calls, self.calls = self.calls, []
        self._held, self._bytes = {}, 0
        return calls
