"""The gateway's own requests: sent once, read whole, and kept. Nothing is ever repeated.

Every request becomes a span, as calls of agents do, but in a rollout of the release's own (`RELEASE-replay`,
`RELEASE-rehearsal`, `RELEASE-shadow`, mode `test`) that has no rewards and takes part in no release. It has one attempt
for each time that the stage is entered. Calls on the tape count towards the budget, so no restart doubles it.

The agent's tools are never run, whatever an answer calls. A request that would make the *provider* run something, or
change a conversation that it keeps, is not repeated (`unrepeatable`). The new span names the call that it repeats
(`gateway.model.facts`: ROLLOUT/ATTEMPT#SEQUENCE, of a rehearsal ROLLOUT/ATTEMPT) and its leg.
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

from penstock.gateway.model.known_secrets import BodyContext
from penstock.gateway.model.release import Arm, Release
from penstock.gateway.model.rollout import AttemptStatus, Outcome
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.turns import decode_body
from penstock.gateway.releases.catalog import Catalog, ModelTarget, TextFindings
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.traffic.calls.answer_masking import (
    mask_recorded_body,
    masked_facts,
    rescaled,
    unencoded,
    without_tokens,
)
from penstock.gateway.traffic.calls.call_request import ADDRESS_HEADERS
from penstock.gateway.traffic.upstreams.pool import CONNECT_S, ConnectionPool, UpstreamGate
from penstock.gateway.traffic.upstreams.routes import RouteTable
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.dialects import candidate_families
from penstock.gateway.wire.dialects.base import EVENT_STREAM, Dialect
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import loads, obj
from penstock.gateway.wire.dialects.parts import HASHED
from penstock.gateway.wire.dialects.websocket_messages import ClientMessageKind
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import HttpRequest, Refusal
from penstock.gateway.work.operations import QueueOperations

RUN = "penstock.rehearsal"
"""Attribute of a request that was made for an agent in rehearsal: its ROLLOUT/ATTEMPT."""
CANDIDATE, INCUMBENT, JUDGE = "candidate", "incumbent", "judge"
ARM_OF: Final[Mapping[str, Arm]] = {CANDIDATE: "candidate", INCUMBENT: "stable"}
"""The arm whose versions each leg has."""
DROPPED: Final = ADDRESS_HEADERS | {
    b"content-length",
    b"transfer-encoding",
    b"accept-encoding",
    b"content-encoding",
    b"idempotency-key",
    b"x-idempotency-key",
    b"x-stainless-retry-count",
    b"traceparent",
    b"tracestate",
}
"""Headers that hold for one request only: an idempotency key would bring the first answer again, and a repeated request
is sent without an encoding."""
LARGEST: Final = 64 << 20
"""Largest answer in bytes; a larger one is given up."""
_TOLD: Final = 300
"""Characters of an error that are kept: some servers repeat the whole request in theirs, and the audit keeps them."""
LONGEST_S: Final = 3600.0
"""An answer that is not whole by then is given up, unless the upstream may be silent for longer: a silent stream that
stays alive would never end."""
_UNTOUCHED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
T = TypeVar("T")


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
class OutboundRequest:
    """A request to an upstream."""

    pool: ConnectionPool
    dialect: Dialect
    request: HttpRequest
    """Its method and headers; keys are replaced by the upstream's own, where it has one."""
    path: str
    """Path and query below an address."""
    body: bytes
    attributes: Mapping[str, str]
    """Attributes of its span."""
    model: str | None = None
    """The model, by the agent's name."""
    agent: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions that are written in it, by resource."""
    families: tuple[Family, ...] = ()
    """Families that the agent's call may belong to, where it is not of its dialect's."""


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
            if pool.auth is not None:
                prepared = pool.auth.prepare(question.body)
                done = None if prepared is None else await prepared
                reply.sent += pool.auth.fields(question.request.method, target, reply.sent, question.body, done)
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


# -- the request -------------------------------------------------------------------------------------------------------


def compose(question: OutboundRequest) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return (path and query, headers) as a call would send them, without headers that hold for one request only."""
    pool, request = question.pool, question.request
    families = question.families or candidate_families(question.dialect, question.path, request.headers)
    head, _ = pool.heads.compose(request, pool.target(question.path).encode("latin-1"), None, None, families)
    first, *rest = head.split(b"\r\n")
    lines = [line.partition(b": ")[::2] for line in rest if line]
    kept = [(name, value) for name, value in lines if name.lower() not in DROPPED]
    return first.split(b" ")[1].decode("latin-1"), [*kept, (b"Accept-Encoding", b"identity")]


def call_name(rollout: str, attempt: str, sequence: int) -> str:
    """Return the name of a repeated call."""
    return f"{rollout}/{attempt}#{sequence}"


def without_masked_values(path: str) -> str:
    """Return a recorded path without the parameters whose values were masked: these are keys, and the upstream has its
    own."""
    head, _, query = path.partition("?")
    kept = "&".join(one for one in query.split("&") if not one.endswith("=***"))
    return f"{head}?{kept}" if kept else head


def rewrite(
    catalog: Catalog, body: bytes, prompts: TextFindings | None, model: str | None, versions: Mapping[str, str]
) -> tuple[bytes, ModelTarget | None] | str:
    """Return (a request with these versions of its resources, its weights), or why a version does not fit."""
    made, weights = catalog.rewrite(body, prompts, model, versions)
    if prompts is not None and len(made.uses) < len(prompts.uses):
        return f"a version cannot be written in: {made.misses[-1].detail}"
    return made.body, weights


