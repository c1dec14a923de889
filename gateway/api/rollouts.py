"""The control API of rollouts: lists with filters and pages, single rollouts and spans, the exact bytes of a call; the
queue, its workers, and what they change.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal, get_args

from aiohttp import web
from pydantic import Field

from penstock.gateway.api import guard
from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, id_of, json_of, query_of, sequence_of
from penstock.gateway.api.openapi import OCTETS
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pagination import (
    SCAN,
    SCAN_BODIES,
    DeferredAnswer,
    PageRows,
    ReadRunner,
    T,
    TapeSource,
    Walk,
    decode_cursor,
    encode_cursor,
    index_lookup,
    named_rollouts,
    page,
    recent_walk,
    rollouts_walk,
    spans_walk,
    summary,
)
from penstock.gateway.client.exchanges import CallBytes, CallPart, Part, RolloutPart, SpanPart, pack
from penstock.gateway.model.answers import (
    AttemptList,
    Diagnosis,
    ExchangeBytes,
    ExchangeView,
    RolloutPage,
    SpanDetail,
    SpanPage,
)
from penstock.gateway.model.base import ID_PATTERN, ActionRequest, Noun, SpanKind
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.queue import (
    Claim,
    ClaimAnswer,
    ClaimRequest,
    EnqueueAnswer,
    EnqueueRequest,
    Event,
    EventsAnswer,
    EventsRequest,
    FeedbackAnswer,
    FeedbackRequest,
    FinishAnswer,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    QueueRequest,
    QueueStatus,
    RewardAnswer,
    WorkerList,
)
from penstock.gateway.model.rollout import LIVE, Attempt, Judgement, Outcome, Rollout, Worker, missing_rollout
from penstock.gateway.model.span import POLICY_VIOLATION, Span
from penstock.gateway.model.turn import Exchange, Side, Transcript, TranscriptCall
from penstock.gateway.reading.diagnosis.diagnosis import diagnose
from penstock.gateway.reading.filters import Query, parse
from penstock.gateway.reading.turns import plain_bodies, read_exchange
from penstock.gateway.releases.canary.outcomes import is_hard
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.call_request import CallAddress, path_of
from penstock.gateway.work.queue import ClaimedAttempt, QueueReader

SHOWN_NS: Final = 15 * 60 * 10**9
"""Nanoseconds for which a worker is listed after its last sign of life."""
FEW: Final = 64
SHORT: Final = 64 << 10
"""Most spans, and most bytes of calls, that are read where the request was parsed."""
MOST_IDS: Final = 200
"""Most ids of rollouts in one request."""
_UNSEEN: Final = {
    "rollouts": {"__all__": {"input": True, "metadata": True, "attempts": {"__all__": {"outcome": {"reason": True}}}}}
}
"""Fields that a brief page leaves out."""


class PageQuery(Noun):
    """The query parameters of a list that comes in pages."""

    filter: str = Field(default="", max_length=4096)
    """Terms that all must hold, such as `status:failed model:qwen* latency>2s`."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many rows at most."""
    cursor: str | None = None
    """The `next` of the page before."""


class RolloutsQuery(PageQuery):
    """Parameters of the list of rollouts."""

    ids: str | None = Field(default=None, max_length=MOST_IDS * 129)
    """Only these rollouts, at most 200, with commas between their ids: those that are there and match the filter."""
    brief: bool = False
    """Leave out what a list does not show: tasks, metadata, reasons, and fields that have their usual value."""


