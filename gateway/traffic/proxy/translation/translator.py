"""Decides which calls are translated, and translates them from request to answer.

A request is translated before it is forwarded, after the agent's own prompts and models were written into it. The
answer is translated read by read (`framing`). The span records the engine's side, so that every reader of the tape sees
a call of chat completions; the agent's side is kept beside it.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import orjson

from penstock.gateway.config import GatewayConfig, RouteSettings
from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.turn import Side
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.proxy_context import CallFilter, CallPlan
from penstock.gateway.traffic.proxy.translation import litellm, messages, responses
from penstock.gateway.traffic.proxy.translation.framing import (
    KIND,
    AnswerConverter,
    AnswerPiece,
    BufferedTranslationFraming,
    ChatAnswer,
    StreamTranslationFraming,
    TranslationFraming,
    can_stream,
    document,
)
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.messages import MessagesConverter
from penstock.gateway.traffic.proxy.translation.responses import ResponsesConverter
from penstock.gateway.wire.capture import accept_identity
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.loose_json import Json
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import ClientFault, Headers, Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

_log = logging.getLogger("penstock.translation")
PATH: Final = "/v1/chat/completions"
ATTRIBUTE: Final = "penstock.translated"
"""Attribute of a call: the dialect that its agent speaks."""
LEFT_OUT: Final = "penstock.translated.left_out"
"""Attribute of a call: the types of the tools that were not passed on."""
_RequestBuilder: TypeAlias = Callable[[LiteLlmApi, Json], Json]
_ConverterFactory: TypeAlias = Callable[[LiteLlmApi, Json], AnswerConverter]
_CONVERSIONS: Final[Mapping[str, tuple[_RequestBuilder, _ConverterFactory]]] = {
    "messages": (messages.chat_request, MessagesConverter),
    "responses": (responses.chat_request, ResponsesConverter),
}
DIALECTS: Final = frozenset(_CONVERSIONS)
"""Names of the dialects that are translated."""
_CONVERSATION: Final = {"messages": "messages", "responses": "input"}
"""Field of the request that holds the conversation, by dialect."""
_BROKEN: Final = ("error", "interrupted")
"""Statuses of calls that end while their client is still connected."""


class TranslationFilter(CallFilter):
    """One call that is translated."""

    __slots__ = ("_agent", "_converter", "_framing", "_own", "_stream")

    def __init__(self, agent: CallRequest, stream: bool, converter: AnswerConverter, own: Secrets) -> None:
        """`agent`: the call as it came; `stream`: the agent expects events; `own`: secrets, taken out of errors."""
        self._agent, self._stream, self._converter, self._own = agent, stream, converter, own
        self._framing: TranslationFraming | None = None
        """The framing of its answer; None until there is one."""

    def framing(self, connection: UpstreamConnection, http10: bool) -> TranslationFraming:
        """The framing of its answer. `http10`: the client takes no chunks."""
        if self._stream and can_stream(connection, http10):
            self._framing = StreamTranslationFraming(self._converter, http10)
        else:
            self._framing = BufferedTranslationFraming(
                self._converter, self._agent.dialect.family, self._stream, self._own
            )
        return self._framing

    def problem(self) -> str | None:
        """The error kind if its answer could not be written; else None."""
        return None if self._framing is None or self._framing.problem is None else KIND

    def client_body(self) -> bytes:
        """The answer's body as the agent has got it."""
        return b"" if self._framing is None else b"".join(self._framing.sent)

    def on_end(self, record: CallRecord, status: str) -> None:
        """Keep the agent's side. If there was no answer to write, the gateway has answered the agent itself."""
        if self._framing is not None and status in _BROKEN:
            self._break(self._framing)
        agent, response = self._agent, record.response() if self._framing is None else self.client_body()
        path = redact_url(agent.path)
        side = Side(who="agent", dialect=agent.dialect.name, path=path, request_body=agent.body, response_body=response)
        record.sides = [*record.sides, side]

    def _break(self, told: TranslationFraming) -> None:
        """Tell the agent that the answer breaks off. The call must end, even if that fails."""
        try:
            told.broken()
        except Exception:
            _log.exception("the end of an answer of %s could not be told", self._agent.address.rollout)


