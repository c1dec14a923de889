"""Google's Code Assist, which Gemini CLI asks with a Google login: `POST /v1internal:generateContent` and its like.

A request is one of Gemini in an envelope, `{model, project, user_prompt_id, request}`, and so is an answer, also each
event of a stream: `{response, traceId}`. What is in the envelopes is read as Gemini's. The other operations (logins,
quotas, settings) are opaque: they use no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts, GenAiNames
from penstock.gateway.wire.dialects.family import CODEASSIST, ErrorFields, body_failure
from penstock.gateway.wire.dialects.gemini import GeminiDialect, GeminiSystemFields
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, dumps, label, lenient, loads, obj, objs
from penstock.gateway.wire.dialects.request_body import LARGE, ConversationItems, Path, member_json, skim
from penstock.gateway.wire.dialects.sse import StreamReader

_MEMBERS = frozenset({"model", "request"})


class _RequestEnvelope(msgspec.Struct):
    model: Any = None
    request: msgspec.Raw = msgspec.Raw()


class _FieldsEnvelope(msgspec.Struct):
    model: Any = None
    request: RequestFields | None = None


class _SystemEnvelope(msgspec.Struct):
    request: GeminiSystemFields | None = None


class _AnswerEnvelope(ErrorFields):
    response: Any = None


_envelope = lenient(_RequestEnvelope)
_fields = lenient(_FieldsEnvelope)
_system = msgspec.json.Decoder(_SystemEnvelope).decode
_plain = StreamReader(_AnswerEnvelope).body
_events = StreamReader(_AnswerEnvelope).events


def _opened(request: bytes) -> tuple[Any, bytes]:
    """(model, request of Gemini) of a request; the second is empty where there is none."""
    if len(request) <= LARGE:
        one = _envelope(request)
        return one.model, bytes(one.request)
    try:
        found = skim(request, _MEMBERS)
    except ValueError:
        return None, b""
    return loads(member_json(found.get("model"))), member_json(found.get("request"))


def _request_fields(request: bytes) -> RequestFields:
    one = _fields(request)
    found = one.request or RequestFields()
    found.model = one.model
    return found


def _unwrapped(response: bytes, stream: bool) -> bytes:
    """An answer as Gemini itself sends it."""
    if stream:
        told = [one.response or {"error": one.error or one.type} for one in chain.from_iterable(_events(response))]
        return b"".join([b"data: %b\n\n" % dumps(one).encode() for one in told])
    if response.lstrip()[:1] == b"[":
        value = loads(response)
        told = [one.get("response") or one for one in objs(value)]
        return dumps(told).encode() if isinstance(value, list) else response
    inside = _plain(response).response
    return dumps(inside).encode() if isinstance(inside, dict) else response


class CodeAssistDialect(GeminiDialect):
    name = "codeassist"
    peeks = True
    family = CODEASSIST
    request_fields: Callable[[bytes], RequestFields] = staticmethod(_request_fields)
    model = Dialect.model

    def matches(self, method: str, path: str) -> bool:
        """True for a POST of one of these operations."""
        return method == "POST" and path.startswith("/v1internal:") and path[len("/v1internal:") :] in self.routes

    def requests(self, request: bytes) -> Iterator[tuple[GeminiSystemFields, Path]]:
        """The request in the envelope."""
        inside = _system(request).request
        if inside is not None:
            yield inside, ("request",)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        model, inside = _opened(request)
        found = super().facts(inside, _unwrapped(response, stream), stream)
        found.model = label(model)
        return found

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        model, inside = _opened(request)
        return super().read(inside, response, stream).model_copy(update={"model": label(model)})

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        return super().answer(_unwrapped(response, stream), stream, problems)

    def without_history(self, request: bytes, whole: Callable[[], bool]) -> Json | None:
        """The request in the envelope with what it adds."""
        return super().without_history(_opened(request)[1], whole)

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        return super().message_fingerprints(_opened(request)[1])

    def items(self, request: bytes) -> ConversationItems:
        model, inside = _opened(request)
        found = super().items(inside)
        if found.asked is not None:
            found.asked.model = model
        return found

    def conversation(self, asked: Json) -> list[Any]:
        return super().conversation(obj(asked.get("request")))

    def with_conversation(self, asked: Json, items: Sequence[Any]) -> Json:
        return asked | {"request": super().with_conversation(obj(asked.get("request")), items)}

    def server_tools(self, asked: Json) -> list[str]:
        return super().server_tools(obj(asked.get("request")))


class CodeAssistCountDialect(CodeAssistDialect):
    """Token counting: the request has contents, the answer is one number, in no envelope."""

    name = "codeassist_count_tokens"
    answers = generates = uses_tokens = False
    otel: GenAiNames | None = None
    routes: ClassVar[frozenset[str]] = frozenset({"countTokens"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """No more than model and failure: nothing is generated."""
        failed = None if stream else body_failure(_plain(response))
        return Facts(model=self.model(request, asked=asked), failed=failed)

    def usage(self, answer: Json) -> Usage | None:
        """None: no tokens are used."""
        return None
