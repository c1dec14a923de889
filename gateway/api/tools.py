"""The control API of tools: those that an attempt used, definitions that servers list, policies on calls; frames of
wrapped servers; and our own server.

Uses are found on the tape, in a worker thread, including runs whose address named no rollout.

An attempt without model calls whose rollout has no given name is a *stray*: the session of an agent whose MCP address
is fixed in its settings. Its runs are matched with the answers of the rollouts that were alive
(`gateway.reading.diagnosis.tool_join`). The tape does not change; the matching is done on each read.

Reading is bounded: rollouts by `MOST_ROLLOUTS` around the time in question, calls by `MOST_CALLS`, and of each attempt
only those near the runs. `ToolList.cut` says when that was not enough to know.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from time import time_ns
from typing import Annotated, Final
from weakref import WeakValueDictionary

from aiohttp import web
from pydantic import Field, StringConstraints

from penstock.gateway.api import guard
from penstock.gateway.api.guard import AGENT, CONTROL, ApiError, Control, answer, id_of, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pagination import (
    Mark,
    TapeSource,
    Walk,
    decode_cursor,
    encode_cursor,
    page,
    span_filter,
    summary,
    summary_of,
)
from penstock.gateway.api.rollouts import known_attempt, known_rollout
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.base import Noun
from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutSummary
from penstock.gateway.model.settings import ADMIN_KEY, McpServer
from penstock.gateway.model.span import Span
from penstock.gateway.model.stdio_frames import PATH, StdioFrame, parse_frames
from penstock.gateway.model.tools import ApproveRequest, ServerDefinitions, ServerList, ServerView, ToolList, ToolUse
from penstock.gateway.reading.diagnosis.sub_agents import may_have_sub_agents
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall
from penstock.gateway.reading.diagnosis.tool_join import (
    PATIENCE_NS,
    CandidateAttempt,
    RunOrigin,
    ToolRun,
    find_origins,
)
from penstock.gateway.reading.diagnosis.tool_results import match_name
from penstock.gateway.reading.diagnosis.tool_uses import RuleLookup, model_call, run_of, tools_used
from penstock.gateway.reading.filters import parse
from penstock.gateway.reading.policy.policy import ToolPolicy
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question, QuestionList
from penstock.gateway.reading.policy.report import BacktestCall, BacktestPage, PolicyTest, backtest_call
from penstock.gateway.reading.policy.rules import check_names
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store.directory import unless_damaged
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.bridge import Bridge
from penstock.gateway.tools.definition_enforcement import DefinitionService, ListRequest
from penstock.gateway.tools.definitions import AttemptRef, cursor_of
from penstock.gateway.tools.pipe import Pipe, WrapperSession, decode_progress, encode_progress, keep, session_key
from penstock.gateway.tools.servers import HostedServerPool, ServerRegistry
from penstock.gateway.traffic.calls.admission import Auth
from penstock.gateway.traffic.calls.call_request import FIRST_ATTEMPT
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import ClientFault

MOST_ROLLOUTS: Final = 2_000
"""Most rollouts that are looked at, the newest of those that had begun and not ended."""
HORIZON_NS: Final = 6 * 3600 * 10**9
"""Nanoseconds before the attempt beyond which rollouts that had begun are not looked for."""
MOST_CALLS: Final = 2_000
"""Most calls whose bytes are read, and most runs that are matched."""
MOST_HEADS: Final = 20_000
"""Most heads of rollouts, and of the spans of a session, that are looked at."""


class ToolsQuery(Noun):
    """Parameters of the tools of an attempt."""

    until: int | None = Field(default=None, ge=1)
    """Sequence of the last span that is looked at; all when not given."""
    inside: bool = True
    """Also tools that ran inside the agent: only the conversation tells of them, so that each call is read."""


async def get_tools(request: web.Request) -> web.Response:
    """The tools that an attempt used, each with the model call whose answer asked for it and how well that is known;
    also those whose address named no rollout. Reads the bytes of its calls, of 2,000 at most, and where there are such
    runs, of as many of the rollouts that were alive."""
    asked, control = query_of(request, ToolsQuery), request.app[CONTROL]
    tape = control.tape
    rollout = known_rollout(tape, id_of(request, "rid"))
    attempt = known_attempt(tape, rollout, id_of(request, "aid")).id
    rule_of = partial(control.policy.violated_rule, rollout.mode)

    def read() -> ToolList:
        return read_tools(tape, summary(tape, rollout), attempt, rule_of, asked.until, asked.inside)

    return answer(await control.heavy.run(read))


def read_tools(
    tape: TapeSource,
    rollout: RolloutSummary,
    attempt: str,
    rule_of: RuleLookup,
    until: int | None = None,
    inside: bool = True,
) -> ToolList:
    """The tools that an attempt used, in order of time. `until`: the sequence of the last span that is looked at.
    `inside`: include tools that ran inside the agent; without them no call is read unless a server has run a tool, or
    there may be sub-agents."""
    spans = [span for span in tape.spans(rollout.id, attempt) if until is None or span.sequence <= until]
    own = next(one for one in rollout.attempts if one.id == attempt)
    if not inside and all(span.kind != "tool" for span in spans) and not may_have_sub_agents(spans):
        begun, cut = _begun(tape, own.created_ns, own.last_seen_ns + PATIENCE_NS)
        if next(_stray_runs(tape, begun, own), None) is None:
            return ToolList(tools=[], skipped=0, cut=cut)
    used = tools_used(spans, tape.exchange, rule_of)
    stray = rollout.origin == "implicit" and _is_stray(own)
    # Calls that a server's own run has answered are settled.
    open_asks = own.totals.tool_calls > sum(use.span is not None and use.asked_by is not None for use in used.tools)
    found = _with_elsewhere(tape, own, stray, used) if stray or open_asks else used
    return found if inside else found.model_copy(update={"tools": [use for use in found.tools if use.span]})


def _with_elsewhere(tape: TapeSource, own: Attempt, stray: bool, used: ToolList) -> ToolList:
    """For a stray, add the calls of other rollouts that asked for its runs; for any other attempt, add the runs of
    strays that are for it."""
    begun, cut = _begun(tape, own.created_ns, own.last_seen_ns + PATIENCE_NS)
    runs = dict(islice(_stray_runs(tape, begun, own), MOST_CALLS))
    if not runs:
        return used
    asking, more = _asking(tape, begun, [run for _, run in runs.values()])
    cut = cut or more or len(runs) == MOST_CALLS
    found = find_origins(asking, [run for _, run in runs.values()], not cut)
    if stray:
        tools = [_asked_elsewhere(use, found.get(f"{_place(own)}#{use.span}")) for use in used.tools]
    else:
        tools = _with_strays(used.tools, _place(own), [(runs[key], one) for key, one in found.items()])
    return used.model_copy(update={"tools": tools, "cut": cut})


# -- live rollouts ---------------------------------------------------------------------------------------------------


def _begun(tape: TapeSource, start_ns: int, end_ns: int) -> tuple[list[Rollout], bool]:
    """The rollouts that may have been alive in a span of time, and whether there are more."""
    found: list[Rollout] = []
    for looked, (_, rollout) in enumerate(tape.rollouts(_first_after(tape, end_ns))):
        if len(found) == MOST_ROLLOUTS or looked == MOST_HEADS:
            return found, True
        if rollout.created_ns < start_ns - HORIZON_NS:
            break
        if rollout.ended_ns is None or rollout.ended_ns >= start_ns - PATIENCE_NS:
            found.append(rollout)
    return found, False


def _alive(tape: TapeSource, begun: Iterable[Rollout], start_ns: int, end_ns: int) -> Iterator[Attempt]:
    """The attempts of rollouts that were alive in a span of time, or `PATIENCE_NS` before it."""
    for rollout in begun:
        for attempt in tape.attempts(rollout.id):
            if attempt.created_ns <= end_ns and attempt.last_seen_ns >= start_ns - PATIENCE_NS:
                yield attempt


def _first_after(tape: TapeSource, time_ns: int) -> int | None:
    """The position of the oldest rollout that began after a time; None if none did. Positions are in order of time."""
    newest = next(tape.rollouts(), None)
    if newest is None or newest[1].created_ns <= time_ns:
        return None
    low, high = 0, newest[0]
    while high - low > 1:
        middle = (low + high) // 2
        below = next(tape.rollouts(middle + 1), None)
        if below is None or below[1].created_ns <= time_ns:
            low = middle
        else:
            high = below[0]
    return high


def _is_stray(attempt: Attempt) -> bool:
    """True if an attempt of a rollout without a given name may be the session of an agent with tools."""
    return not attempt.totals.calls


# -- reading runs and calls ------------------------------------------------------------------------------------------


def _stray_runs(tape: TapeSource, begun: Iterable[Rollout], own: Attempt) -> Iterator[tuple[str, tuple[Span, ToolRun]]]:
    """The runs of strays while an attempt was alive, by their places."""
    first, last = own.created_ns, own.last_seen_ns + PATIENCE_NS
    unnamed = (rollout for rollout in begun if rollout.origin == "implicit")
    for stray in filter(_is_stray, _alive(tape, unnamed, first, last)):
        for span in islice(tape.spans(stray.rollout, stray.id), MOST_HEADS):
            if span.kind != "tool" or not first <= span.start_ns <= last:
                continue
            if (exchange := tape.exchange(span)) is not None:
                key = f"{_place(stray)}#{span.sequence}"
                yield key, (span, replace(run_of(span, exchange), key=key))


def _asking(tape: TapeSource, begun: Iterable[Rollout], runs: Iterable[ToolRun]) -> tuple[list[CandidateAttempt], bool]:
    """The model calls and runs near these runs, by attempt, and whether some are missing."""
    times = [run.start_ns for run in runs]
    first, last = min(times) - PATIENCE_NS, max(times) + PATIENCE_NS
    found: list[CandidateAttempt] = []
    left = MOST_CALLS
    for attempt in _alive(tape, begun, min(times), max(times)):
        if not attempt.totals.tool_calls:
            continue
        spans = (span for span in tape.spans(attempt.rollout, attempt.id) if first <= span.start_ns <= last)
        near = list(islice((span for span in spans if span.kind in ("llm", "tool")), left + 1))
        found.append(_read(tape, attempt, near[:left]))
        left -= len(near)
        if left < 0:
            return found, True
    return found, False


def _read(tape: TapeSource, attempt: Attempt, spans: Iterable[Span]) -> CandidateAttempt:
    calls: list[ModelCall] = []
    runs: list[ToolRun] = []
    for span in spans:
        exchange = tape.exchange(span)
        if exchange is not None and span.kind == "llm":
            calls.append(model_call(span, exchange))
        elif exchange is not None:
            runs.append(run_of(span, exchange))
    return CandidateAttempt(_place(attempt), calls, runs)


def _place(attempt: Attempt) -> str:
    return f"{attempt.rollout}/{attempt.id}"


# -- the answer ------------------------------------------------------------------------------------------------------


def _asked_elsewhere(use: ToolUse, found: RunOrigin | None) -> ToolUse:
    """A run of a stray, with the call of another rollout that asked for it."""
    if found is None or found.grade == "none":
        return use
    about = {"grade": found.grade, "reason": found.reason, "asked_in": found.place, "carried_by": found.carried_by}
    if found.asked is None:
        return use.model_copy(update=about | {"elsewhere": _calls(found)})
    return use.model_copy(update=about | {"asked_by": found.asked.sequence, "call_id": found.asked.call_id})


def _with_strays(
    tools: list[ToolUse], mine: str, strays: list[tuple[tuple[Span, ToolRun], RunOrigin]]
) -> list[ToolUse]:
    """An attempt's own uses, with those of strays that are, or may be, for it. A tool that a stray has run is no longer
    listed as run inside the agent."""
    added: list[ToolUse] = []
    for (span, run), found in strays:
        if found.place != mine and not (found.asked is None and mine in found.candidates):
            continue
        asked = found.asked
        candidates = () if asked else found.candidates[mine]
        added.append(
            ToolUse(
                span=span.sequence,
                span_id=span.span_id,
                run_in=f"{span.rollout}/{span.attempt}",
                server=run.server,
                tool=run.tool,
                grade=found.grade,
                reason=found.reason,
                asked_by=asked.sequence if asked else None,
                call_id=asked.call_id if asked else None,
                candidates=list(candidates),
                elsewhere=[] if asked else [one for one in _calls(found) if not one.startswith(f"{mine}#")],
                carried_by=found.carried_by,
                status=span.status,
                error=span.error,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
            )
        )
    kept = [use for use in tools if use.span is not None or not any(_is(use, run) for run in added)]
    return sorted([*kept, *added], key=lambda use: (use.start_ns, use.span or 0))


def _is(inside: ToolUse, run: ToolUse) -> bool:
    """True if a tool that seems to have run inside the agent is, or may be, a run of a stray."""
    asked = inside.asked_by in run.candidates or (inside.asked_by, inside.call_id) == (run.asked_by, run.call_id)
    return asked and bool(match_name(inside.tool, run.server or "", run.tool))


def _calls(found: RunOrigin) -> list[str]:
    """ROLLOUT/ATTEMPT#SEQUENCE of all calls that may have asked for the run."""
    return [f"{place}#{sequence}" for place in sorted(found.candidates) for sequence in found.candidates[place]]