class Translator:
    """Translates calls. A gateway has one."""

    def __init__(self, library: LiteLlmApi) -> None:
        self._library = library

    def warm(self) -> None:
        """Translate once at the start, because the first time takes a while and logs warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for dialect, (chat_request, converter) in _CONVERSIONS.items():
                probe: Json = {"model": "m", _CONVERSATION[dialect]: [{"role": "user", "content": "a"}]}
                chat_request(self._library, probe)
                answer, piece = ChatAnswer("c", "m", finish="stop"), AnswerPiece("text", "a")
                converter(self._library, probe).whole(answer, [piece])
                events = converter(self._library, probe)
                _ = [events.begin(answer), events.feed(piece), events.end(answer)]

    def translate(self, send: CallPlan, own: Secrets) -> None:
        """Make a call one of chat completions. Raises `ClientFault` for a request that cannot be expressed in it."""
        call, asked = send.call, document(send.body)
        dialect = call.dialect.name
        if dialect == "messages":
            messages.check_version(asked, send.headers)
        chat, converter = self.chat(dialect, asked), _CONVERSIONS[dialect][1]
        send.call, send.body = replace(call, dialect=find("POST", PATH), path=PATH), chat
        send.convert = lambda body: self.chat(dialect, document(body))
        send.attributes = {**send.attributes, ATTRIBUTE: dialect, **_unsaid(dialect, asked)}
        send.headers, send.streams = accept_identity(headers(send.headers)), bool(asked.get("stream"))
        send.filters += (TranslationFilter(call, bool(asked.get("stream")), converter(self._library, asked), own),)

    def chat(self, dialect: str, asked: Json) -> bytes:
        """The body of chat completions for a request of a dialect. Raises `ClientFault` if there is none."""
        try:
            return orjson.dumps(_CONVERSIONS[dialect][0](self._library, asked))
        except Refusal:
            raise
        except Exception as error:
            # `check` covers what is known to matter; a request can be odd in a place that only litellm looks at.
            # The exception's text may quote the request, so only its type is shown.
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} in {where.name}, line {where.lineno}"
            _log.error("a request of %s could not be translated: %s", dialect, what)
            message = f"the request could not be translated to chat completions ({what})"
            raise ClientFault(400, KIND, message) from None


def _unsaid(dialect: str, asked: Json) -> Json:
    left = responses.left_out(asked) if dialect == "responses" else []
    return {LEFT_OUT: left} if left else {}


class TranslationMiddleware:
    """Routes to upstreams that speak chat completions only: calls of other dialects are translated, and so are
    answers."""

    def __init__(self, translator: Translator | None, own: Secrets) -> None:
        """`translator`: None if the extra is missing; `own`: the gateway's keys."""
        self._translator, self._own = translator, own

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if the route translates."""
        return route is not None and route.translates

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Translate a call of another dialect."""
        if route is None or send.call.dialect.name not in DIALECTS:
            return
        if self._translator is None:
            raise unavailable(route.model)
        self._translator.translate(send, self._own)


def unavailable(model: str) -> ClientFault:
    """The error for a call that needs translation when the extra is missing."""
    message = (
        f"model {model!r} is trained, which needs chat completions: translate with "
        f"{install_hint('providers')} where the gateway runs, or set translate = false on its route"
    )
    return ClientFault(400, KIND, message)


def headers(given: Headers) -> Headers:
    """Headers with an agent's key where an engine of chat completions looks for it."""
    if any(low == b"authorization" for low, _, _ in given):
        return given
    return [
        (b"authorization", b"Authorization", b"Bearer " + value) if low == b"x-api-key" else (low, name, value)
        for low, name, value in given
    ]


def make_translator(config: GatewayConfig) -> Translator | None:
    """Return the translator if a route needs one, else None; raises `ConfigError` if a route asks for translation
    explicitly and litellm is not installed."""
    routes = [route for route in config.route if route.translates]
    problem = litellm.missing() if routes else None
    if not routes:
        return None
    if problem is None or any(route.translate for route in routes):
        translator = Translator(litellm.load())
        translator.warm()
        return translator
    _log.warning("calls of messages and responses to trained models will be refused: %s", problem)
    return None
