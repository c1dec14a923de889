"""Coverage: matched and missed calls are counted per resource; a fall is reported and holds canaries.

Calls note their prompts (`CallNotes`), which costs them one entry in a list; the notes are bounded. Once a second they
are added up in a thread, because each new text is searched for many pieces, to find out which prompt it nearly is
(`gateway.releases.prompt_recogniser`). An operation adds it up on the tape (`gateway.releases.operations`), where
`gateway.releases.canary.decision` decides whether the coverage has fallen.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.resource import Coverage, LastMiss, MissReason, TextDifference, UnreadReason
from penstock.gateway.releases.catalog import Catalog, TextMiss, names_of
from penstock.gateway.releases.operations import CoverageDelta, CoverageOperations, CoverageUpdates
from penstock.gateway.releases.prompt_recogniser import NearestTextFinder, difference
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.wire.dialects.request_body import TextLocation

HELD_BYTES: Final = 16 << 20
"""Bytes of unrecognised texts that are held until they are searched; further ones are counted as no resource's miss."""
MOST_CALLS: Final = 100_000
"""Calls that wait to be added up, at most; the metrics alone count further ones."""
REMEMBERED: Final = 16_384
"""Rollouts whose first call was counted that are remembered."""
TEXTS: Final = 1_024
"""Texts whose nearest prompt is remembered."""
NEW_TEXTS: Final = 50
"""New texts that are searched at most: each takes about a millisecond of a process that serves calls. Further ones are
counted as no resource's miss."""
EVERY_S: Final = 1.0
_log = logging.getLogger("penstock.releases")


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


class NearestResource(NamedTuple):
    """The resource whose text another text nearly is."""

    resource: str
    difference: TextDifference | None
    """The place where they differ; None also where the text has a secret."""


class CoverageCounter:
    """Adds calls to the coverage of resources, and remembers texts and rollouts from call to call."""

    def __init__(self, secrets: Secrets) -> None:
        """`secrets` are removed from shown texts."""
        self._secrets = secrets
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._near: OrderedDict[tuple[bytes, str | None], NearestResource | None] = OrderedDict()
        self._new = NEW_TEXTS
        self._catalog: Catalog | None = None
        self._nearest: NearestTextFinder | None = None
        """Made with the first text that was not recognised."""

    def count(self, calls: Iterable[CallNote], catalog: Catalog, now: int) -> dict[str, CoverageDelta]:
        """Return the additions of these calls, by the resource's name. A call in which a resource was recognised did
        not miss it."""
        if catalog is not self._catalog:
            self._catalog, self._nearest = catalog, None
            self._near.clear()
        found: dict[str, CoverageDelta] = {}
        self._new = NEW_TEXTS
        for call in calls:
            for name in set(call.matched):
                added = found.setdefault(name, CoverageDelta())
                added.matched += 1
                self._first(added, call.rollout, name, True)
            for name, last in self._missed(call, catalog, now).items():
                added = found.setdefault(name, CoverageDelta())
                added.missed[last.why] += 1
                added.last = last
                self._first(added, call.rollout, name, False)
        return found

    def _missed(self, call: CallNote, catalog: Catalog, now: int) -> Mapping[str, LastMiss]:
        found: dict[str, LastMiss] = {}
        for miss in call.missed:
            near = self._near_of(miss, catalog)
            if near is not None and near.resource not in call.matched:
                found[near.resource] = LastMiss(
                    rollout=call.rollout, at_ns=now, why=miss.why, difference=near.difference
                )
        return found

    def _near_of(self, miss: MissNote, catalog: Catalog) -> NearestResource | None:
        if miss.resource is not None or miss.place is None:
            return None if miss.resource is None else NearestResource(miss.resource, None)
        key = hashlib.sha256(miss.place.literal).digest(), miss.place.name
        if key not in self._near:
            if self._new == 0:
                return None
            self._new -= 1
            self._nearest = self._nearest or NearestTextFinder(catalog.sent)
            self._near[key] = self._looked_for(self._nearest, miss.place)
            if len(self._near) > TEXTS:
                self._near.popitem(last=False)
        return self._near[key]

    def _looked_for(self, nearest: NearestTextFinder, place: TextLocation) -> NearestResource | None:
        text = place.text
        sent = nearest.of(text, names_of(place))
        if sent is None:
            return None
        # A piece of a text may end in the middle of a secret.
        shown = not self._secrets.by_place and self._secrets.text(text) is text
        return NearestResource(sent.resource, difference(sent, text) if shown else None)

    def _first(self, added: CoverageDelta, rollout: str, name: str, matched: bool) -> None:
        """Count the first call of a rollout, which stands for all of it."""
        if (rollout, name) not in self._seen:
            self._seen[rollout, name] = None
            added.rollouts.append(matched)
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)


