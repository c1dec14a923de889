"""Decides how a call of an exact route goes: as the chat request if the template gives the very tokens, else as token
ids.

The engine renders a call whose conversation continues an earlier answer. If the rendered tokens begin with those of the
earlier prompt and answer, the chat request is sent unchanged. If they do not, the gateway sends the earlier tokens and
those that the template writes after them (`sessions`), and makes a chat answer of the generated tokens (`chat_answer`).
If the template's tokens cannot be found, and for every other call, the chat request is sent unchanged and begins a
session. The span says which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from penstock.gateway.config import RouteSettings
from penstock.gateway.model.facts import BEGAN
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.proxy.exact import sessions
from penstock.gateway.traffic.proxy.exact.chat_answer import (
    ChatCompletionWriter,
    message_fingerprints,
    messages,
    only_text,
)
from penstock.gateway.traffic.proxy.exact.connection import (
    ExactEngineClient,
    GenerateConnection,
    RenderResponse,
    VllmError,
    id_list,
)
from penstock.gateway.traffic.proxy.exact.sessions import (
    SESSION,
    AttemptTurns,
    ExactSessionStore,
    RenderedConversation,
    SessionKey,
    SessionTurn,
    StartReason,
    TemplateTokens,
    TurnMatch,
    continuation_ids,
    new_session,
    turn_tail,
)
from penstock.gateway.traffic.proxy.proxy_context import CallFilter, CallPlan, PendingCall
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.loose_json import Json, obj, strict
from penstock.gateway.wire.dialects.tokens import WIDTH
from penstock.gateway.wire.http.request import HttpRequest, Refusal

_log = logging.getLogger("penstock.exact")
_OTHER: Final = {"role": "assistant", "content": "x"}
"""A turn of the model with another text, to find the tokens after a turn."""


class ExactMiddleware:
    """Routes on which conversations continue from the very tokens of their answers (`train = "exact"`)."""

    def __init__(self, exact: ExactSessionStore) -> None:
        self._exact = exact

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if the route trains on exact token ids."""
        return route is not None and route.train == "exact"

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Add the part that decides how the call goes; it does so while connecting, because that needs the engine."""
        if send.call.dialect.name == "chat":
            send.filters += (ExactFilter(self._exact),)


class ExactFilter(CallFilter):
    """The decision for one call."""

    __slots__ = ("_exact", "_how", "_key", "_name", "_record", "_request", "_session", "_turn")

    _record: CallRecord
    _request: HttpRequest
    _name: tuple[str, str]

    def __init__(self, exact: ExactSessionStore) -> None:
        self._exact = exact
        self._name = "", ""
        self._key: SessionKey = ()
        self._session = ""
        self._how = ""
        self._turn: SessionTurn | None = None
        """The turn that it continues, reserved for it; None if there is none."""

    def connect(self, call: PendingCall, pool: ConnectionPool, fresh: bool) -> asyncio.Task[None]:
        """Decide how the call goes and hand it the connection for that; the task can be cancelled."""
        if not self._name[0]:
            self._record, self._request, address = call.record, call.request, call.record.call.address
            self._name = address.rollout, address.attempt
        task = asyncio.ensure_future(self._connect(call, pool, fresh))
        task.add_done_callback(_connected)
        return task

    async def _connect(self, call: PendingCall, pool: ConnectionPool, fresh: bool) -> None:
        try:
            made = await self._way(
                ExactEngineClient(self._exact.session, pool, self._request, self._record.call.families)
            )
        except Refusal as refusal:
            call.on_refused(refusal)
        except TimeoutError as error:
            call.on_unreachable("connect_timeout", str(error))
        except (aiohttp.ClientError, OSError) as error:
            call.on_unreachable("connect", str(error) or type(error).__name__)
        else:
            if made is not None:
                # As for any other call, its connection may be one that was idle.
                made.reused = not fresh
            connection = made or (None if fresh else pool.take())
            if connection is None:
                call.connecting = pool.connect(call)
            else:
                call.on_connected(connection)

    async def _way(self, engine: ExactEngineClient) -> GenerateConnection | None:
        """The connection that sends token ids; None to send the chat request unchanged."""
        asked, record = obj(strict(self._record.plain)), self._record
        self._let_go()
        self._session = self._how = ""
        record.attributes, record.sides = _without_marks(record.attributes), ()
        if not sessions.has_standard_prompt(asked) or asked.get("return_token_ids") is not True:
            return None
        conversation = messages(asked)
        self._key = sessions.session_key(record.call.address.agent, record.plain, record.versions)
        told = message_fingerprints(conversation)
        attempt = await self._exact.attempt(self._name, told)
        found = attempt.find(self._key, told)
        if not isinstance(found, TurnMatch):
            await self._probe(engine, asked)
            self._begin(found)
            return None
        return await self._go_on(engine, asked, attempt, found, only_text(conversation))

    async def _probe(self, engine: ExactEngineClient, asked: Json) -> None:
        """Ask an upstream at the first call of a rollout whether it renders, and not only at the second."""
        name = engine.pool.name
        if name not in self._exact.rendering:
            try:
                await engine.render(_quiet(asked))
            except VllmError:
                # The chat endpoint refuses the request, too, and says it in its own words.
                return
            self._exact.rendering.add(name)

    async def _go_on(
        self, engine: ExactEngineClient, asked: Json, attempt: AttemptTurns, found: TurnMatch, text: bool
    ) -> GenerateConnection | None:
        turn, more = found.turn, None
        ids = turn.ids()
        try:
            whole = await engine.render(asked)
            if whole.ids.startswith(ids):
                self._continue(turn, "chat")
                return None
            if text and whole.plain:
                habits = attempt.templates.setdefault(self._key, TemplateTokens())
                more = await self._more(engine, asked, habits, found, whole.ids)
        except VllmError as error:
            _log.warning("an exact call of %s could not be rendered: %s", self._name[0], error)
            self._begin("unrendered")
            return None
        else:
            if more is not None:
                self._continue(turn, "generate")
                return _generation(engine, asked, whole, ids + more, self._record)
        self._begin(_why(turn, asked, text))
        return None

    async def _more(
        self, engine: ExactEngineClient, asked: Json, habits: TemplateTokens, found: TurnMatch, whole: bytes
    ) -> bytes | None:
        """The ids after those of the session; None if they cannot be found."""
        pieces, at, written = found.turn.pieces(), found.message, asked["messages"]
        end = pieces[-1].answer[-WIDTH:]
        upto = (await engine.render(_quiet(asked, written[: at + 1]))).ids
        if habits.opening is None or not whole.endswith(habits.opening):
            shut = (await engine.render(_quiet(asked, written))).ids
            habits.opening = whole[len(shut) :] if whole.startswith(shut) else None
        if habits.opening is not None and end not in habits.tails:
            other = (await engine.render(_quiet(asked, [*written[:at], _OTHER]))).ids
            tail = turn_tail(pieces, other, habits.opening)
            habits.tails |= {} if tail is None else {end: tail}
        if habits.opening is None or end not in habits.tails:
            return None
        return continuation_ids(pieces, RenderedConversation(whole, upto, habits.opening, habits.tails[end]))

    def _begin(self, why: StartReason) -> None:
        self._mark(new_session(), why, why)

    def _continue(self, turn: SessionTurn, how: str) -> None:
        """Continue a turn. If another call has continued it already, or is doing so now, this one is a fork with the
        same tokens."""
        if turn.continued or turn.claimed_by is not None:
            self._mark(new_session(), "forked", how)
        else:
            turn.claimed_by, self._turn = self, turn
            self._mark(turn.session, None, how)

    def _let_go(self) -> None:
        """Free the turn: another call may continue it, unless this one has."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.claimed_by = None

    def _mark(self, session: str, began: StartReason | None, how: str) -> None:
        self._session, self._how = session, how
        more = {SESSION: session} | ({} if began is None else {BEGAN: began})
        self._record.attributes = _without_marks(self._record.attributes) | more

    def on_end(self, record: CallRecord, status: str) -> None:
        """Remove the session of a refused call: no token of it was read or made."""
        if status != "ok":
            self._let_go()
        if (record.http_status or 0) >= 400:
            record.attributes = _without_marks(record.attributes)

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Learn the answer before any call can continue it."""
        if self._session and not record.truncated:
            self._exact.metrics.exact_calls[(self._how,)] += 1
            asyncio.get_running_loop().call_soon(self._learn)

    def _learn(self) -> None:
        record = self._record
        bodies = record.plain, record.response()
        self._exact.learn(self._name, self._session, self._key, bodies, record.stream)
        self._let_go()


def _without_marks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without the two that this part sets."""
    return {name: value for name, value in attributes.items() if name not in (SESSION, BEGAN)}