# The control API of the definitions that MCP servers list.


async def get_servers(request: web.Request) -> web.Response:
    """Servers of tools that are configured or have listed something, with the versions of what they list. The texts
    are those of each server."""
    definitions = request.app[CONTROL].definitions
    found = {one.server: one for one in await asyncio.to_thread(definitions.reader.servers)}
    for name in definitions.on_change:
        found.setdefault(name, ServerDefinitions(server=name))
    views = [_view(definitions, found[name]) for name in sorted(found)]
    return answer(ServerList(servers=views))


async def get_server(request: web.Request) -> web.Response:
    """The definitions that one server lists, in all versions that are kept, with the texts."""
    definitions, name = request.app[CONTROL].definitions, id_of(request, "server")
    found = await asyncio.to_thread(definitions.reader.server, name)
    if found is None and name not in definitions.on_change:
        message = f"there is no MCP server {name!r}; `penstock mcp definitions` lists them"
        raise ApiError(404, message, "server", name)
    view = _view(definitions, found or ServerDefinitions(server=name))
    wanted = {one for version in view.versions for one in version.items.values()}
    view.texts = await asyncio.to_thread(definitions.reader.texts, name, wanted)
    return answer(view)


def _view(definitions: DefinitionService, one: ServerDefinitions) -> ServerView:
    return ServerView(**dict(one), on_change=definitions.on_change.get(one.server))


