"""Webhooks: messages to others about changes of releases, at least once, and those of one release in their order.

One task follows the tape: each link of an audit chain becomes deliveries (`Outbox`). Each webhook and release has a
*lane*, a queue with a task of its own while there is something in it: a delivery is sent (`WebhookSender`) until it is
taken or given up, then the next one. A webhook that takes nothing, or only slowly, holds up neither others nor the
releases, which know nothing of all this. A delivery whose result was not written when the gateway died is sent again.

A tape has one gateway (`store.directory`), so nobody else sends.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import random
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.client import responses
from itertools import islice
from time import monotonic, time
from typing import Final, NamedTuple

import aiohttp

from penstock.gateway.model.base import parse_record
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import (
    RELEASE_EVENTS,
    AuditTrailEntry,
    Delivery,
    Release,
    ReleaseChangeData,
    ReleaseEvent,
    WebhookMessage,
    WebhookTestData,
    WebhookTestResult,
    WebhookView,
)
from penstock.gateway.model.settings import Webhook
from penstock.gateway.model.times import Backoff
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.reader import StoreReader, descending_slice
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.wire.http.request import retry_after

AT_ONCE: Final = 4
"""Requests to a webhook at a time."""
BETWEEN_S, RETRY_S, GRACE_S = 0.05, 1.0, 2.0
"""Seconds between two looks at the tape; until a tape that failed is read again; that requests may still take when the
gateway stops."""
_log = logging.getLogger("penstock.webhooks")


class DeliveryLane(NamedTuple):
    """A webhook and a release, whose deliveries are sent in order."""

    webhook: str
    release: str


class WebhookService:
    """All webhooks of a gateway. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        hooks: Sequence[Webhook],
        tape: StoreReader,
        recorder: Recorder,
        feed: ChangeFeed,
        metrics: Metrics,
        now_ns: Callable[[], int],
    ) -> None:
        """Raises `ConfigError` when a secret is missing or invalid."""
        self._hooks = {hook.name: hook for hook in hooks}
        self._keys = {hook.name: hook.keys() for hook in hooks}
        self._wanted = {hook.name: frozenset(hook.events) for hook in hooks}
        self.reader = OutboxReader(tape)
        self._recorder, self._feed, self._metrics, self._now_ns = recorder, feed, metrics, now_ns
        self._sender = WebhookSender()
        self._places = {hook.name: asyncio.Semaphore(AT_ONCE) for hook in hooks}
        self._quiet_ns: dict[str, int] = {}
        """Time until which a webhook has asked for no messages."""
        self._gone: set[str] = set()
        """Webhooks that want no more messages: until the gateway starts again, or a test is taken."""
        self._lanes: dict[DeliveryLane, deque[Delivery]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = False
        self._following: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Continue the deliveries that an earlier process has left."""
        if not self._hooks and not self.reader.was_configured():
            return
        self._sender.open()
        try:
            await self._begin()
        except TapeError as error:
            _log.error("webhooks wait for the tape: %s", error)
        self._following = asyncio.ensure_future(self._follow())

    async def _begin(self) -> None:
        await self._recorder.submit(lambda tape: Outbox(tape).begin(self._wanted))
        for delivery in await asyncio.to_thread(self.reader.waiting):
            self._add(delivery)
        self._begun = True

    async def stop(self) -> None:
        """Let requests under way end, for at most `GRACE_S`; the rest is sent after the next start."""
        self._stopping.set()
        if self._following is not None:
            await cancel_all([self._following])
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        await cancel_all(list(self._tasks))
        await self._sender.close()

    # -- pending deliveries -------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        links, cursor, said = -1, self._feed.cursor, ""
        while True:
            try:
                if (now := self.reader.links()) != links:
                    await self._collect()
                    links = now
                # While calls are recorded there is a commit every few milliseconds.
                await asyncio.sleep(BETWEEN_S)
                cursor, said = await self._feed.wait(cursor), ""
            except TapeError as error:
                if str(error) != said:
                    said = str(error)
                    _log.error("webhooks wait for the tape: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                _log.exception("webhooks are told nothing for now")
                await asyncio.sleep(RETRY_S)

    async def _collect(self) -> None:
        if not self._begun:
            await self._begin()
        names = await asyncio.to_thread(self.reader.releases_behind)
        if names:
            for delivery in await self._recorder.submit(lambda tape: Outbox(tape).collect(names, self._wanted)):
                self._add(delivery)

    def _add(self, delivery: Delivery) -> None:
        lane = DeliveryLane(delivery.webhook, delivery.release)
        if lane not in self._lanes:
            self._lanes[lane] = deque()
            task = asyncio.ensure_future(self._run(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._lanes[lane].append(delivery)
        self._measure(lane.webhook)

    def _measure(self, webhook: str) -> None:
        waiting = sum(len(queue) for lane, queue in self._lanes.items() if lane.webhook == webhook)
        self._metrics.webhook_waiting[(webhook,)] = waiting

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _run(self, lane: DeliveryLane) -> None:
        """Send the deliveries of a lane, one after the other."""
        queue = self._lanes[lane]
        while queue and await self._due(queue[0]):
            try:
                queue[0] = await self._attempt(queue[0])
            except Exception:
                _log.exception("delivery %d to webhook %s could not be sent", queue[0].number, lane.webhook)
                now = self._now_ns()
                queue[0] = apply_result(queue[0], _UNSENT, now, now, random.uniform(0.5, 1.5))
            if queue[0].status != "waiting":
                queue.popleft()
            self._measure(lane.webhook)
        if not queue:
            del self._lanes[lane]
            self._measure(lane.webhook)

    async def _due(self, delivery: Delivery) -> bool:
        """Wait until a delivery may be sent; False when the gateway stops."""
        while not self._stopping.is_set():
            due = max(delivery.next_ns or 0, self._quiet_ns.get(delivery.webhook, 0))
            seconds = (due - self._now_ns()) / 1e9
            if seconds <= 0:
                return True
            try:
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return False

    async def _attempt(self, delivery: Delivery) -> Delivery:
        """Send a delivery once, and write the result."""
        hook, sent_ns = self._hooks[delivery.webhook], self._now_ns()
        found = self.reader.link(delivery)
        if found is None:
            done = give_up(delivery, "its entry is not on the tape any more, or cannot be read")
        elif hook.name in self._gone:
            done = give_up(delivery, f"{GONE} before: it wants no more messages")
        else:
            async with self._places[hook.name]:
                answer = await self._sender.send(hook.url, self._keys[hook.name], delivery.id, message_body(*found))
            now = self._now_ns()
            done = apply_result(delivery, answer, sent_ns, now, random.uniform(0.5, 1.5))
            self._heed(hook.name, answer, now)
        self._tell(delivery, done)
        await self._keep(done)
        return done

    def _heed(self, webhook: str, answer: DeliveryResult, now: int) -> None:
        """Apply an answer to all messages of this webhook: it may want none any more, or a pause."""
        if answer.status == GONE:
            self._gone.add(webhook)
        if answer.error and answer.after_s:
            until = now + int(answer.after_s * 1e9)
            self._quiet_ns[webhook] = max(self._quiet_ns.get(webhook, 0), until)

    def _tell(self, before: Delivery, done: Delivery) -> None:
        outcome = "failed" if done.status == "waiting" else done.status
        self._metrics.webhook_deliveries[done.webhook, outcome] += 1
        what = f"{done.event} of release {done.release}"
        if done.status == "given_up":
            _log.error("webhook %s is not told of %s: given up: %s", done.webhook, what, done.error)
        elif done.status == "waiting" and before.failing_ns is None:
            _log.warning("webhook %s does not take %s (%s): trying for a day", done.webhook, what, done.error)

    async def _keep(self, delivery: Delivery) -> None:
        """Write a delivery. If it cannot be written, it is sent again after the next start, which is allowed."""
        try:
            await self._recorder.submit(lambda tape: Outbox(tape).put(delivery))
        except TapeError as error:
            _log.error("what became of delivery %d could not be kept: %s", delivery.number, error)

    # -- requests of people -------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of the configured webhooks."""
        return list(self._hooks)

    async def test(self, name: str) -> WebhookTestResult:
        """Send a test to a webhook, once; nothing of it gets on the tape. Raises `KeyError` when there is none."""
        hook, id = self._hooks[name], f"msg_{secrets.token_hex(16)}"
        began = monotonic()
        answer = await self._sender.send(hook.url, self._keys[name], id, trial_message(name, self._now_ns()))
        if not answer.error:
            self._gone.discard(name)
        seconds = monotonic() - began
        return WebhookTestResult(webhook=name, id=id, answer=answer.status, error=answer.error, seconds=seconds)

    def views(self) -> list[WebhookView]:
        """Return the state of each webhook."""
        return webhook_views(self._hooks.values(), self.reader.newest())


# Deliveries on the tape follow from the audit chains. `told` has the last link of each release of which deliveries
# were made; later links are made deliveries in one transaction. So after a crash no link is delivered twice or left
# out, whenever it was written. A new webhook gets no links from before.

DELIVERIES, TOLD = "deliveries", "told"
KEPT: Final = 10_000
"""Deliveries that the tape keeps: the newest of all webhooks, and those that still wait."""
NOTE: Final = "webhooks"
"""The note on the tape with the names of the webhooks at the last start."""
_SLICE: Final = 256


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


# One request, and its result, in words that hold no secret.

TIMEOUT_S: Final = 10.0
LARGEST_ANSWER: Final = 16 << 10
"""Bytes of an answer that are read, so that its connection can be used again; its content is not used."""


def signed_headers(keys: Iterable[bytes], id: str, seconds: int, body: bytes) -> dict[str, str]:
    """Return the headers of a request as Standard Webhooks 1.0 has them (https://www.standardwebhooks.com), signed with
    each key in order. `seconds`: time of sending, since the epoch."""
    signed = f"{id}.{seconds}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
    return {
        "Content-Type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }


class WebhookSender:
    """Sends messages. `open` before use, `close` after."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the client; on the loop."""
        # `WebhookService` bounds the requests at a time by webhook: a slow one takes no other's place.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, url: str, keys: list[bytes], id: str, body: bytes) -> DeliveryResult:
        """Send a message once and return the result."""
        assert self._session is not None, "open() comes first"
        signed = signed_headers(keys, id, int(time()), body)
        try:
            async with self._session.post(url, data=body, headers=signed, allow_redirects=False) as answer:
                asked = retry_after(answer.headers.get("Retry-After"), PATIENCE_NS / 1e9) or 0.0
                # The status is enough, even if the rest never comes.
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    _ = await answer.content.read(LARGEST_ANSWER)
                return DeliveryResult(answer.status, _refused(answer.status), asked)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return DeliveryResult(None, _failed(error))


def _refused(status: int) -> str:
    if 200 <= status < 300:
        return ""
    named = f"{status} {responses.get(status, '')}".rstrip()
    if 300 <= status < 400:
        return f"{named}: redirects are not followed; configure the address that it leads to"
    return f"{named}: it wants no more messages" if status == GONE else named


def _failed(error: Exception) -> str:
    """Return why there was no answer. Errors of the client may repeat a URL, so their own words are not shown."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted on this machine"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host has no address"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "no TLS could be agreed on"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or 'refused'}"
    return f"the connection broke off ({type(error).__name__})"


async def cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# The content of a message: a link of a release's audit chain, in JSON.

LONGEST: Final = 200
"""Characters of a text among the figures: receivers want small bodies."""
_RENAMED: Final = {"rollback": "roll_back"}
"""Actions of people that have another name among the rules."""


def event_of(entry: AuditTrailEntry) -> ReleaseEvent | None:
    """Return the event of an entry; None where no webhook can subscribe to it."""
    action = _RENAMED.get(entry.action, entry.action)
    return next((event for event in RELEASE_EVENTS if event == action), None)


def id_of(entry: AuditTrailEntry) -> str:
    """Return the message's id, which is the same each time that a link is sent."""
    return f"msg_{entry.hash[:32]}"


def message_body(release: Release, entry: AuditTrailEntry) -> bytes:
    """Return the body of the message about a link of the chain."""
    data = ReleaseChangeData(
        release=release.id,
        resource=release.resource,
        kind=release.kind,
        stable=release.stable,
        candidate=release.candidate,
        companions=release.companions,
        before=entry.before,
        after=entry.after,
        canary=release.policy.ramp[entry.step].name if entry.after == "canary" else None,
        split=entry.split,
        who=entry.who,
        key=entry.key,
        why=entry.why,
        figures=_figures(entry),
        number=entry.number,
        hash=entry.hash,
    )
    return _written(f"release.{event_of(entry)}", entry.at_ns, data)


def trial_message(webhook: str, now_ns: int) -> bytes:
    """Return the body of a test message."""
    return _written("webhook.test", now_ns, WebhookTestData(webhook=webhook))


def _figures(entry: AuditTrailEntry) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in entry.evidence.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:LONGEST]
    return found


def _written(kind: str, at_ns: int, data: ReleaseChangeData | WebhookTestData) -> bytes:
    at = datetime.fromtimestamp(at_ns // 1000 / 1e6, UTC).isoformat(timespec="microseconds")
    return WebhookMessage(type=kind, timestamp=at.replace("+00:00", "Z"), data=data).model_dump_json().encode()


# An answer means that a delivery is taken, sent again later, or given up.
#
# By Standard Webhooks 2xx takes a message, 410 wants no more of them, everything else is sent again. Pauses double,
# vary, and are as long as `Retry-After` asks for. A day after the change the message is sent for the last time, but
# each is sent once.

PAUSES: Final = Backoff(1.0, 3600.0)
PATIENCE_NS: Final = 24 * 3600 * 10**9
GONE: Final = 410


class DeliveryResult(NamedTuple):
    """The result of a request."""

    status: int | None
    """HTTP status; None where there was no answer."""
    error: str
    """The reason why the message was not taken; empty where it was."""
    after_s: float = 0.0
    """Seconds that the receiver asks to wait."""


_UNSENT: Final = DeliveryResult(None, "the gateway failed at it; its log says why")


def apply_result(delivery: Delivery, answer: DeliveryResult, sent_ns: int, now_ns: int, vary: float) -> Delivery:
    """Return the delivery after an attempt, which began at `sent_ns`. `vary`: a random factor between 0.5 and 1.5."""
    tried = delivery.model_copy(
        update={
            "attempts": delivery.attempts + 1,
            "tried_ns": sent_ns,
            "next_ns": None,
            "answer": answer.status,
            "error": answer.error,
        }
    )
    if not answer.error:
        return tried.model_copy(update={"status": "delivered"})
    tried.failing_ns = delivery.failing_ns or sent_ns
    last_ns = delivery.made_ns + PATIENCE_NS
    if answer.status == GONE or now_ns >= last_ns:
        return give_up(tried)
    seconds = max(PAUSES.after(tried.attempts, vary), answer.after_s)
    return tried.model_copy(update={"next_ns": min(now_ns + int(seconds * 1e9), last_ns)})


def give_up(delivery: Delivery, why: str = "") -> Delivery:
    """Return the delivery as given up."""
    return delivery.model_copy(update={"status": "given_up", "next_ns": None, "error": why or delivery.error})


def webhook_views(hooks: Iterable[Webhook], deliveries: Iterable[Delivery]) -> list[WebhookView]:
    """Return a view of each webhook, in the order given."""
    mine = {hook.name: (hook, list[Delivery]()) for hook in hooks}
    for delivery in deliveries:
        if delivery.webhook in mine:
            mine[delivery.webhook][1].append(delivery)
    return [_view(hook, found) for hook, found in mine.values()]


def _view(hook: Webhook, deliveries: Sequence[Delivery]) -> WebhookView:
    waiting = [one for one in deliveries if one.status == "waiting"]
    tried = sorted((one for one in deliveries if one.tried_ns is not None), key=lambda one: one.tried_ns or 0)
    taken = [one for one in tried if one.status == "delivered"]
    failing = [one for one in waiting if one.error]
    if not failing and tried and tried[-1].status == "given_up":
        failing = tried[-1:]
    return WebhookView(
        name=hook.name,
        url=hook.redacted_url,
        events=hook.events,
        waiting=len(waiting),
        oldest_ns=min((one.made_ns for one in waiting), default=None),
        failing_ns=min((one.failing_ns for one in failing if one.failing_ns is not None), default=None),
        error=max(failing, key=lambda one: one.tried_ns or 0).error if failing else "",
        next_ns=min((one.next_ns for one in failing if one.next_ns is not None), default=None),
        last=taken[-1] if taken else None,
        given_up=sum(one.status == "given_up" for one in deliveries),
    )