def _connected(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        # The call is left without a connection and a task: the next sweep ends it.
        _log.error("an exact call could not be sent", exc_info=error)


def _why(turn: SessionTurn, asked: Json, text: bool) -> StartReason:
    """The reason why tokens cannot continue although the conversation does."""
    if not text:
        return "media"
    if not turn.piece.ended:
        return "cut"
    return "template" if sessions.tools_digest(asked) == turn.tools else "tools"


def _quiet(asked: Json, conversation: list[Json] | None = None) -> Json:
    """A request to render. A given conversation is rendered without the opening of a next turn."""
    kept = {name: value for name, value in asked.items() if name not in ("stream", "stream_options")}
    return kept if conversation is None else kept | {"messages": conversation, "add_generation_prompt": False}


def _generation(
    engine: ExactEngineClient, asked: Json, whole: RenderResponse, prompt: bytes, record: CallRecord
) -> GenerateConnection:
    words = ChatCompletionWriter(asked, whole.request, id_list(prompt))
    return GenerateConnection(engine, words, _sampled(asked, whole), prompt, record)


def _sampled(asked: Json, whole: RenderResponse) -> Json:
    """The request to generate. `max_tokens` that render has derived is left out: the room for new tokens depends on the
    ids that are sent."""
    sampling = obj(whole.request.get("sampling_params"))
    if sampling.get("max_tokens") not in (asked.get("max_tokens"), asked.get("max_completion_tokens")):
        sampling = {name: value for name, value in sampling.items() if name != "max_tokens"}
    return whole.request | {"sampling_params": sampling, "stream": bool(asked.get("stream"))}