async def get_rollouts(request: web.Request) -> web.Response:
    """Rollouts with their attempts and sums, newest first. In the filter the terms rollout, status, mode, origin,
    group, priority, tries, input, reward, worker, attempt_status, started and metadata speak of the rollout and its
    attempts; one span of it must satisfy all the others together."""
    asked, control = query_of(request, RolloutsQuery), request.app[CONTROL]
    tape = control.tape
    now_ns = time.time_ns()
    query = parse(asked.filter, "rollouts", now_ns)
    if asked.ids is not None:
        if asked.cursor is not None:
            raise ApiError(400, "cursor does not go with ids: they are one page", "cursor", asked.cursor)
        ids = ids_of(asked.ids)
        found = PageRows(await _run(control, query)(named_rollouts, tape, query, ids), None, len(ids))
    else:
        find = index_lookup(control.index, "rollouts", query, now_ns)
        found = await _page(control, rollouts_walk(tape, query, find), "rollouts", asked, query)
    await asyncio.to_thread(control.costs.add, tape, found.rows)
    page = RolloutPage(rollouts=found.rows, next=encode_cursor("rollouts", found.mark), scanned=found.scanned)
    if not asked.brief:
        return answer(page)
    return web.Response(body=page.model_dump_json(exclude=_UNSEEN, exclude_defaults=True).encode(), headers=guard.JSON)


def ids_of(text: str) -> list[str]:
    """The ids of a comma-separated list, each once; raises `ApiError`."""
    ids = list(dict.fromkeys(text.split(",")))
    if len(ids) > MOST_IDS:
        raise ApiError(400, f"ids: {len(ids)} are more than {MOST_IDS}", "ids", allowed=[f"1 to {MOST_IDS} ids"])
    wrong = next((id for id in ids if not re.fullmatch(ID_PATTERN, id)), None)
    if wrong is not None:
        raise ApiError(400, f"ids: {wrong!r} is not the id of a rollout", "ids", wrong, [ID_PATTERN])
    return ids


async def get_rollout_spans(request: web.Request) -> web.Response:
    """Heads of the spans of a rollout, or of one attempt, in the order in which they started."""
    control, asked, query, _ = _asked(request)
    rollout = _rollout(request)
    aid = _attempt(request, rollout) if "aid" in request.match_info else None
    return await _spans(control, spans_walk(control.tape, query, rollout.id, aid), "spans", asked, query)


async def get_recent_spans(request: web.Request) -> web.Response:
    """Heads of the spans of all rollouts, newest change first."""
    control, asked, query, now_ns = _asked(request)
    find = index_lookup(control.index, "spans", query, now_ns)
    return await _spans(control, recent_walk(control.tape, query, find), "recent", asked, query)


def _asked(request: web.Request) -> tuple[Control, PageQuery, Query, int]:
    asked, now_ns = query_of(request, PageQuery), time.time_ns()
    return request.app[CONTROL], asked, parse(asked.filter, "spans", now_ns), now_ns


def _run(control: Control, query: Query) -> ReadRunner:
    return control.heavy.run if query.needs_bodies else asyncio.to_thread


async def _page(control: Control, walk: Walk[T], name: str, asked: PageQuery, query: Query) -> PageRows[T]:
    most = SCAN_BODIES if query.needs_bodies else SCAN
    return await page(walk, decode_cursor(name, asked.cursor), asked.limit, most, _run(control, query))


async def _spans(control: Control, walk: Walk[Span], name: str, asked: PageQuery, query: Query) -> web.Response:
    found = await _page(control, walk, name, asked, query)
    await asyncio.to_thread(add_costs, control.prices, found.rows)
    return answer(SpanPage(spans=found.rows, next=encode_cursor(name, found.mark), scanned=found.scanned))


def add_costs(prices: Prices, spans: Iterable[Span]) -> None:
    """Add to each span what it cost."""
    for span in spans:
        prices.charge(span)


# --- one rollout, one span ---


async def get_rollout(request: web.Request) -> web.Response:
    """A rollout with its attempts and sums."""
    control = request.app[CONTROL]
    found = summary(control.tape, _rollout(request))
    await asyncio.to_thread(control.costs.add, control.tape, [found])
    return answer(found)


