"""One agent in rehearsal: the gateway plays its tools on the model's side.

The gateway sends the agent's request to the version of the run. When the answer calls tools, the agent does not get it.
The gateway looks the calls up in the recorded rollout's cassette (`Cassette`), appends the answer and the recorded
results to the request (both in `recorded_rollouts`), and asks the model again, until an answer calls no tool. The agent
gets that answer unchanged. So the agent runs no tool, whatever the version makes it want; everything else that it does
happens.

A call that is not on the cassette ends the run: it has *diverged*, and this and every further call of the agent is
refused. The same happens when the version cannot be written in, when the provider would run a tool of its own, or when
too many requests were made. A request that failed on the way (the provider, the client that left) is taken back: the
agent may ask again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final, NoReturn

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.release import Release
from penstock.gateway.model.turn import Part, Turn
from penstock.gateway.reading.turns import decode_body
from penstock.gateway.releases.canary.outcomes import Requester, audience_includes, stable_version
from penstock.gateway.traffic.calls.answer_masking import mask_recorded_body, unencoded
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.trials.rehearsal.recorded_rollouts import (
    Cassette,
    ContinuationError,
    HiddenMessages,
    conversation,
    exchange,
    plain,
    restore,
    with_conversation,
)
from penstock.gateway.traffic.trials.replay.sender import (
    OutboundRequest,
    ReleaseContext,
    ReleaseSender,
    Reply,
    rewrite,
    unrepeatable,
)
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.loose_json import loads, obj, strict
from penstock.gateway.wire.http.headers import HOP
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, HttpRequest, Refusal, UpstreamFault
from penstock.gateway.wire.model_name import replace_model

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
            said = conversation(call.dialect, obj(loads(call.body)))
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
            told = conversation(question.dialect, asked)
            body = with_conversation(question.dialect, asked, [*told, *hidden])
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
        body = body if alias is None else replace_model(body, alias)
        said, agent = self._role.attributes, call.address.agent
        return OutboundRequest(pool, call.dialect, request, call.path, body, said, model, agent, versions)

    def _restored(self, call: CallRequest) -> CallRequest:
        dialect, asked = call.dialect, obj(strict(call.body))
        if not dialect.conversation_field or not self._told:
            return call
        told = conversation(dialect, asked)
        whole = restore(told, self._told)
        return call if len(whole) == len(told) else replace(call, body=with_conversation(dialect, asked, whole))

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
