"""Sends webhooks the changes of releases: at least once, and those of one release in their order.

One task follows the tape: each link of an audit chain becomes deliveries (`outbox`). Each webhook and release has a
*lane*, a queue with a task of its own while there is something in it: a delivery is sent until it is taken or given up,
  then the next one. A webhook that takes nothing, or only slowly, holds up neither others nor the releases, which know
  nothing of all this. A delivery whose result was not written when the gateway died is sent again.

A tape has one gateway (`store.directory`), so nobody else sends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple

from penstock.gateway.followers.webhooks import sender
from penstock.gateway.followers.webhooks.outbox import Outbox, OutboxReader
from penstock.gateway.followers.webhooks.retry import GONE, DeliveryResult, apply_result, give_up
from penstock.gateway.followers.webhooks.sender import WebhookSender, cancel_all
from penstock.gateway.followers.webhooks.views import views
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import Webhook
from penstock.gateway.model.webhook import Delivery, WebhookTestResult, WebhookView
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.recorder import Recorder

AT_ONCE: Final = 4
"""Requests to a webhook at a time."""
BETWEEN_S, RETRY_S, GRACE_S = 0.05, 1.0, 2.0
"""Seconds between two looks at the tape; until a tape that failed is read again; that requests may still take when the
gateway stops."""
_UNSENT: Final = DeliveryResult(None, "the gateway failed at it; its log says why")
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
                answer = await self._sender.send(hook.url, self._keys[hook.name], delivery.id, sender.body(*found))
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
        answer = await self._sender.send(hook.url, self._keys[name], id, sender.test_message(name, self._now_ns()))
        if not answer.error:
            self._gone.discard(name)
        seconds = monotonic() - began
        return WebhookTestResult(webhook=name, id=id, answer=answer.status, error=answer.error, seconds=seconds)

    def views(self) -> list[WebhookView]:
        """Return the state of each webhook."""
        return views(self._hooks.values(), self.reader.newest())
