"""One agent in rehearsal: the gateway plays its tools on the model's side.

The gateway sends the agent's request to the version of the run. When the answer calls tools, the agent does not get it.
The gateway looks the calls up in the recorded rollout's cassette (`Cassette`), appends the answer and the recorded
results to the request, and asks the model again, until an answer calls no tool. The agent gets that answer unchanged.
So the agent runs no tool, whatever the version makes it want; everything else that it does happens.

A call that is not on the cassette ends the run: it has *diverged*, and this and every further call of the agent is
refused. The same happens when the version cannot be written in, when the provider would run a tool of its own, or when
too many requests were made. A request that failed on the way (the provider, the client that left) is taken back: the
agent may ask again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from http import HTTPStatus
from typing import Any, Final, NoReturn

import orjson

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.release import Release
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.reading.turns import decode_body
from penstock.gateway.releases.canary.outcomes import Requester, audience_includes, stable_version
from penstock.gateway.traffic.calls.answer_masking import mask_recorded_body, unencoded
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.trials.judges import canonical
from penstock.gateway.traffic.trials.sender import (
    OutboundRequest,
    ReleaseContext,
    ReleaseSender,
    Reply,
    rewrite,
    unrepeatable,
)
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import Json, arr, loads, obj, strict
from penstock.gateway.wire.dialects.request_body import replace_model
from penstock.gateway.wire.http.headers import HOP
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, HttpRequest, Refusal, UpstreamFault

DIVERGED: Final = "diverged"
"""Short reason of a refusal: the run has left its recording."""
SPENT: Final = "steps"
"""Short reason of a refusal: the run made too many requests."""
UNFIT: Final = "version"
"""Short reason of a refusal: its version cannot be written into the request."""
_OWN: Final = HOP | {b"content-length", b"transfer-encoding", b"trailer"}


@dataclass(frozen=True, slots=True)
class RehearsalAnswer:
    """The agent's answer: one of the model, unchanged."""

    reply: Reply

    @property
    def status(self) -> int:
        """The HTTP status; 502 when the model gave none."""
        return self.reply.status or 502

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that hold for the whole answer."""
        return [(name, value) for name, value in self.reply.headers if name.lower() not in _OWN]

    def without(self, own: Secrets) -> RehearsalAnswer:
        """Return the answer without the gateway's own keys."""
        kept = mask_recorded_body(own, self.reply.body, self.reply.header(b"content-encoding"))
        headers = unencoded(self.reply.headers) if kept.decoded else self.reply.headers
        fields = [(name, own.hide(value)) for name, value in headers]
        return RehearsalAnswer(replace(self.reply, pieces=[kept.body], headers=fields))

    def head(self, keep_alive: bool) -> bytes:
        """Return the head of the HTTP response."""
        lines = [b"HTTP/1.1 %d %b" % (self.status, _phrase(self.status))]
        lines += [b"%b: %b" % header for header in self.headers]
        lines.append(b"Content-Length: %d" % len(self.reply.body))
        return b"\r\n".join([*lines, *([] if keep_alive else [b"Connection: close"]), b"", b""])


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


@dataclass(frozen=True, slots=True)
class RehearsalContext:
    """The release and the recorded rollout of one run."""

    release: Release
    versions: Mapping[str, str]
    """The versions that the run gets, by resource."""
    asker: Requester
    """The asker of the recorded rollout; agent and model are taken from each call."""
    attributes: Mapping[str, str]
    """Attributes of the spans of its requests."""
    of: str
    """The name of the recorded rollout, for people."""