class DiagnosisQuery(Noun):
    """The query parameters of a rollout's diagnosis."""

    model: str | None = Field(default=None, max_length=256)
    """The model that is trained; the one that most calls asked for when not given."""


async def get_diagnosis(request: web.Request) -> web.Response:
    """The diagnosis of a rollout, call by call: whether it can be trained on, and if not why, with the way out. Reads
    the bytes of its calls, of 2,000 at most."""
    control, asked, rollout = request.app[CONTROL], query_of(request, DiagnosisQuery), _rollout(request)
    tape = control.tape

    def judge() -> Diagnosis:
        found = summary(tape, rollout)
        if not found.totals.calls:
            # It may have some that telemetry tells of.
            control.costs.add(tape, [found])
        return diagnose(found, tape.spans(rollout.id), tape.exchange, asked.model)

    return answer(await control.heavy.run(judge))


async def get_transcript(control: Control, ids: Ids, asked: None) -> Transcript | DeferredAnswer:
    """The task and every call of an attempt, read as messages: what reward functions get, in one answer. Every call
    that has ended is in it: of an attempt that is under way there is none while the tape cannot be written. Reads the
    bytes of its calls."""
    tape, unwritten = control.tape, await control.dispatcher.flush_calls()
    rollout = known_rollout(tape, ids["rid"])
    attempt = known_attempt(tape, rollout, ids["aid"])
    if unwritten is not None and attempt.status in LIVE:
        raise TapeError(unwritten)
    spans = tape.spans(rollout.id, attempt.id)
    first = list(islice(spans, FEW + 1))
    if len(first) <= FEW and _is_short(*first):
        # Another thread would cost more than reading here.
        return transcript_of(tape, rollout, attempt, first)
    return DeferredAnswer(lambda: transcript_of(tape, rollout, attempt, [*first, *spans]))


def transcript_of(tape: TapeSource, rollout: Rollout, attempt: Attempt, spans: Sequence[Span]) -> Transcript:
    """An attempt with all its spans, as reward functions get it."""
    calls = tape.exchanges(span for span in spans if span.kind == "llm")
    return Transcript(
        rollout=rollout,
        attempt=attempt,
        outcome=attempt.outcome or Outcome(),
        calls=[TranscriptCall(span=span, turn=it and read_exchange(span.dialect, it, span)) for span, it in calls],
        violations=[span for span in spans if span.error == POLICY_VIOLATION],
    )


async def get_attempts(request: web.Request) -> web.Response:
    """The attempts of a rollout, oldest first."""
    control = request.app[CONTROL]
    attempts = control.tape.attempts(_rollout(request).id)
    await asyncio.to_thread(control.costs.add_to_attempts, control.tape, attempts)
    return answer(AttemptList(attempts=attempts))


class SpanQuery(Noun):
    """The query parameters of a single span."""

    exchange: ExchangeBytes = "exact"
    """The recorded bytes: `exact`, `plain` without their content encodings, or `none`."""


async def get_span(request: web.Request) -> web.StreamResponse:
    """A whole span: its head, the exchange read as messages, tool calls and usage, and the recorded headers, bodies
    and arrival times. Bodies are text where they are UTF-8, else base64."""
    wanted, span, control = query_of(request, SpanQuery).exchange, _span(request), request.app[CONTROL]
    control.prices.charge(span)
    if _is_short(span):
        return answer(await asyncio.to_thread(detail_of, control.tape, span, wanted))
    return await control.heavy.answer(request, lambda: json_of(detail_of(control.tape, span, wanted)), guard.JSON)


def _is_short(*spans: Span) -> bool:
    """True if reading their bytes costs next to nothing."""
    return sum(span.request_bytes + span.response_bytes for span in spans) <= SHORT


class BodyQuery(Noun):
    """The query parameters of a call's request or response body."""

    side: Literal["agent", "engine", "receipt"] | None = None
    """A party that was spoken with in another wire format, instead of the exchange itself."""