async def approve(control: Control, ids: Ids, asked: ApproveRequest) -> ServerDefinitions:
    """Approve what a server lists: from now on it is what agents are given, where changes are held or denied. Who
    approved what is kept."""
    return await control.definitions.approve(ids["server"], asked)


_SERVERS = "/api/mcp/definitions"

DEFINITION_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", _SERVERS, "definitions", "What servers of tools list", ServerList, get_servers),
    ApiRoute("GET", f"{_SERVERS}/{{server}}", "server_definitions", "What one server lists", ServerView, get_server),
    ApiRoute(
        "POST", f"{_SERVERS}/{{server}}/approve", "approve_definitions", "Approve what a server lists",
        ServerDefinitions, approve, body=ApproveRequest, errors=(404,),
    ),
)  # fmt: skip
"""This part of the API."""


# Policies on tool calls: calls that wait for a person, and a test of rules on recorded calls.

PAGE: Final = 1000
"""Most calls in one answer."""


async def get_waiting(request: web.Request) -> web.Response:
    """Tool calls that wait for a person, the longest wait first."""
    return answer(QuestionList(waiting=request.app[CONTROL].questions.waiting))


async def answer_question(control: Control, ids: Ids, asked: PolicyAnswer) -> Question:
    """Approve or refuse a tool call that waits. It is an event on its rollout who said what, and why."""
    found = control.questions.answer(ids["question"], asked)
    if found is None:
        known = [one.id for one in control.questions.waiting]
        message = "no call waits under this id, or not any more: `penstock policy waiting` lists those that do"
        raise ApiError(404, message, "question", ids["question"], known)
    target = f"{found.rollout}/{found.attempt} {found.server}.{found.tool}"
    await control.audit_log.record(asked, f"{asked.verdict}_call", target)
    return found