class ToolPlayer:
    """One agent at work: its requests and the results that were played to it."""

    def __init__(
        self, context: ReleaseContext, sender: ReleaseSender, role: RehearsalContext, cassette: Cassette
    ) -> None:
        """`cassette`: the recorded results, at their beginning."""
        self._context = context
        self._asking = sender
        self._role = role
        self._cassette = cassette
        self._left = role.release.policy.replay.steps
        self._told: list[HiddenMessages] = []
        self.refusal: Refusal | None = None
        """The refusal of every further call; None while the run goes on."""

    async def answer(self, call: CallRequest, request: HttpRequest, prompt: str | None) -> RehearsalAnswer:
        """Return the agent's answer; raises `Refusal`. `prompt`: the prompt that the call names."""
        if self.refusal is not None:
            raise self.refusal
        problem = unrepeatable(call.dialect, call.body)
        if problem is not None:
            self._end(DIVERGED, f"this rehearsal has diverged: {problem}")
        question = self._question(call, request, prompt)
        played: list[tuple[str, str, Part]] = []
        answered = False
        try:
            reply, hidden = await self._play(question, played)
            answered = hidden is not None
        finally:
            if not answered:
                self._cassette.take_back(played)
        if hidden:
            said = call.dialect.conversation(obj(loads(call.body)))
            self._told.append(HiddenMessages(plain(said), hidden))
        return RehearsalAnswer(reply)

    async def _play(
        self, question: OutboundRequest, played: list[tuple[str, str, Part]]
    ) -> tuple[Reply, Sequence[object] | None]:
        """Return (the answer that calls no tool, the messages played before it); None for these when the model has
        failed."""
        hidden: list[object] = []
        asked = obj(loads(question.body))
        while True:
            answer = await self._ask(question)
            reply = answer[0]
            if answer[1] is None:
                return reply, None
            calls = self._calls(answer[1])
            if not calls:
                return reply, hidden
            hidden += self._results(question, reply, calls, played)
            told = question.dialect.conversation(asked)
            body = orjson.dumps(question.dialect.with_conversation(asked, [*told, *hidden]))
            question = replace(question, body=body)

    async def _ask(self, question: OutboundRequest) -> tuple[Reply, Turn | None]:
        if not self._left:
            steps = self._role.release.policy.replay.steps
            self._end(SPENT, f"this rehearsal has made {steps} requests to the model; it ends here")
        self._left -= 1
        answer = await self._asking.ask(question)
        reply = answer.reply
        assert reply is not None
        if reply.status is None or reply.error is not None:
            status = 504 if reply.error == "timeout" else 502
            message = f"upstream {question.pool.name!r} did not answer: {reply.problem}"
            raise UpstreamFault(status, reply.error or "upstream_closed", message)
        return reply, answer.turn

    def _calls(self, turn: Turn) -> list[Part]:
        """Return the tool calls of an answer."""
        choices = sorted(turn.choices, key=lambda one: one.index)
        found = [[part for part in choice.message.parts if part.type == "tool_call"] for choice in choices]
        if any(found[1:]):
            self._end(DIVERGED, "this rehearsal has diverged: several choices of one answer call tools")
        return found[0]

    def _results(
        self, question: OutboundRequest, reply: Reply, calls: Sequence[Part], played: list[tuple[str, str, Part]]
    ) -> Sequence[object]:
        """Return the answer with the recorded results of its calls."""
        results: list[Part] = []
        for call in calls:
            tool, arguments = call.name or "", call.arguments or ""
            result = self._cassette.answer(tool, arguments)
            if result is None:
                self._miss()
            played.append((tool, arguments, result))
            results.append(result)
        response = decode_body(reply.body, reply.header(b"content-encoding"))[0]
        try:
            return exchange(question.dialect, response, reply.stream, results)
        except ContinuationError as error:
            self._end(DIVERGED, f"this rehearsal has diverged: {error}")

    def _miss(self) -> NoReturn:
        miss = self._cassette.misses[-1]
        times = "" if miss.occurrence == 1 else f" {miss.occurrence} times"
        message = (
            f"this rehearsal has diverged: the model calls {miss.tool}({miss.arguments[:500]}){times}, and "
            f"{self._role.of}, which is rehearsed, did not: there is no result to go on with"
        )
        self._end(DIVERGED, message)

    def _end(self, kind: str, message: str) -> NoReturn:
        self.refusal = ClientFault(400, kind, message)
        raise self.refusal

    # -- the question ------------------------------------------------------------------------------------------------

    def _question(self, call: CallRequest, request: HttpRequest, prompt: str | None) -> OutboundRequest:
        """Return the agent's call with its versions in it, and with the messages that the agent has not seen."""
        call = self._restored(call)
        context, model = self._context, call.model
        found = context.pins.find(call, prompt)
        versions = {} if found is None else {name: self._version(name, call, model) for name in found.resources}
        body, upstream = call.body, None
        if found is not None:
            made = rewrite(context.pins.catalog, call.body, found.prompts, found.model, versions)
            if isinstance(made, str):
                self._end(UNFIT, f"this rehearsal cannot go on: {made}")
            body, upstream = made[0], None if made[1] is None else made[1].upstream
        pool, alias = self._pool(call, request, upstream)
        path = call.path
        if alias is not None:
            body, path = replace_model(body, alias), call.dialect.renamed(path, alias)
        said, agent = self._role.attributes, call.address.agent
        return OutboundRequest(pool, call.dialect, request, path, body, said, model, agent, versions)

    def _restored(self, call: CallRequest) -> CallRequest:
        dialect, asked = call.dialect, obj(strict(call.body))
        if not dialect.conversation_field or not self._told:
            return call
        told = dialect.conversation(asked)
        whole = restore(told, self._told)
        if len(whole) == len(told):
            return call
        return replace(call, body=orjson.dumps(dialect.with_conversation(asked, whole)))

    def _version(self, resource: str, call: CallRequest, model: str | None) -> str:
        """Return the run's own version; for other resources, and for calls outside the release's audience, the stable
        one."""
        role = self._role
        asker = role.asker._replace(agent=call.address.agent or "", model=model or "")
        if resource in role.versions and audience_includes(role.release.only, asker):
            return role.versions[resource]
        return stable_version(self._context.pins.catalog.stable[resource], asker)

    def _pool(self, call: CallRequest, request: HttpRequest, upstream: str | None) -> tuple[ConnectionPool, str | None]:
        """Return (the pool to send to, the model name to send instead)."""
        if upstream is None:
            return self._context.routes.first(call.model, call.dialect, call.path, request.headers)
        pool = self._context.pools.get(upstream)
        if pool is None:
            raise GatewayFault(503, "upstream", f"upstream {upstream!r} is not configured any more")
        return pool, None