async def get_request_body(request: web.Request) -> web.StreamResponse:
    """The exact bytes of the request body, as they went upstream."""
    return await _bytes(request, "request", lambda said: said.request_body)


async def get_response_body(request: web.Request) -> web.StreamResponse:
    """The exact bytes of the response body as they were received, content encoding kept."""
    return await _bytes(request, "response", lambda said: said.response_body)


class ExchangesQuery(Noun):
    """Parameters of the bytes of calls."""

    of: Literal["models", "tools"] = "models"
    """Whose calls: of models, or all exchanges with servers of tools."""


_KINDS: Final[dict[str, tuple[SpanKind, ...]]] = {"models": ("llm",), "tools": ("tool", "mcp")}


async def get_exchanges(request: web.Request) -> web.StreamResponse:
    """The bytes of all calls of a rollout that are kept, content encodings removed, in their order. Of each call a
    length (4 bytes, big endian) and a MessagePack array of attempt, sequence, request body and response body."""
    asked = query_of(request, ExchangesQuery)
    control = request.app[CONTROL]
    records = _records(control.tape, _rollout(request).id, _KINDS[asked.of])
    response = web.StreamResponse(headers={"Content-Type": OCTETS})
    await response.prepare(request)
    await control.heavy.stream(response, records)
    return response


def _records(tape: TapeSource, rollout: str, kinds: tuple[SpanKind, ...]) -> Iterator[bytes]:
    calls = (span for span in tape.spans(rollout) if span.kind in kinds)
    for span, exchange in tape.exchanges(calls):
        if exchange is not None:
            yield pack(CallBytes(span.attempt, span.sequence, *plain_bodies(exchange)))


async def get_queue(request: web.Request) -> web.Response:
    """The state of the queue: rollouts that wait, by mode, attempts in workers' hands, and the oldest waiting
    rollout."""
    return answer(await asyncio.to_thread(request.app[CONTROL].dispatcher.reader.queue))


async def get_workers(request: web.Request) -> web.Response:
    """The workers that were heard of in the last quarter of an hour."""
    dispatcher = request.app[CONTROL].dispatcher
    return answer(WorkerList(workers=await asyncio.to_thread(recent_workers, dispatcher.reader, dispatcher.now_ns())))


def recent_workers(reader: QueueReader, now_ns: int) -> list[Worker]:
    """Workers with a recent sign of life, by name."""
    return [worker for worker in reader.workers() if worker.last_seen_ns >= now_ns - SHOWN_NS]


def _rollout(request: web.Request) -> Rollout:
    return known_rollout(request.app[CONTROL].tape, id_of(request, "rid"))


def known_rollout(tape: TapeSource, rid: str) -> Rollout:
    """A rollout; raises `ApiError` if it does not exist."""
    rollout = tape.rollout(rid)
    if rollout is None:
        raise ApiError(404, missing_rollout(rid, lambda name: tape.rollout(name) is not None), "rid", rid)
    return rollout


def _attempt(request: web.Request, rollout: Rollout) -> str:
    return known_attempt(request.app[CONTROL].tape, rollout, id_of(request, "aid")).id


def known_attempt(tape: TapeSource, rollout: Rollout, aid: str) -> Attempt:
    """An attempt; raises `ApiError` if it does not exist."""
    known = {attempt.id: attempt for attempt in tape.attempts(rollout.id)}
    if aid not in known:
        hint = f"`penstock show {rollout.id}` shows them"
        raise ApiError(404, f"rollout {rollout.id!r} has no attempt {aid!r}; {hint}", "aid", aid, list(known)[-20:])
    return known[aid]


def _span(request: web.Request) -> Span:
    rollout = _rollout(request)
    aid, sequence = _attempt(request, rollout), sequence_of(request)
    span = request.app[CONTROL].tape.span(rollout.id, aid, sequence)
    if span is None:
        hint = f"`penstock spans {rollout.id}/{aid}` lists them"
        raise ApiError(404, f"attempt {aid!r} has no span {sequence}; {hint}", "sequence", str(sequence))
    return span