async def try_policy(control: Control, ids: Ids, asked: PolicyTest) -> BacktestPage:
    """Backtests rules: what each would have done to recorded tool calls, and the rewards of their rollouts. Nothing is
    changed. Newest first, and a page at a time."""
    try:
        check_names(asked.rules)
    except ValueError as error:
        raise ApiError(400, str(error), "rules") from None
    query, tape = parse(asked.filter, "spans", time.time_ns()), control.tape
    policy = ToolPolicy(asked.rules, control.definitions.annotations)
    rollout_of = lru_cache(maxsize=1024)(partial(summary_of, tape))

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, BacktestCall | None]]:
        wanted = span_filter(tape, query, control.prices)
        for position, span in tape.recent(int(mark[0]) if mark else None):
            is_call = span.kind == "tool" and span.dialect == MCP.name and not is_release_call(span)
            found = rollout_of(span.rollout) if is_call and wanted(span) else None
            yield (position,), None if found is None else _tried(tape, policy, span, found)

    walked: Walk[BacktestCall] = walk
    found = await page(walked, decode_cursor("recent", asked.cursor), PAGE, run=control.heavy.run)
    return BacktestPage(calls=found.rows, next=encode_cursor("recent", found.mark), scanned=found.scanned)


def _tried(tape: TapeSource, policy: ToolPolicy, span: Span, rollout: RolloutSummary) -> BacktestCall | None:
    """The test of rules on a recorded call; None if its bytes are not stored, or damaged."""
    exchange, server = unless_damaged(partial(tape.exchange, span)), span.upstream or ""
    if exchange is None:
        return None
    tool, said = backtest_call(policy, server, rollout.mode, plain_bodies(exchange)[0], span.agent)
    place = {"rollout": span.rollout, "attempt": span.attempt, "span": span.sequence}
    return BacktestCall.model_validate({**place, **said, "server": server, "tool": tool, "reward": rollout.reward})


