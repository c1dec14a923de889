"""Switches traffic: finds the resources that a call uses and the versions that its rollout has.

`find` runs for every call and must cost nothing while nothing is registered. `pinned` answers from memory. The first
call of a rollout that uses a resource waits until its pin is on the tape (`pin`), so that no crash can put a rollout on
two arms.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Assignment, Pin, Release
from penstock.gateway.model.resource import Audience, Resource, StableVersion
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.releases.canary.outcomes import Requester, audience_includes, pins_on, stable_version, unit_of
from penstock.gateway.releases.catalog import (
    Catalog,
    TextFindings,
    TextMiss,
    find_resources,
)
from penstock.gateway.releases.coverage import CallNotes
from penstock.gateway.releases.operations import PinRequest, ReleaseOperations
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.wire.http.redaction import Redactor

REMEMBERED: Final = 16_384
"""Rollouts whose pins are remembered."""
_MOST: Final = 16_384
"""Rollouts whose pins are kept."""
_NOBODY: Final = Requester("", "", "online", {})
"""An asker for pins that are all given: nothing is assigned."""
_AT_ONCE, _RETRY_S = 100, 1.0
"""Rollouts whose pins one transaction writes, and seconds until the next try after a tape that took none."""
K = TypeVar("K")
_log = logging.getLogger("penstock.releases")


class CatalogReader(Protocol):
    """The reads of the tape that are needed here."""

    def resources(self) -> dict[str, tuple[StableVersion, list[Resource]]]: ...
    def releases(self) -> list[Release]: ...
    def pins(self, rollout: str) -> list[Pin]: ...
    def unit(self, release: str, unit: str) -> Assignment | None: ...
    def rollout(self, rollout: str) -> Rollout | None: ...


@dataclass(slots=True)
class ResourceUse:
    """The resources that a call uses."""

    resources: list[str]
    prompts: TextFindings | None
    model: str | None
    """The requested model, if it is a resource."""
    noted: bool = False
    """True if its texts are counted already."""


@dataclass(slots=True)
class VersionedRequest:
    """The request to send and its versions."""

    body: bytes
    upstreams: tuple[str, ...]
    """Upstreams that it may go to; empty where routes decide."""
    versions: dict[str, str]
    """Version by resource."""
    arm: str | None
    """RELEASE:ARM of each release that the rollout takes part in, separated by commas."""
    texts: dict[str, str]
    """SHA-256 of each prompt as the agent sent it, by resource."""


class PendingPins:
    """Pins that were given while the tape took none, by rollout: kept in memory until it does. For the event loop, but
    for the function that `pin_writer` returns.

    They are written with the next span of their rollout, in one transaction: a killed gateway must leave no span on the
    tape with a version that the rollout's pins do not name. A rollout may make no other call, and one that has seen two
    versions must be marked: so all pins are also written a moment later.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pins: dict[str, Sequence[Pin]] = {}
        self._writing = False
        self._most = _AT_ONCE

    def add(self, rollout: str, pins: Sequence[Pin]) -> None:
        """Replace the pending pins of a rollout: all that it has now."""
        if len(self._pins) < _MOST or rollout in self._pins:
            self._pins[rollout] = pins
        if not self._writing:
            self._writing = True
            self._write_later()

    def forget(self, rollout: str) -> None:
        """Drop the pending pins of a forgotten rollout."""
        self._pins.pop(rollout, None)

    def pin_writer(self, rollout: str) -> Callable[[Transaction, SpanEntry], None] | None:
        """Return the function that writes the pins in the transaction of the rollout's next span; None for no pins."""
        pins = self._pins.get(rollout)
        return None if pins is None else partial(_with_span, pins)

    def _write_later(self) -> None:
        _ = asyncio.get_running_loop().call_later(_RETRY_S, self._write)

    def _write(self) -> None:
        some = list(islice(self._pins.items(), self._most))

        def pin(transaction: Transaction) -> None:
            for rollout, pins in some:
                _pin(transaction, rollout, pins)

        self._recorder.submit(pin).add_done_callback(partial(self._written, some))

    def _written(self, some: list[tuple[str, Sequence[Pin]]], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if isinstance(error, TapeError) and not isinstance(error, DamagedRecordError):
            self._write_later()
            return
        if error is not None and len(some) > 1:
            # One of them fails: written one by one, they show which.
            self._most = 1
            self._write()
            return
        for rollout, pins in some:
            if error is not None:
                _log.error("the versions of rollout %s are not on the tape", rollout, exc_info=error)
            if self._pins.get(rollout) is pins:
                del self._pins[rollout]
        self._writing = bool(self._pins)
        if error is not None or not self._writing:
            self._most = _AT_ONCE
        if self._writing:
            self._write()


def _pin(transaction: Transaction, rollout: str, pins: Sequence[Pin]) -> None:
    _ = ReleaseOperations(transaction).pin(PinRequest(rollout, _NOBODY, (), pins), 0)


def _with_span(pins: Sequence[Pin], transaction: Transaction, entry: SpanEntry) -> None:
    try:
        _pin(transaction, entry.rollout, pins)
    except (DamagedRecordError, OperationRefusedError, ValueError) as error:
        # The span is written all the same; `PendingPins` logs the error.
        _log.debug("the versions of rollout %s are not on the tape with its span", entry.rollout, exc_info=error)


class PinTable:
    """The catalog and the recent pins."""

    def __init__(
        self,
        tape: CatalogReader,
        recorder: Recorder,
        metrics: Metrics,
        redactor: Redactor,
        repaired: Callable[[], asyncio.Future[None]],
        gave: Callable[[str, list[dict[str, Any]]], None],
    ) -> None:
        """`redactor` masks recorded data; the baggage entries that name units are hidden there. `repaired` is called
        when a server does not know the version that it was sent; its future is done when servers have been compared.
        `gave` tells the other workers the versions of a rollout that was given them while the tape took no pin
        (`assigned_by_peer`)."""
        self._tape = tape
        self._recorder = recorder
        self._metrics = metrics
        self._redactor = redactor
        self.repair, self._assigned = repaired, gave
        self._pins: OrderedDict[str, list[Pin]] = OrderedDict()
        self._units: OrderedDict[tuple[str, str], list[Pin]] = OrderedDict()
        """Pins of units of rollouts, by release and unit."""
        self._unwritten = PendingPins(recorder)
        self._reloading = asyncio.Lock()
        self.notes = CallNotes()
        """Uses of registered prompts, until they are added up."""
        self.catalog = Catalog({}, ())

    async def reload(self) -> None:
        """Called when a resource or a release has changed. A thread reads them: a thousand long prompts would hold up
        calls."""
        async with self._reloading:
            self.catalog = await asyncio.to_thread(self._read)
            self._redactor.hide_baggage(self.catalog.units)

    def _read(self) -> Catalog:
        return Catalog(self._tape.resources(), self._tape.releases())

    # -- resources that a call uses ---------------------------------------------------------------------------------

    def find(self, call: CallRequest, explicit: str | None) -> ResourceUse | None:
        """Return the resources of the catalog that a call uses, None for none. `explicit`: the prompt that its header
        names."""
        catalog, found = self.catalog, ResourceUse([], None, None)
        if catalog.templates:
            found.prompts = findings = find_resources(call.body, call.dialect, catalog.recogniser, explicit)
            # This comes first, because it reads the model's name too.
            call.peeked = call.peeked or findings.asked
            found.resources = list(
                dict.fromkeys(it.resource for it in findings.uses if it.resource in catalog.templates)
            )
            if not found.resources:
                # Other texts are counted when the request is written.
                found.noted = True
                self._count_unused(call, findings)
        if catalog.models and call.model in catalog.models:
            found.model = call.model
            found.resources.append(call.model)
        return found if found.resources else None

    def _count_unused(self, call: CallRequest, findings: TextFindings) -> None:
        """Count the texts of a call of which none is to be written."""
        misses = [*findings.misses, *(TextMiss(use.place, "unknown", "", use.resource) for use in findings.uses)]
        for miss in misses:
            self._metrics.prompt_misses[(miss.why,)] += 1
        if misses:
            self.notes.add(call.address.rollout, (), misses)
        if findings.unread is not None:
            self._metrics.prompt_misses[(findings.unread,)] += 1
            given = {pin.resource for pin in self._pins.get(call.address.rollout, ())}
            self.notes.add_unread(call.address.rollout, findings.unread, given & self.catalog.templates.keys())

    # -- versions that a call is given ------------------------------------------------------------------------------

    def pinned(self, call: CallRequest, found: ResourceUse) -> dict[str, Pin] | None:
        """Return the pins of the resources that it uses; None when the rollout must be pinned first."""
        pins = self._pins.get(call.address.rollout)
        if pins is None:
            return None
        self._pins.move_to_end(call.address.rollout)
        agent = call.address.agent or ""
        mine = {pin.resource: pin for pin in pins if pin.agent == agent}
        for resource in found.resources:
            pin = mine.get(resource)
            if pin is None or self.catalog.rolled_back(pin):
                return None
        return mine

    def rolled_back(self, found: ResourceUse, pins: Mapping[str, Pin]) -> bool:
        """True if a call with these pins must get other versions by now."""
        return any(self.catalog.rolled_back(pins[name]) for name in found.resources)

    def pin(self, call: CallRequest, found: ResourceUse, now: int) -> asyncio.Future[list[Pin]]:
        """Pin the rollout of a call; the future is done when that is durable. Its pins are remembered."""
        wanted = PinRequest(
            call.address.rollout,
            _asker(call, found),
            tuple(found.resources),
            tuple(self._pins.get(call.address.rollout, ())),
        )
        pinning = self._recorder.submit(lambda transaction: ReleaseOperations(transaction).pin(wanted, now))
        pinning.add_done_callback(lambda done: self._remember(wanted, done))
        return asyncio.ensure_future(self._known(pinning))

    async def _known(self, pinning: asyncio.Future[list[Pin]]) -> list[Pin]:
        """Wait for the pins, and first reload what another process has registered or released at this moment."""
        pins = await pinning
        if not all(map(self.catalog.has, pins)):
            await self.reload()
        return pins

    def forget(self, rollout: str) -> None:
        """Forget the pins of a rollout; another one of its name gets its own."""
        self._pins.pop(rollout, None)
        self._unwritten.forget(rollout)

    def _remember(self, wanted: PinRequest, done: asyncio.Future[list[Pin]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        _keep(self._pins, wanted.rollout, done.result())
        for pin in done.result():
            if pin.release is not None and pin.unit is not None:
                _keep(self._units, (pin.release, pin.unit), done.result())

    def fallback_pins(self, call: CallRequest, found: ResourceUse, error: BaseException) -> dict[str, Pin]:
        """Return the stable versions, for a call that goes on although the tape takes no pin, unless its rollout names
        others, or it or its unit is on an arm already. They are kept in memory, and on the tape when it takes them."""
        if not isinstance(error, TapeError):
            _log.error("rollout %s could not be pinned", call.address.rollout, exc_info=error)
        asker, named = _asker(call, found), dict[str, str]()
        with suppress(TapeError):
            if (rollout := self._tape.rollout(call.address.rollout)) is not None:
                asker = asker._replace(mode=rollout.mode, metadata=rollout.metadata or {})
                named = rollout.config.versions
        with suppress(TapeError):
            # The tape can still be read. Another or earlier process may have written pins that this one never knew.
            self._learn(call.address.rollout, self._tape.pins(call.address.rollout))
        pins = list(map(self._fallen_back, self._pins.get(call.address.rollout, [])))
        for resource in found.resources:
            mine = [pin for pin in pins if pin.resource == resource]
            if all(pin.agent != asker.agent for pin in mine):
                version = stable_version(self.catalog.stable[resource], asker)
                made = Pin(resource=resource, version=named.get(resource, version))
                if resource not in named or not self.catalog.has(made):
                    known = [*mine, *self._pins_of_unit(resource, asker)]
                    other = next((pin for pin in known if self._covers(pin, asker)), None)
                    made = Pin(resource=resource, version=version) if other is None else other
                pins.append(made.model_copy(update={"agent": asker.agent}))
        _keep(self._pins, call.address.rollout, pins)
        self._assigned(call.address.rollout, [pin.model_dump() for pin in pins])
        self._unwritten.add(call.address.rollout, pins)
        return {pin.resource: pin for pin in pins if pin.agent == asker.agent}

    def assigned_by_peer(self, rollout: str, pins: Iterable[Mapping[str, Any]]) -> None:
        """Remember pins that another worker has given a rollout while the tape took none. The worker that has the
        rollout's next span writes them."""
        given = list(map(Pin.model_validate, pins))
        self._learn(rollout, given)
        self._unwritten.add(rollout, given)

    def pin_writer(self, rollout: str) -> Callable[[Transaction, SpanEntry], None] | None:
        """Return the function that writes pending pins with the next span of a rollout (`PendingPins`); None
        for none."""
        return self._unwritten.pin_writer(rollout)

    def _learn(self, rollout: str, pins: Iterable[Pin]) -> None:
        known = self._pins.get(rollout, [])
        mine = {(pin.agent, pin.resource) for pin in known}
        new = [pin for pin in pins if (pin.agent, pin.resource) not in mine and self.catalog.has(pin)]
        _keep(self._pins, rollout, [*known, *new])

    def _pins_of_unit(self, resource: str, asker: Requester) -> Iterator[Pin]:
        """Yield the pins of a resource that a call's unit has in live releases."""
        for release in self.catalog.releases.values():
            if release.live and resource in release.resources and (unit := unit_of(release, asker)) is not None:
                pins = self._units.get((release.id, unit)) or self._stored_unit(release, unit, asker)
                yield from (pin for pin in pins if pin.resource == resource and pin.release == release.id)

    def _stored_unit(self, release: Release, unit: str, asker: Requester) -> list[Pin]:
        """Return the pins of a unit on the tape; none if it cannot be read."""
        with suppress(TapeError):
            found = self._tape.unit(release.id, unit)
            return [] if found is None else pins_on(release, found, asker.agent)
        return []

    def has_adapter(self, versions: Mapping[str, str]) -> bool:
        """True if one of these versions is an adapter, which a server can lose."""
        models = self.catalog.models
        return any(name in models and models[name][version].adapter for name, version in versions.items())

    def _fallen_back(self, pin: Pin) -> Pin:
        if not self.catalog.rolled_back(pin) or pin.release is None:
            return pin
        stable = self.catalog.releases[pin.release].arm_versions("stable")
        return pin.model_copy(update={"version": stable[pin.resource], "mixed": True})

    def _covers(self, pin: Pin, asker: Requester) -> bool:
        """True if the release of another agent's pin includes this agent too. Mode and metadata are the rollout's."""
        release = None if pin.release is None else self.catalog.releases.get(pin.release)
        if release is None:
            return False
        return audience_includes(Audience(agents=release.only.agents, models=release.only.models), asker)

    # -- the request to send -----------------------------------------------------------------------------------------

    def versioned_request(self, call: CallRequest, found: ResourceUse, pins: Mapping[str, Pin]) -> VersionedRequest:
        """Return the request with the versions of its rollout in it."""
        given = {name: pins[name].version for name in found.resources}
        made, weights = self.catalog.rewrite(call.body, found.prompts, found.model, given, call.form)
        for use in made.uses:
            self._metrics.prompt_rewrites[(use.matched_by,)] += 1
        texts = {use.resource: use.sha256 for use in made.uses}
        if not found.noted:
            for miss in made.misses:
                self._metrics.prompt_misses[(miss.why,)] += 1
            self.notes.add(call.address.rollout, texts.keys(), made.misses)
        versions = {name: given[name] for name in (*texts, *([] if found.model is None else [found.model]))}
        arms = sorted({f"{pin.release}:{pin.arm}" for name in versions if (pin := pins[name]).release is not None})
        return VersionedRequest(
            made.body, () if weights is None else weights.upstreams, versions, ",".join(arms) or None, texts
        )


def _keep(kept: OrderedDict[K, list[Pin]], key: K, pins: list[Pin]) -> None:
    """Remember pins; the least recently used ones are dropped."""
    kept[key] = pins
    kept.move_to_end(key)
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)


def _asker(call: CallRequest, found: ResourceUse) -> Requester:
    """Return the asker of a call; whoever reads the tape adds the facts of its rollout that only the tape has."""
    model = found.model or call.model or ""
    return Requester(call.address.agent or "", model, call.address.mode, {}, call.baggage)