def _said(tape: TapeSource, span: Span, wanted: str | None) -> Exchange | Side:
    """The exchange, or the requested side of it; raises `ApiError` if it is not stored."""
    exchange = tape.exchange(span)
    if exchange is None:
        raise ApiError(404, f"no bytes of span {span.sequence} are stored: it is {span.status} and of kind {span.kind}")
    if wanted is None:
        return exchange
    found = next((side for side in exchange.sides if side.who == wanted), None)
    if found is None:
        there = [side.who for side in exchange.sides]
        hint = "leave it out for the exchange itself"
        raise ApiError(404, f"the {wanted} spoke the exchange's own format; {hint}", "side", wanted, there)
    return found


def detail_of(tape: TapeSource, span: Span, wanted: ExchangeBytes = "exact") -> SpanDetail:
    """A span with its exchange, read."""
    exchange = tape.exchange(span)
    if exchange is None:
        return SpanDetail(span=span)
    detail = SpanDetail(span=span, turn=read_exchange(span.dialect, exchange, span))
    if wanted == "plain":
        request, response = plain_bodies(exchange)
        exchange = exchange.model_copy(update={"request_body": request, "response_body": response})
    if wanted != "none":
        detail.exchange = ExchangeView.of(exchange)
    return detail


async def _bytes(request: web.Request, side: str, body_of: Callable[[Exchange | Side], bytes]) -> web.StreamResponse:
    wanted, span, control = query_of(request, BodyQuery).side, _span(request), request.app[CONTROL]
    name = "-".join((*(request.match_info[key] for key in ("rid", "aid", "sequence")), side))
    headers = {"Content-Disposition": f'attachment; filename="{name}.bin"', "Content-Type": OCTETS}

    def body() -> bytes:
        return body_of(_said(control.tape, span, wanted))

    if _is_short(span):
        return web.Response(body=body(), headers=headers)
    return await control.heavy.answer(request, body, headers)


# Many rollouts in one answer, with their spans and the bytes of their calls: the data of a training step.
#
# The answer is a stream of parts (`client.exchanges`), read from the tape a megabyte at a time, as fast as the client
# takes it. So neither side holds more than a block of it, however much is requested.

KIND: Final = f"({'|'.join(get_args(SpanKind))})"


class WholeRolloutsQuery(Noun):
    """The query parameters of rollouts with all their spans."""

    ids: str = Field(max_length=MOST_IDS * 129)
    """These rollouts, at most 200, with commas between their ids; they come in this order."""
    kind: str | None = Field(default=None, pattern=f"^{KIND}(,{KIND})*$")
    """Only spans of these kinds, with commas between them."""


async def get_whole(request: web.Request) -> web.StreamResponse:
    """Rollouts with their spans and the bytes of their model calls, content encodings removed. Each part is a length (4
    bytes, big endian) and a MessagePack array: `rollout` and the rollout as JSON; then for each of its spans `span` and
    its head as JSON; then for each call whose bytes are kept `call` and an array of attempt, sequence, request body and
    response body. Fields that have their usual value are left out of the JSON."""
    asked, control = query_of(request, WholeRolloutsQuery), request.app[CONTROL]
    tape = control.tape
    ids = ids_of(asked.ids)
    known = {rollout.id: rollout for _, rollout in await asyncio.to_thread(tape.named, ids)}
    missing = next((rid for rid in ids if rid not in known), None)
    if missing is not None:
        said = missing_rollout(missing, lambda name: tape.rollout(name) is not None)
        raise ApiError(404, said, "ids", missing)
    kinds = frozenset(get_args(SpanKind)) if asked.kind is None else frozenset(asked.kind.split(","))
    parts = map(pack, _parts(tape, [known[rid] for rid in ids], kinds))
    response = web.StreamResponse(headers={"Content-Type": OCTETS})
    await response.prepare(request)
    await control.heavy.stream(response, parts)
    return response