POLICY_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/policy/waiting", "waiting", "Tool calls that wait for a person", QuestionList, get_waiting),
    ApiRoute(
        "POST", "/api/policy/waiting/{question}", "answer_waiting", "Let a tool call run, or not",
        Question, answer_question, body=PolicyAnswer, errors=(404,),
    ),
    ApiRoute(
        "POST", "/api/policy/test", "test_policy", "Try rules on recorded calls",
        BacktestPage, try_policy, body=PolicyTest, reads=True,
    ),
)  # fmt: skip
"""This part of the API."""


# `POST /wrapped`, below the address of a rollout, brings frames of lines that have passed a wrapper.
#
# When the request is answered, its frames are durable. The answer says which frames the wrapper must keep, and which
# it must send again because this gateway has lost them in a restart: those of requests that wait for their answers.

FRAMES: Final = "application/octet-stream"
SESSIONS: Final = 10_000
"""Most sessions in memory, the most recently used; others are read back from the tape."""


class FrameHeader(Noun):
    """The head of a request of a wrapper: the session and the server that the frames after it belong to."""

    session: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{11}-[0-9a-f]{16}$")]
    """The wrapper's own name for its session."""
    server: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    lost: list[int] = Field(default=[], max_length=100_000)
    """Frames that the gateway needs and the wrapper has no more."""


class FrameReceipt(Noun):
    """The frames of a session that the gateway has, and those that it still needs."""

    done: int
    """Frames up to this number are on the tape or in `open`."""
    open: list[int]
    """Frames of what is not over yet, which the wrapper must keep."""
    need: list[int]
    """Those of them that must be sent before anything else."""
    recorded_bytes: int
    """Bytes of a line that are kept."""