# -- recorded tool results ---------------------------------------------------------------------------------------------

# A `Cassette` answers a tool call with the result of the same call in the recorded rollout: the tool, its arguments
# as canonical JSON, and the number of the call among those of its kind (a second look at a seat may find it taken). A
# call that the recorded agent did not make has no result: that is a *miss*, and from there on the run has *diverged*.
# The real result is unknown, so none is made up; the caller ends the run there and counts it.
#
# Results are taken from the requests: an agent sends with every call the results of its tools so far, or names the
# response that it continues, where the provider keeps conversations. Ids of calls are matched in their order, because
# real agents use one id several times.

ToolCallKey = tuple[str, str]
"""A tool and its canonical arguments."""


@dataclass(frozen=True, slots=True)
class CassetteMiss:
    """A tool call that was not recorded."""

    tool: str
    arguments: str
    """The arguments as canonical JSON."""
    occurrence: int
    """Number of the call among those with these arguments, from 1."""


@dataclass(slots=True)
class Cassette:
    """The tool results of one rollout; plays once, from its beginning."""

    results: Mapping[ToolCallKey, Sequence[Part]]
    """The results of each call, in the order of its occurrences."""
    misses: list[CassetteMiss] = field(default_factory=list[CassetteMiss])
    """Calls without a recorded result; at the first of them the run diverged."""
    _left: dict[ToolCallKey, list[int]] = field(default_factory=dict[ToolCallKey, list[int]])
    """Indices of the results of each call that were not played, as a heap: requests of an agent may run at once."""

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Cassette:
        """Return the results in a rollout's exchanges, in their order. Each request repeats its agent's conversation,
        so a call counts once: by its id, or, where a dialect has no ids, by its place."""
        conversations: list[list[Message]] = []
        kept: dict[str, list[Message]] = {}
        for turn in turns:
            messages = [message for message in turn.messages if message.role not in ("system", "developer")]
            messages = kept.get(turn.previous_response or "", []) + messages
            _follow(conversations, messages)
            if turn.response_id is not None and turn.choices:
                kept[turn.response_id] = [*messages, turn.choices[0].message]
        results: dict[ToolCallKey, list[Part]] = defaultdict(list)
        for key, result in (call for conversation in conversations for call in _answered(conversation)):
            if result is not None:
                results[key].append(result)
        return cls(dict(results))

    def answer(self, tool: str, arguments: str) -> Part | None:
        """Return the recorded result of this call: text, and in `data` what is more than text; None for a miss.
        `arguments`: JSON text."""
        key = tool, canonical(arguments)
        recorded = self.results.get(key, ())
        left = self._left.setdefault(key, list(range(len(recorded))))
        if left:
            return recorded[heappop(left)]
        missed = sum((miss.tool, miss.arguments) == key for miss in self.misses)
        self.misses.append(CassetteMiss(*key, len(recorded) + missed + 1))
        return None

    def take_back(self, calls: Iterable[tuple[str, str, Part]]) -> None:
        """Return the results of calls to the cassette; their request has failed and will be sent again."""
        for tool, arguments, result in calls:
            key = tool, canonical(arguments)
            place = next(at for at, one in enumerate(self.results[key]) if one is result)
            heappush(self._left[key], place)

    def fresh_copy(self) -> Cassette:
        """Return the same cassette at its beginning."""
        return Cassette(self.results)