def _parts(tape: TapeSource, rollouts: Sequence[Rollout], kinds: Collection[str]) -> Iterator[Part]:
    for rollout in rollouts:
        whole = summary(tape, rollout)
        yield RolloutPart(whole.model_dump_json(exclude_defaults=True).encode())
        of_all = (tape.spans(rollout.id, attempt.id) for attempt in whole.attempts)
        spans = [span for of_one in of_all for span in of_one if span.kind in kinds]
        for span in spans:
            yield SpanPart(span.model_dump_json(exclude_defaults=True).encode())
        for span, exchange in tape.exchanges(span for span in spans if span.kind == "llm"):
            if exchange is not None:
                yield CallPart(CallBytes(span.attempt, span.sequence, *plain_bodies(exchange)))


# Changes of the queue. Each function is an operation (`gateway.api.operations`): it gets the checked ids of its path
# and its checked body, hands them to the dispatcher (`gateway.work.dispatcher`) and answers when the change is
# durable. If the tape refuses something, the guard makes an `ApiError` of it. An agent's own requests come through
# `gateway.process.dispatch`, which has checked the rollout; they arrive below `/agent` with their scope in the path.

TOKEN_S: Final = 7 * 86400
"""Seconds for which the token of a claim is valid."""


async def enqueue(control: Control, ids: Ids, asked: EnqueueRequest) -> EnqueueAnswer:
    """Queue tasks: all of them, or none when one cannot be. Sending the same again queues nothing twice: a name that is
    queued already is answered with `created: false`, and with 409 when anything else about it differs."""
    return EnqueueAnswer(rollouts=await control.dispatcher.enqueue(asked.rollouts))


async def cancel(control: Control, ids: Ids, asked: ActionRequest) -> Rollout:
    """Cancel a rollout that waits or runs. A worker that holds it hears of it with its next heartbeat and kills the
    agent."""
    return await control.dispatcher.cancel(ids["rid"], asked)


async def requeue(control: Control, ids: Ids, asked: ActionRequest) -> Rollout:
    """Queue a rollout again that has ended, whatever its number of attempts."""
    return await control.dispatcher.requeue(ids["rid"], asked)


async def claim(control: Control, ids: Ids, asked: ClaimRequest) -> ClaimAnswer:
    """Take work. When there is none the answer waits up to `wait_s` for it. Each claim comes with the address and the
    token that the agent is to use; it is lost unless the worker is heard of within `lease_s`."""
    claimed = await control.dispatcher.claim(asked)
    waiting = control.dispatcher.queue
    claims = [worker_claim(control, one) for one in claimed]
    return ClaimAnswer(claims=claims, queue=waiting.state, waiting=sum(waiting.counts().values()))


def worker_claim(control: Control, claimed: ClaimedAttempt) -> Claim:
    """The claim of an attempt, as its worker gets it."""
    rollout, attempt = claimed.rollout, claimed.attempt
    return Claim(
        rollout=rollout,
        attempt=attempt,
        address=path_of(CallAddress(rollout.id, attempt.id, mode=rollout.mode)),
        token=control.auth.mint(rollout.id, TOKEN_S, int(time.time())),
    )


async def heartbeat(control: Control, ids: Ids, asked: HeartbeatRequest) -> HeartbeatAnswer:
    """Say that a worker is alive: its leases begin anew. The answer tells which attempts it has lost; what they run is
    to be killed."""
    held = await control.dispatcher.heartbeat(ids["wid"], asked)
    return HeartbeatAnswer(attempts=held, queue=control.dispatcher.queue.state)


