"""Calls of which little or nothing is interpreted: embeddings, lists of models, and all others, which are recorded byte
for byte, except for fields that any JSON body may have.

The model is looked for because many of these calls name one (rerank, speech, fine-tuning), and upstreams are chosen by
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Passage, Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.chat import prompts
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, body_failure
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, error_message, label, lenient, loads, obj
from penstock.gateway.wire.dialects.parts import body_passages
from penstock.gateway.wire.dialects.sse import last_data
from penstock.gateway.wire.dialects.tokens import embeddings_usage, openai_usage
from penstock.gateway.wire.dialects.websocket_messages import ClientMessageFacts, ClientMessageKind

_TAIL: Final = 3
"""Number of events at the end of a stream, one of which may hold the usage."""


class _UsageField(msgspec.Struct):
    usage: Any = None


_answer = lenient(_UsageField)


def _used(usage: Any) -> Usage | None:
    found = openai_usage({"usage": usage})
    return None if found == Usage() else found


class OpaqueDialect(Dialect):
    """A call of no known format."""

    name = "opaque"
    family = OPENAI
    unknown = True

    def matches(self, method: str, path: str) -> bool:
        return True

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The requested model, and the answer's usage if it has the fields of chat's or responses'; of a stream, that
        of the last events."""
        said = last_data(response, _TAIL)[::-1] if stream else [response]
        usage = next((it for data in said if (it := _used(_answer(data).usage)) is not None), None)
        return Facts(model=self.model(request, asked=asked), usage=usage)

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The requested model, and the error if the answer is one."""
        answer = Json() if stream else obj(loads(response))
        usage = self.facts(request, response, stream).usage
        error = error_message(answer)
        return Turn(dialect=self.name, model=self.model(request), stream=stream, error=error, usage=usage)

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """Both bodies, as far as they are text."""
        return [*body_passages(request, False), *body_passages(response, True)]


# Sessions on WebSockets of no known format: all that passes is kept, and no more is read than the model, if the first
# messages name one. Nothing tells how much they use.


class _NamedModel(msgspec.Struct):
    model: Any = None


class _NamingMessage(_NamedModel):
    session: _NamedModel | None = None
    setup: _NamedModel | None = None


_said = lenient(_NamingMessage)


class SocketDialect(OpaqueDialect):
    name = "websocket"
    websocket = session = undivided = True
    error_events = peeks = False

    def matches(self, method: str, path: str) -> bool:
        """True for the opening of any WebSocket."""
        return method == "WEBSOCKET"

    @staticmethod
    def read_client_message(message: bytes) -> ClientMessageFacts:
        """Look for the model that the message names."""
        said = _said(message)
        found = (said.model, *(it.model for it in (said.session, said.setup) if it is not None))
        return ClientMessageFacts(ClientMessageKind.OTHER, model=next(filter(None, map(label, found)), None))

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model that a message or the query has named."""
        named = label(asked.model) if asked is not None else None
        return named or label(dict(parse_qsl(path.partition("?")[2])).get("model"))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """Only the model: nothing tells how much is used."""
        return Facts(model=self.model(request, asked=asked))


# The list of models: `GET /v1/models` and `GET /v1/models/{id}`. It is recorded, and nothing in it is read.
#
# Both families have this route at the same path; an id may hold one slash, as those on the Hugging Face hub do.

ROUTE = re.compile(r"(?:/v1)?/models(?:/[^/]+){0,2}")


class ModelsDialect(OpaqueDialect):
    name = "models"

    def matches(self, method: str, path: str) -> bool:
        """True for the list and for one model."""
        return method == "GET" and ROUTE.fullmatch(path) is not None


# OpenAI embeddings: `POST /v1/embeddings`. The texts and the token counts are read, the vectors are left alone.


class _EmbeddingsHead(ErrorFields):
    model: Any = None
    usage: Any = None


_decode = lenient(_EmbeddingsHead)


class EmbeddingsDialect(JsonPostDialect):
    name = "embeddings"
    family = OPENAI
    generates = False
    otel: GenAiNames | None = GenAiNames("embeddings", "openai")
    routes: ClassVar[frozenset[str]] = routes("/embeddings")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"input", "model"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """Model, usage and failure; the vectors are skipped."""
        answer = _decode(response)
        usage = embeddings_usage({"usage": answer.usage})
        model, failed = self.model(request, asked=asked), None if stream else body_failure(answer)
        return Facts(model=model, model_served=label(answer.model), usage=usage, failed=failed)

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Note a problem: no embeddings API is known to stream."""
        problems.append("response: a stream, which no embeddings API is known to send")
        return {}

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message per text."""
        return [Message(role="user", parts=[part]) for part in prompts(asked.get("input"))]

    def choices(self, answer: Json) -> list[Choice]:
        """None: vectors are no messages."""
        return []

    def usage(self, answer: Json) -> Usage | None:
        return embeddings_usage(answer)