def _follow(conversations: list[list[Message]], messages: list[Message]) -> None:
    """Replace the conversation that a request's messages continue, or add them beside the others."""
    for at, known in enumerate(conversations):
        if messages[: len(known)] == known:
            conversations[at] = messages
            return
        if known[: len(messages)] == messages:
            # The same request was sent again.
            return
    conversations.append(messages)


def _answered(messages: list[Message]) -> list[tuple[ToolCallKey, Part | None]]:
    """Return the calls of a conversation, each with its result."""
    waiting: list[tuple[str | None, ToolCallKey, int]] = []
    found: list[tuple[ToolCallKey, Part | None]] = []
    for message in messages:
        for part in message.parts:
            if part.type == "tool_call":
                key = part.name or "", canonical(part.arguments or "")
                waiting.append((part.id, key, len(found)))
                found.append((key, None))
            elif part.type == "tool_call_response" and waiting:
                # Without an id it answers the first call of that name that still waits.
                mine = next((it for it in waiting if _answers(part, it[0], it[1])), None)
                if mine is not None:
                    waiting.remove(mine)
                    found[mine[2]] = mine[1], part
    return found


def _answers(result: Part, call_id: str | None, key: ToolCallKey) -> bool:
    if result.id is not None or call_id is not None:
        return result.id == call_id
    return result.name in (None, key[0])


# -- the conversation that goes on without its agent -------------------------------------------------------------------

# An agent that has called its tools sends the conversation again with the model's answer and a result for each call.
# The gateway does that for the agent, in the wire form of its API (`Dialect.continuation`): the answer's own objects
# unchanged, as the official SDKs send them back, and the recorded results under the ids of the new calls. Read again,
# such a request is the old conversation, the answer and the results.
#
# The agent never saw these messages, so its later requests lack them. `restore` puts them back in their place:
# without them the model would not know the results of its own tools.

_ASKING: Final = ("user", "system", "developer", "tool", "function")
"""Roles of messages that are not the model's."""


class ContinuationError(Exception):
    """A tool call of the answer has no result that could be written; the message says why."""


@dataclass(frozen=True, slots=True)
class HiddenMessages:
    """Tool calls and results that an agent has not seen."""

    before: list[Any]
    """The messages before them, as `plain` returns them."""
    messages: Sequence[Any]
    """The hidden messages."""


def exchange(dialect: Dialect, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json]:
    """Return an answer and the results of its calls, in their order, as messages of a request. Raises
    `ContinuationError`."""
    made = dialect.continuation(response, stream, results)
    if made is None:
        raise ContinuationError("a call of it has no result that could be written")
    return made


def restore(messages: Sequence[Any], told: Sequence[HiddenMessages]) -> list[Any]:
    """Return a conversation with its hidden messages. Of several for one place the last counts."""
    whole = list(messages)
    compared: list[Any] = plain(whole)
    at = {len(one.before): one for one in told if _goes_on(compared, one)}
    for place in sorted(at, reverse=True):
        whole[place:place] = at[place].messages
    return whole


def _goes_on(messages: list[Any], hidden: HiddenMessages) -> bool:
    """True if the messages are those in `hidden.before`, followed by an answer of the model."""
    end = len(hidden.before)
    if end >= len(messages) or obj(messages[end]).get("role") in _ASKING:
        return False
    return messages[:end] == hidden.before


def plain(value: Any) -> Any:
    """Return a value without cache markers: agents move them from message to message."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in obj(value).items() if key != "cache_control"}
    return [plain(inner) for inner in arr(value)] if isinstance(value, list) else value
