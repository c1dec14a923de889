"""The gateway's own requests: sent once, read whole, and kept. Nothing is ever repeated.

Every request becomes a span, as calls of agents do, but in a rollout of the release's own (`RELEASE-replay`,
`RELEASE-rehearsal`, `RELEASE-shadow`, mode `test`) that has no rewards and takes part in no release. It has one attempt
for each time that the stage is entered. Calls on the tape count towards the budget, so no restart doubles it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import aiohttp
from yarl import URL

from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import AttemptStatus, Outcome
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.trials.replay.outbound_requests import OutboundRequest, compose
from penstock.gateway.traffic.trials.replay.replies import LARGEST, Reply, ReplyTooLarge, complete
from penstock.gateway.traffic.upstreams.gate import UpstreamGate
from penstock.gateway.traffic.upstreams.pool import CONNECT_S, ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteTable
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.http.errors import Refusal
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.work.queue.operations import QueueOperations

T = TypeVar("T")
LONGEST_S: Final = 3600.0
"""An answer that is not whole by then is given up, unless the upstream may be silent for longer: a silent stream that
stays alive would never end."""
_UNTOUCHED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(frozen=True, slots=True)
class ReleaseContext:
    """The parts of the gateway that its own requests need."""

    tape: Store
    pins: PinTable
    recorder: Recorder
    pools: Mapping[str, ConnectionPool]
    routes: RouteTable
    session: Callable[[], aiohttp.ClientSession]
    now_ns: Callable[[], int]
    """The clock of the tape, in ns since the epoch."""
    redactor: Redactor = field(default_factory=Redactor)


@dataclass(frozen=True, slots=True)
class OutboundResult:
    """The result of a request, with the time it took."""

    turn: Turn | None
    """None when the request failed."""
    seconds: float
    problem: str | None = None
    """The reason of the failure, for people."""
    reply: Reply | None = None
    """The answer as it came; None when nothing was sent."""

    @property
    def failed(self) -> bool:
        """True when there is nothing to compare."""
        return self.turn is None


class ReleaseSender:
    """Sends requests for one release, with a budget and few at a time; keeps the answers."""

    def __init__(self, context: ReleaseContext, release: Release, stage: str, budget: int, concurrency: int) -> None:
        """`stage`: `replay`, `rehearsal` or `shadow`; `budget`: requests at most."""
        # A release's name may be as long as a rollout's; its number is at the end.
        self.rollout = f"{release.id[-118:]}-{stage}"
        self.attempt = f"a{release.revision}"
        self.spent = 0
        self.left = budget
        """Requests that may still be reserved."""
        self._context = context
        self._slots = asyncio.Semaphore(concurrency)

    async def earlier_requests(self) -> list[Span]:
        """Return the requests of this stage before the gateway was restarted; they count."""
        found = await background(lambda: list(self._context.tape.spans(self.rollout, self.attempt)))
        self.spent += len(found)
        self.left -= len(found)
        return found

    def reserve(self, requests: int) -> bool:
        """Reserve a part of the budget; False when less is left."""
        if requests > self.left:
            return False
        self.left -= requests
        return True

    def release(self, requests: int) -> None:
        """Give back reserved requests that were not used."""
        self.left += requests

    async def ask(self, question: OutboundRequest) -> OutboundResult:
        """Send when a slot is free. The request is on the tape when this returns, or is cancelled."""
        async with self._slots:
            self.spent += 1
            entry, began = self._opened(question), time.monotonic()
            try:
                reply = await self._send(question, began)
                seconds, entry.end_ns = time.monotonic() - began, self._context.now_ns()
                turn, problem = await background(lambda: complete(question, reply, entry, self._context.redactor))
            except asyncio.CancelledError:
                entry.status, entry.error, entry.end_ns = "cancelled", "stopped", self._context.now_ns()
                self._context.recorder.put(_RecordableEntry(entry))
                raise
            await self._keep(entry)
            return OutboundResult(turn, seconds, problem, reply)

    def _opened(self, question: OutboundRequest) -> SpanEntry:
        entry = SpanEntry(self.rollout, self.attempt, mode="test", start_ns=self._context.now_ns())
        entry.dialect, entry.method = question.dialect.name, question.request.method
        entry.path, entry.upstream = redact_url(question.path), question.pool.name
        entry.model, entry.agent = question.model, question.agent
        entry.versions, entry.attributes = dict(question.versions) or None, dict(question.attributes)
        entry.request_bytes = len(question.body)
        body = self._context.redactor.tape.hide(question.body)
        entry.body = StoredBody(redact_url(question.pool.url(question.path)), b"", body, b"", b"", b"", [])
        return entry

    async def _send(self, question: OutboundRequest, began: float) -> Reply:
        pool, dialect = question.pool, question.dialect
        target, headers = compose(question)
        reply = Reply(headers, streaming_content_type=dialect.streaming_content_type)
        longest_s = max(LONGEST_S, pool.config.read_timeout)
        bounds = aiohttp.ClientTimeout(total=longest_s, sock_connect=CONNECT_S, sock_read=pool.config.read_timeout)
        try:
            if pool.gate.must_wait:
                await _open(pool.gate)
            async with self._context.session().request(
                question.request.method,
                URL(pool.origin + target, encoded=True),
                data=question.body,
                headers=[(name.decode("latin-1"), _as_sent(value)) for name, value in reply.sent],
                skip_auto_headers=_UNTOUCHED,
                timeout=bounds,
                allow_redirects=False,
                auto_decompress=False,
                **pool.transport.options,
            ) as response:
                reply.status, reply.headers = response.status, list(response.raw_headers)
                async for piece in response.content.iter_any():
                    reply.receive(piece, time.monotonic() - began)
        except Refusal as refusal:
            reply.error, reply.problem = refusal.kind, refusal.message
        except ReplyTooLarge:
            reply.error, reply.problem = "too_large", f"the answer is larger than {LARGEST} bytes"
        except TimeoutError as error:
            reply.error, reply.problem = "timeout", str(error) or f"the answer was not whole within {longest_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: an invalid host name (UnicodeError).
            reply.error = "upstream_closed" if reply.status else "connect"
            reply.problem = str(error) or type(error).__name__
        return reply

    async def close(self, why: str) -> None:
        """End the sending for a reason; no request may follow."""
        if self.spent:
            name, now = (self.rollout, self.attempt), self._context.now_ns()
            end = AttemptStatus.SUCCEEDED, Outcome(reason=why[:2000])
            with suppress(OperationRefusedError):
                await self._context.recorder.submit(
                    lambda transaction: QueueOperations(transaction).finish(name, None, *end, [], now)
                )

    async def _keep(self, entry: SpanEntry) -> None:
        """Wait until the request is on the tape: a full queue slows down this sender and nobody else."""
        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._context.recorder.put(_RecordableEntry(entry), lambda done: None if kept.done() else kept.set_result(done))
        await kept


def _as_sent(value: bytes) -> str:
    # aiohttp writes UTF-8.
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def background(do: Callable[[], T]) -> T:
    """Run something on a thread. Even when cancelled it waits for the thread: the tape may be closed afterwards."""
    working = asyncio.ensure_future(asyncio.to_thread(do))
    try:
        return await asyncio.shield(working)
    finally:
        if not working.done():
            await asyncio.wait([working])


class _GateWaiter:
    """A request that waits at the gate of an upstream whose weights are being changed."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def on_refused(self, refusal: Refusal) -> None:
        if not self.opened.done():
            self.opened.set_exception(refusal)


async def _open(gate: UpstreamGate) -> None:
    """Wait at the gate as agents' calls do; raises `Refusal`."""
    waiting = _GateWaiter()
    gate.wait(waiting)
    try:
        await waiting.opened
    finally:
        gate.leave(waiting)


class _RecordableEntry:
    """A complete entry, for the recorder."""

    def __init__(self, entry: SpanEntry) -> None:
        self._entry = entry
        body = entry.body
        self.weight = 0 if body is None else 2 * len(body.request) + len(body.response)

    def entry(self, final: bool) -> SpanEntry:
        return self._entry