async def finish(control: Control, ids: Ids, asked: FinishRequest) -> FinishAnswer:
    """End an attempt, together with its last events and its rewards. When this is answered every earlier call of the
    attempt is durable and visible. The same end may be sent again; another one, or that of a worker that has lost the
    attempt, is refused."""
    events = _entries(control, ids, asked.events)
    done = await control.dispatcher.finish(ids["rid"], ids["aid"], asked, events)
    await _check_violations(control, ids, events)
    return FinishAnswer(rollout=done.rollout, attempt=done.attempt)


async def reward(control: Control, ids: Ids, asked: Judgement) -> RewardAnswer:
    """Say how well an attempt went. The newest trusted reward is the attempt's; one that comes after its end counts too
    and is marked `late`."""
    return await control.dispatcher.reward(ids["rid"], ids["aid"], asked)


async def add_events(control: Control, ids: Ids, asked: EventsRequest) -> EventsAnswer:
    """Add events to an attempt, such as lines of output."""
    return await _add(control, ids, asked, known=True)


async def feedback(control: Control, ids: Ids, asked: FeedbackRequest) -> FeedbackAnswer:
    """Say how good a response was, by the id that the provider gave it: for traffic whose rollouts nobody has named."""
    span = await asyncio.to_thread(control.tape.find_response, asked.response_id)
    if span is None:
        # The client may have been faster than the tape.
        _ = await control.dispatcher.flush_calls()
        span = await asyncio.to_thread(control.tape.find_response, asked.response_id)
    if span is None:
        message = f"no recorded response has the id {asked.response_id!r}"
        raise ApiError(404, message, "response_id", asked.response_id)
    said = Judgement(**asked.model_dump(exclude={"response_id", "span"}), span=span.sequence)
    kept = await control.dispatcher.reward(span.rollout, span.attempt, said)
    return FeedbackAnswer(**kept.model_dump(), rollout=span.rollout, attempt=span.attempt)


async def set_queue(control: Control, ids: Ids, asked: QueueRequest) -> QueueStatus:
    """Open, pause or drain the queue. It stays so over a restart."""
    await control.dispatcher.set_state(asked.state, asked)
    return await asyncio.to_thread(control.dispatcher.reader.queue)


# -- reports of agents -----------------------------------------------------------------------------------------------


async def agent_reward(control: Control, ids: Ids, asked: Judgement) -> RewardAnswer:
    """An agent judges its own attempt. It is kept with the source `agent` and not trained on, unless the configuration
    trusts agents (`trust_agent_rewards`)."""
    said = asked.model_copy(update={"source": "agent"})
    return await control.dispatcher.reward(ids["rid"], ids["aid"], said)


async def agent_events(control: Control, ids: Ids, asked: EventsRequest) -> EventsAnswer:
    """An agent adds events to its own attempt, which may be as new as a call's."""
    return await _add(control, ids, asked, known=False)


async def _add(control: Control, ids: Ids, asked: EventsRequest, known: bool) -> EventsAnswer:
    entries = _entries(control, ids, asked.events)
    added = EventsAnswer(sequences=await control.dispatcher.add(entries, known))
    await _check_violations(control, ids, entries)
    return added


async def _check_violations(control: Control, ids: Ids, events: Sequence[SpanEntry]) -> None:
    """Check releases at once if an event is a hard violation."""
    if any(is_hard(entry.kind, entry.name, entry.attributes) for entry in events):
        await control.releases.on_violation(ids["rid"])


def _entries(control: Control, ids: Ids, events: Sequence[Event]) -> list[SpanEntry]:
    now = control.dispatcher.now_ns()
    return [_entry(ids["rid"], ids["aid"], event, now) for event in events]


def _entry(rollout: str, attempt: str, event: Event, now: int) -> SpanEntry:
    at = now if event.time_ns is None else event.time_ns
    entry = SpanEntry(rollout, attempt, kind="event", name=event.name, method="", status="ok", start_ns=at, end_ns=at)
    entry.parent_id, entry.attributes = event.parent_id, dict(event.attributes) or None
    return entry