class FrameReceiver:
    """The sessions of all wrappers."""

    def __init__(self, recorder: Recorder, redactor: Redactor, definitions: DefinitionService, limit: int) -> None:
        """`limit`: bytes of a line that are kept."""
        self._recorder, self._redactor, self._definitions, self._limit = recorder, redactor, definitions, limit
        self._pipes: OrderedDict[str, Pipe] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[FrameReceipt]] = set()

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Frames, or none to learn what is known of a session. Other content types are refused: a foreign web page can
        send those without asking."""
        if request.content_type != FRAMES or "Content-Type" not in request.headers:
            raise ApiError(415, "what a wrapper sends is no text", "Content-Type", request.content_type, (FRAMES,))
        head, _, body = (await request.read()).partition(b"\n")
        try:
            about, some = FrameHeader.model_validate_json(head), list(parse_frames(body))
        except ValueError as error:
            # pydantic names the line of JSON and its field, `parse_frames` the byte.
            message = f"what a wrapper sends is a line of JSON and frames: {' '.join(str(error).split())[:300]}"
            raise ApiError(400, message, "body") from None
        found = request.match_info
        if "rid" in found:
            source = WrapperSession(found["rid"], found["aid"], "header", about.session, about.server)
        else:
            source = WrapperSession(f"i-{about.session}", FIRST_ATTEMPT, "implicit", about.session, about.server)
        key = request.headers.get("Authorization", "").encode("latin-1")
        secrets = self._redactor.secrets([(b"authorization", b"Authorization", key)], "")
        task = asyncio.ensure_future(self._in_turn(source, secrets, some, about.lost))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A wrapper that disconnects must not interrupt this: memory and tape would then differ.
        return answer(await asyncio.shield(task))

    async def _in_turn(
        self, source: WrapperSession, secrets: Secrets, some: list[StdioFrame], lost: list[int]
    ) -> FrameReceipt:
        """Takes the requests of a session one at a time."""
        name = session_key(source.rollout, source.attempt, source.session)
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = asyncio.Lock()
        async with turn:
            return await self._take(name, source, secrets, some, lost)

    async def _take(
        self, name: str, source: WrapperSession, secrets: Secrets, some: list[StdioFrame], lost: list[int]
    ) -> FrameReceipt:
        pipe = self._pipes.pop(name, None)
        if pipe is None:
            note = await asyncio.to_thread(self._recorder.store.note, name)
            pipe = Pipe(source, decode_progress(note), self._limit)
        pipe.secrets = secrets
        before = pipe.progress()
        # On a thread: reading large messages would hold up calls.
        entries = await asyncio.to_thread(_frames_read, pipe, some, lost)
        after = pipe.progress()
        if after != before and not pipe.need:
            record, now = encode_progress(after), time_ns()
            await self._recorder.submit(lambda transaction: keep(transaction, entries, name, record, now))
        whose = AttemptRef(source.rollout, source.attempt, source.origin)
        for sent, listed in pipe.listed:
            self._definitions.observe_wrapped(
                ListRequest(source.server, sent.method, cursor_of(sent.raw), whose), listed
            )
        pipe.listed.clear()
        if not pipe.over:
            # Only now: if the tape had refused the spans, the memory would be ahead of it.
            self._pipes[name] = pipe
            if len(self._pipes) > SESSIONS:
                self._pipes.popitem(last=False)
        return FrameReceipt(done=pipe.done, open=after.open_frames(), need=pipe.need, recorded_bytes=self._limit)


def _frames_read(pipe: Pipe, some: list[StdioFrame], lost: list[int]) -> list[SpanEntry]:
    pipe.restore(some, lost)
    return [] if pipe.need else pipe.take(some)


WRAPPED: Final = web.AppKey("wrapped", FrameReceiver)


def add_wrapped(application: web.Application, made: FrameReceiver) -> None:
    """Adds the route. The dispatch has checked the scope in the path: see `gateway.process.dispatch`."""
    application[WRAPPED] = made
    for scope in ("none", "{kind}/{rid}/{aid}"):
        application.router.add_post(f"{AGENT}{scope}{PATH}", made.post)


# `/mcp/penstock` is Penstock's own MCP server, `penstock mcp serve` against this gateway, hosted like any other. It
# requires the right to change things at the control API: the read key does not open it. It gets the admin key by
# its environment, never from a call.

BUILTIN_SERVER: Final = "penstock"


class BuiltinServerPool(HostedServerPool):
    """The connections to Penstock's own server."""

    def __init__(self, config: McpServer, bridge: Bridge, auth: Auth) -> None:
        super().__init__(BUILTIN_SERVER, config, bridge, auth.own_keys)
        self._auth = auth

    def check(self, headers: Mapping[bytes, bytes], token: bool) -> None:
        """Raises `ClientFault` for a client that may not use the control API."""
        if token:
            raise ClientFault(403, "control", "agent tokens and keys for calls never open Penstock's own tools")
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        try:
            asked = {**named, "Host": named.get("host", ""), "Origin": named.get("origin", "")}
            guard.check(asked, "/api", self._auth, needs="admin", what="Penstock's own tools")
        except guard.ApiError as error:
            raise ClientFault(error.status, "control", str(error), error.problem.field) from None


def host_builtin_server(servers: ServerRegistry, bridge: Bridge, config: GatewayConfig, auth: Auth, url: str) -> None:
    """Adds Penstock's own server, unless one of that name is configured. `url`: the gateway's URL for the server."""
    if BUILTIN_SERVER in servers.pools:
        return
    env = {"PENSTOCK_GATEWAY": url}
    if auth.admin_key is not None:
        env[ADMIN_KEY] = auth.admin_key
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [sys.executable, "-P", "-m", "penstock", "mcp", "serve", *(["--write"] if config.mcp.write else [])]
    own = McpServer(command=command, env=env)
    bridge.add(BUILTIN_SERVER, own)
    servers.pools[BUILTIN_SERVER] = BuiltinServerPool(own, bridge, auth)
