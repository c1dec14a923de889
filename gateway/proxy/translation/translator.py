"""Decides which calls are translated, and translates them from request to answer.

A request is translated before it is forwarded, after the agent's own prompts and models were written into it. The
answer is translated read by read (`framing`). The span is the engine's side, so that everything that reads the tape
reads a call of chat completions; the agent's side is kept beside it.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import orjson

from penstock.gateway.calls.admission import Admitted
from penstock.gateway.calls.capture.request import identity
from penstock.gateway.calls.record import Record
from penstock.gateway.dialects import find
from penstock.gateway.dialects.loose_json import Json
from penstock.gateway.http.errors import ClientFault, Refusal
from penstock.gateway.http.redact import url as redact_url
from penstock.gateway.http.request import Headers, Request
from penstock.gateway.http.upstream_connection import Link
from penstock.gateway.model.exchange import Side
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.proxy.translation import messages_request, responses_request
from penstock.gateway.proxy.translation.answer import Telling
from penstock.gateway.proxy.translation.chat_pieces import Answer, Piece
from penstock.gateway.proxy.translation.checks import KIND, document
from penstock.gateway.proxy.translation.framing import Stream, Told, Whole, streams
from penstock.gateway.proxy.translation.litellm import Library
from penstock.gateway.proxy.translation.messages_answer import Messages
from penstock.gateway.proxy.translation.responses_answer import Responses

_log = logging.getLogger("penstock.translation")
PATH: Final = "/v1/chat/completions"
ATTRIBUTE: Final = "penstock.translated"
"""Attribute of a call: the dialect that its agent speaks."""
_Asking: TypeAlias = Callable[[Library, Json], Json]
_Tellings: TypeAlias = Callable[[Library, Json], Telling]
_WAYS: Final[Mapping[str, tuple[_Asking, _Tellings]]] = {
    "messages": (messages_request.asking, Messages),
    "responses": (responses_request.asking, Responses),
}
DIALECTS: Final = frozenset(_WAYS)
"""Those that are translated."""
_SAID: Final = {"messages": "messages", "responses": "input"}
"""Where the conversation stands in a request."""
_BROKEN: Final = ("error", "interrupted")
"""Ends of a call whose client is still there."""


@dataclass(slots=True)
class Translation:
    """One call that is translated."""

    agent: Admitted
    """As it came."""
    stream: bool
    """Whether the agent waits for events."""
    telling: Telling
    told: Told | None = None
    """The way of its answer, once it has begun."""

    def passing(self, link: Link, http10: bool, own: Secrets) -> Told:
        """How an answer is told. `http10`: whether the client takes no chunks; `own`: what an error may not tell."""
        if self.stream and streams(link, http10):
            self.told = Stream(self.telling, http10)
        else:
            self.told = Whole(self.telling, self.agent.dialect.family, self.stream, own)
        return self.told

    @property
    def problem(self) -> str | None:
        """Why its answer could not be written."""
        return None if self.told is None else self.told.problem

    def response(self) -> bytes:
        """What the agent has got."""
        return b"" if self.told is None else b"".join(self.told.sent)

    def side(self, status: str, answered: bytes) -> Side:
        """The agent's side, for the tape. `status`: how the call ends; `answered`: the gateway's own answer, if there
        was none to write.
        """
        if self.told is not None and status in _BROKEN:
            self._break(self.told)
        agent, response = self.agent, answered if self.told is None else self.response()
        path = redact_url(agent.path)
        return Side(who="agent", dialect=agent.dialect.name, path=path, request_body=agent.body, response_body=response)

    def _break(self, told: Told) -> None:
        """Tells the agent that the answer breaks off. The call must end, even if that fails."""
        try:
            told.broken()
        except Exception:
            _log.exception("the end of an answer of %s could not be told", self.agent.address.rollout)


class Translator:
    """Translates calls. One serves all of a gateway."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def warm(self) -> None:
        """Translates once at the start, because the first time takes a while and logs warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for dialect, (asking, telling) in _WAYS.items():
                probe: Json = {"model": "m", _SAID[dialect]: [{"role": "user", "content": "a"}]}
                asking(self._library, probe)
                answer, piece = Answer("c", "m", finish="stop"), Piece("text", "a")
                telling(self._library, probe).whole(answer, [piece])
                events = telling(self._library, probe)
                _ = [events.begin(answer), events.tell(piece), events.end(answer)]

    def translate(self, record: Record, request: Request) -> Translation:
        """Makes a call one of chat completions, whose request is `record.body` by now. Raises `ClientFault` for what
        cannot be said in it."""
        call, asked = record.call, document(record.body)
        dialect = call.dialect.name
        chat, telling = self.chat(dialect, asked), _WAYS[dialect][1]
        record.call, record.body = replace(call, dialect=find("POST", PATH), path=PATH), chat
        record.retell = lambda body: self.chat(dialect, document(body))
        record.attributes = {**record.attributes, ATTRIBUTE: dialect}
        request.headers = identity(headers(request.headers))
        return Translation(call, bool(asked.get("stream")), telling(self._library, asked))

    def chat(self, dialect: str, asked: Json) -> bytes:
        """The body of chat completions for a request of a dialect. Raises `ClientFault` for what cannot be said."""
        try:
            return orjson.dumps(_WAYS[dialect][0](self._library, asked))
        except Refusal:
            raise
        except Exception as error:
            # What is checked is what is known to matter; a request can be odd in a place that only litellm looks at.
            # Its complaint may hold what was said, so only its name is told.
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} in {where.name}, line {where.lineno}"
            _log.error("a request of %s could not be translated: %s", dialect, what)
            message = f"the request could not be translated to chat completions ({what})"
            raise ClientFault(400, KIND, message) from None


def unavailable(model: str) -> ClientFault:
    """The error for a call that needs translation when the extra is missing."""
    message = (
        f"model {model!r} is trained, which needs chat completions: translate with "
        "pip install 'penstock-gateway[providers]' where the gateway runs, or set translate = false on its route"
    )
    return ClientFault(400, KIND, message)


def headers(given: Headers) -> Headers:
    """An agent's key, where an engine of chat completions looks for it."""
    if any(low == b"authorization" for low, _, _ in given):
        return given
    return [
        (b"authorization", b"Authorization", b"Bearer " + value) if low == b"x-api-key" else (low, name, value)
        for low, name, value in given
    ]