_SERVER_FIELDS: Final = ("web_search_options", "plugins", "mcp_servers", "conversation", "background")
"""Fields by which the provider runs something, goes on by itself, or changes a conversation that it keeps."""


def unrepeatable(dialect: Dialect, body: bytes) -> str | None:
    """Return why a request must not be repeated; None when it may be."""
    asked = obj(loads(body))
    if not asked:
        return "its request is no JSON object"
    if HASHED in body:
        return 'the tape has only hashes of its media (media = "hash" of [tape])'
    if dialect.read_client_message(body).kind is not ClientMessageKind.OTHER:
        return "it was asked on a WebSocket, whose earlier answers it goes on from"
    for name in _SERVER_FIELDS:
        if asked.get(name):
            return f"the provider would act by itself ({name})"
    for kind in dialect.server_tools(asked):
        return f"the provider would run a tool of its own ({kind})"
    return None


# -- the answer, read by read, and its span ----------------------------------------------------------------------------


class ReplyTooLarge(Exception):
    """The answer is larger than `LARGEST` and is given up."""


@dataclass(slots=True)
class Reply:
    """An answer, as far as it came."""

    sent: list[tuple[bytes, bytes]]
    """The header lines of the request."""
    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    pieces: list[bytes] = field(default_factory=list[bytes])
    marks: list[int] = field(default_factory=list[int])
    size: int = 0
    error: str | None = None
    problem: str | None = None
    streaming_content_type: bytes = EVENT_STREAM
    """The media type of a stream in its dialect."""

    def receive(self, piece: bytes, seconds: float) -> None:
        """Add one read; raises `ReplyTooLarge`."""
        self.size += len(piece)
        if self.size > LARGEST:
            raise ReplyTooLarge
        self.pieces.append(piece)
        self.marks += (int(seconds * 1e6), len(piece))

    @property
    def body(self) -> bytes:
        """All bytes of the body so far."""
        return b"".join(self.pieces)

    @property
    def stream(self) -> bool:
        """True if it is a stream of events."""
        return self.header(b"content-type").lower().startswith(self.streaming_content_type.decode())

    def header(self, name: bytes) -> str:
        """Return the values of a header, separated by commas."""
        return ",".join(value.decode("latin-1") for key, value in self.headers if key.lower() == name)


def complete(
    question: OutboundRequest, reply: Reply, entry: SpanEntry, redactor: Redactor
) -> tuple[Turn | None, str | None]:
    """Complete the entry. Return (the exchange that was read, why it failed), of which one is None."""
    secrets = redactor.secrets(question.request.headers, question.path).for_call()
    encoding = reply.header(b"content-encoding")
    came = BodyContext(reply.header(b"content-type"), answer=True, cut=reply.error == "too_large")
    dialect, asked = question.dialect, secrets.hide(question.body)
    kept = mask_recorded_body(secrets, reply.body, encoding, about=came)
    stream = dialect.is_stream(reply.stream, question.body, question.path, kept.plain)
    if secrets.masked:
        asked, kept = secrets.without_tokens(asked, BodyContext()), without_tokens(secrets, kept, came)
        plain = decode_body(reply.body, encoding)[0] if encoding else reply.body
        facts = masked_facts(dialect, asked, kept.plain, stream, dialect.facts(question.body, plain, stream))
    else:
        facts = dialect.facts(asked, kept.plain, stream)
    if dialect.uses_headers:
        facts = dialect.with_headers(facts, reply.headers)
    turn = dialect.read(asked, kept.plain, stream)
    failed, problem = _failure(reply, turn, kept.plain, facts.failed)
    entry.status, entry.error = ("error", failed) if failed else ("ok", None)
    entry.http_status, entry.stream = reply.status, stream
    entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
    entry.usage, entry.tool_calls, entry.choices = facts.usage, facts.tool_calls, facts.choices
    entry.first_byte_ns = reply.marks[0] * 1000 if reply.marks else None
    entry.response_bytes, entry.truncated = reply.size, reply.error == "too_large"
    headers = unencoded(reply.headers) if kept.decoded else reply.headers
    entry.body = StoredBody(
        secrets.text(redact_url(question.pool.url(question.path))),
        secrets.block(redactor.block(reply.sent)),
        asked,
        secrets.block(redactor.block(headers)),
        kept.body,
        b"",
        rescaled(reply.marks, len(kept.body)) if kept.decoded else reply.marks,
    )
    if secrets.span_attributes:
        entry.attributes = {**(entry.attributes or {}), **secrets.span_attributes}
    return (None, problem or kept.problem) if failed else (turn, None)


def _failure(reply: Reply, turn: Turn, response: bytes, why: str | None) -> tuple[str | None, str | None]:
    """Return (short reason, a sentence) when there is no answer to compare."""
    if reply.error is not None:
        return reply.error, reply.problem
    if reply.status is None or reply.status >= 400:
        said = turn.error or response[:_TOLD].decode("utf-8", "replace")
        return f"http_{reply.status}", f"HTTP {reply.status}: {' '.join(said[:_TOLD].split())}"
    if why is not None:
        return why, (turn.error or "; ".join(turn.problems))[:_TOLD]
    if not turn.choices:
        return "no_answer", "; ".join(turn.problems) or "it holds no answer"
    return None, None