class CallPins(Protocol):
    """The versions that calls get, and what was noted of calls."""

    @property
    def catalog(self) -> Catalog: ...
    @property
    def notes(self) -> CallNotes: ...


class CoverageMonitor:
    """The coverage of all resources. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        pins: CallPins,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        fell: Callable[[str, Coverage], Awaitable[None]],
        secrets: Secrets,
    ) -> None:
        """`fell` is called for each resource whose coverage has fallen."""
        self._pins, self._recorder, self._metrics, self._now_ns, self._fell = pins, recorder, metrics, now_ns, fell
        self._adding = CoverageCounter(secrets)
        self._untold = dict[str, Coverage]()
        """Resources whose coverage has fallen and for which `fell` has not succeeded yet."""
        self._failing = dict[str, str]()
        """The error of `fell`, by resource; logged once."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Stop the task and add up the rest. Calls that are being added up are no longer in the notes, so that is
        finished first."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        await self._safely()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._stopping.wait()
            if self._pins.notes.calls or self._untold:
                await self._safely()

    async def _safely(self) -> None:
        try:
            await self._add_up()
        except Exception:
            _log.exception("the coverage of prompts could not be added up")
        # Also for one for which `fell` failed before: its canaries must not go on.
        for name, coverage in list(self._untold.items()):
            await self._tell(name, coverage)

    async def _tell(self, name: str, coverage: Coverage) -> None:
        try:
            await self._fell(name, coverage)
        except Exception as error:
            if str(error) != self._failing.get(name):
                _log.error("canaries of %s are not held yet, it is tried again: %s", name, error)
            self._failing[name] = str(error)
        else:
            self._failing.pop(name, None)
            del self._untold[name]

    async def _add_up(self) -> None:
        calls, catalog, now = self._pins.notes.take(), self._pins.catalog, self._now_ns()
        if not calls:
            return
        added = await asyncio.to_thread(self._adding.count, calls, catalog, now)
        try:
            changed = await self._recorder.submit(lambda tape: CoverageOperations(tape).add(added, now))
        except TapeError as error:
            _log.error("the coverage of prompts lacks %d calls: %s", len(calls), error)
            return
        self._count(added, changed)
        for name, (coverage, turned) in changed.items():
            if turned == "fell":
                _log.warning("the coverage of %s fell: %s%s", name, coverage.fell, _said(coverage.last))
                self._untold[name] = coverage
            elif turned == "back":
                self._untold.pop(name, None)
                _log.info("the coverage of %s is back", name)

    def _count(self, added: Mapping[str, CoverageDelta], changed: CoverageUpdates) -> None:
        for name, one in added.items():
            if one.matched:
                self._metrics.resource_calls[name, "matched"] += one.matched
            for why, count in one.missed.items():
                self._metrics.resource_calls[name, why] += count
        for name, (coverage, _) in changed.items():
            self._metrics.resource_coverage_fell[(name,)] = int(coverage.fell_ns is not None)


def _said(last: LastMiss | None) -> str:
    if last is None:
        return ""
    where = last.difference
    return f"; rollout {last.rollout}: {last.why}" + (
        "" if where is None else f", at character {where.at} {where.found!r} in place of {where.wanted!r}"
    )
