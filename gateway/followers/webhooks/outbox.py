"""Deliveries on the tape, as operations inside a write transaction, and reading them.

Deliveries follow from the audit chains. `told` has the last link of each release of which deliveries were made; later
links are made deliveries in one transaction. So after a crash no link is delivered twice or left out, whenever it was
written. A new webhook gets no links from before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from penstock.gateway.followers.webhooks.retry import give_up
from penstock.gateway.followers.webhooks.sender import event_of, id_of
from penstock.gateway.model.base import parse_record
from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.model.webhook import Delivery, ReleaseEvent
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader, descending_slice
from penstock.gateway.tape.store.transaction import Transaction

DELIVERIES, TOLD = "deliveries", "told"
KEPT: Final = 10_000
"""Deliveries that the tape keeps: the newest of all webhooks, and those that still wait."""
NOTE: Final = "webhooks"
"""The note on the tape with the names of the webhooks at the last start."""
_SLICE: Final = 256
_log = logging.getLogger("penstock.webhooks")

Subscriptions = Mapping[str, Collection[ReleaseEvent]]
"""The events of each webhook, by its name."""


class Outbox:
    """The operations on deliveries in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def begin(self, wanted: Subscriptions) -> list[Delivery]:
        """Return the deliveries that an earlier process has left; webhooks that it did not have begin here."""
        stored = self._tape.get("meta", b"note " + NOTE.encode())
        known: list[str] = [] if stored is None else json.loads(stored)
        releases = [key.decode() for key, _ in self._tape.scan("releases")] if wanted else []
        made = self.collect(releases, {name: events for name, events in wanted.items() if name in known})
        if known != list(wanted):
            self._tape.put("meta", b"note " + NOTE.encode(), json.dumps(list(wanted)).encode())
            self._give_up(wanted)
        return made

    def _give_up(self, wanted: Subscriptions) -> None:
        """Give up waiting deliveries to webhooks that are not configured any more."""
        stored = _readable(record for _, record in self._tape.scan(DELIVERIES))
        for one in [one for one in stored if one.status == "waiting" and one.webhook not in wanted]:
            self.put(give_up(one, "the webhook is not configured any more"))

    def collect(self, releases: Iterable[str], wanted: Subscriptions) -> list[Delivery]:
        """Make deliveries of all new links of these releases, in their order."""
        links = sorted((link for name in releases for link in self._links(name)), key=lambda link: link[1].at_ns)
        return [
            self._made(release, entry, event, name)
            for release, entry in links
            if (event := event_of(entry)) is not None
            for name, events in wanted.items()
            if event in events
        ]

    def _links(self, name: str) -> list[tuple[str, AuditTrailEntry]]:
        """Return the new links of a release's chain, and mark them as collected."""
        stored = self._tape.get("releases", name.encode())
        told, there = int.from_bytes(self._tape.get(TOLD, name.encode()) or b""), _revision(stored)
        if there > told:
            self._tape.put(TOLD, name.encode(), keys.u32(there))
        found = (self._link(name, number) for number in range(told + 1, there + 1))
        return [(name, link) for link in found if link is not None]

    def _link(self, name: str, number: int) -> AuditTrailEntry | None:
        """Return a link; None for a damaged one, which must not hold up those that follow, of this release and of
        others."""
        stored = self._tape.get("audit", keys.numbered_key(name, number))
        entry = parse_record(AuditTrailEntry, stored)
        if entry is None and stored is not None:
            _log.error("no webhook is told of entry %d of release %s: it cannot be read", number, name)
        return entry

    def _made(self, release: str, entry: AuditTrailEntry, event: ReleaseEvent, webhook: str) -> Delivery:
        number = self._tape.last(DELIVERIES) + 1
        made = Delivery(
            number=number,
            webhook=webhook,
            id=id_of(entry),
            event=event,
            release=release,
            entry=entry.number,
            made_ns=entry.at_ns,
        )
        self._tape.put(DELIVERIES, keys.number(number), _record(made), append=True)
        self._forget(number - KEPT)
        return made

    def _forget(self, upto: int) -> None:
        """Delete old finished deliveries: two at a time, to catch up after an old one was in the way."""
        oldest = list(islice(self._tape.scan(DELIVERIES), 2)) if upto > 0 else []
        for key, record in oldest:
            if keys.to_number(key) <= upto and all(one.status != "waiting" for one in _readable([record])):
                self._tape.delete(DELIVERIES, key)

    def put(self, delivery: Delivery) -> None:
        """Write the state of a delivery."""
        self._tape.put(DELIVERIES, keys.number(delivery.number), _record(delivery))


def _revision(release: bytes | None) -> int:
    found = parse_record(Release, release)
    return 0 if found is None else found.revision


def _readable(records: Iterable[bytes]) -> Iterator[Delivery]:
    """Yield the readable deliveries: a damaged one cannot be known, and others must not wait for it."""
    return (found for record in records if (found := parse_record(Delivery, record)) is not None)


def _record(delivery: Delivery) -> bytes:
    return delivery.model_dump_json(exclude_defaults=True).encode()


class OutboxReader:
    """The deliveries on a tape."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    def newest(self) -> Iterator[Delivery]:
        """Yield all deliveries, newest first."""
        start = None
        while True:
            with self._tape.view() as view, view.cursor(DELIVERIES) as cursor:
                found = descending_slice(cursor, start, _SLICE)
            yield from _readable(record for _, record in found)
            if len(found) < _SLICE:
                return
            start = found[-1][0]

    def waiting(self) -> list[Delivery]:
        """Return the deliveries that were neither taken nor given up, oldest first."""
        return [one for one in self.newest() if one.status == "waiting"][::-1]

    def was_configured(self) -> bool:
        """True if the gateway had webhooks when it last started."""
        return (self._tape.note(NOTE) or b"[]") != b"[]"

    def links(self) -> int:
        """Return the number of links of all audit chains."""
        with self._tape.view() as view:
            return view.count("audit")

    def releases_behind(self) -> list[str]:
        """Return the releases with links of which no deliveries were made."""
        with self._tape.view() as view:
            told = {key: int.from_bytes(record) for key, record in view.scan(TOLD)}
            return [key.decode() for key, it in view.scan("releases") if _revision(it) > told.get(key, 0)]

    def link(self, delivery: Delivery) -> tuple[Release, AuditTrailEntry] | None:
        """Return the release and the link of a delivery; None where the tape has lost one, or it cannot be read."""
        with self._tape.view() as view:
            release = view.get("releases", delivery.release.encode())
            entry = view.get("audit", keys.numbered_key(delivery.release, delivery.entry))
        found, link = parse_record(Release, release), parse_record(AuditTrailEntry, entry)
        return None if found is None or link is None else (found, link)
