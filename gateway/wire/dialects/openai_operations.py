"""OpenAI's calls beside completions and responses: compaction, counts of input tokens, decisions, moderations, and the
conversations that it keeps."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, body_failure
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, arr, dumps, label, lenient, objs
from penstock.gateway.wire.dialects.opaque import OpaqueDialect
from penstock.gateway.wire.dialects.parts import content_parts
from penstock.gateway.wire.dialects.responses import ResponsesDialect
from penstock.gateway.wire.dialects.tokens import openai_usage


class CompactionDialect(ResponsesDialect):
    """Compaction: a conversation is replaced by a shorter list of items, which has a use of tokens. A request with the
    compaction among its items continues the conversation (`continuation_names`)."""

    name = "responses_compaction"
    answers = websocket = False
    end_marker = None
    routes: ClassVar[frozenset[str]] = routes("/responses/compact") | {"/backend-api/codex/responses/compact"}


class InputTokensDialect(ResponsesDialect):
    """Token counting: the request is one for a response, the answer is one number. No tokens are used."""

    name = "responses_count_tokens"
    answers = generates = uses_tokens = stateful = websocket = False
    end_marker = None
    otel: GenAiNames | None = None
    routes: ClassVar[frozenset[str]] = routes("/responses/input_tokens")

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The requested model, and the failure."""
        failed = None if stream else body_failure(_head(response))
        return Facts(model=self.model(request, asked=asked), failed=failed)

    def usage(self, answer: Json) -> Usage | None:
        """None: no tokens are used."""
        return None


class _AnswerHead(ErrorFields):
    """The fields of an answer that the summary needs."""

    id: Any = None
    model: Any = None
    usage: Any = None
    answers: Any = None
    results: Any = None


_head = lenient(_AnswerHead)


class DecisionsDialect(ResponsesDialect):
    """Decisions: a conversation, and questions about it. An answer has probabilities, which are of type unknown in a
    Turn."""

    name = "decisions"
    answers = stateful = websocket = False
    end_marker = None
    routes: ClassVar[frozenset[str]] = routes("/decisions")
    non_sampling_fields: ClassVar[frozenset[str]] = ResponsesDialect.non_sampling_fields | {"questions"}

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer = _head(response)
        return Facts(
            model=self.model(request, asked=asked),
            model_served=label(answer.model),
            usage=openai_usage({"usage": answer.usage}),
            choices=1 if arr(answer.answers) else 0,
            failed=None if stream else body_failure(answer),
        )

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The conversation, then the questions as one user's message."""
        questions = [part for one in objs(asked.get("questions")) for part in _question(one)]
        said = super().messages(asked, problems)
        return [*said, Message(role="user", parts=questions)] if questions else said

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, of all answers."""
        parts = [Part(type="unknown", data=one) for one in arr(answer.get("answers"))]
        return [Choice(message=Message(role="assistant", parts=parts))] if parts else []


def _question(wire: Json) -> list[Part]:
    """The text of a question; and what may be answered, where it says that."""
    told = content_parts(wire.get("instructions"))
    options = wire.get("choices") or wire.get("levels")
    return [*told, Part(type="text", text=dumps(options))] if options else told


class ModerationsDialect(JsonPostDialect):
    """Moderations: texts and images are classified. They cost nothing, and nothing is generated."""

    name = "moderations"
    family = OPENAI
    answers = generates = uses_tokens = False
    routes: ClassVar[frozenset[str]] = routes("/moderations")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"input", "model"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer = _head(response)
        return Facts(
            model=self.model(request, asked=asked),
            model_served=label(answer.model),
            response_id=label(answer.id),
            choices=len(objs(answer.results)),
            failed=None if stream else body_failure(answer),
        )

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Note a problem: moderations do not stream."""
        problems.append("response: a stream, which moderations are not known to send")
        return {}

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message of all parts; of several texts, one each."""
        given = asked.get("input")
        if isinstance(given, list) and all(isinstance(one, str) for one in arr(given)):
            return [Message(role="user", parts=content_parts(one)) for one in arr(given)]
        return [Message(role="user", parts=content_parts(given))] if given else []

    def choices(self, answer: Json) -> list[Choice]:
        """The result of each input."""
        results = objs(answer.get("results"))
        return [
            Choice(index=at, message=Message(role="assistant", parts=[Part(type="unknown", data=one)]))
            for at, one in enumerate(results)
        ]

    def usage(self, answer: Json) -> Usage | None:
        """None: no tokens are counted."""
        return None


# -- conversations: state that the provider keeps, from which it adds earlier items to a request for a response --------

_PATH = re.compile(r"(?:/v1)?/conversations(?:/[^/]+(?:/items(?:/[^/]+)?)?)?")


class _ConversationId(msgspec.Struct):
    object: Any = None
    id: Any = None


_conversation = lenient(_ConversationId)


class ConversationsDialect(OpaqueDialect):
    """Calls about conversations, which use no tokens."""

    name = "conversations"
    stateful = True

    def matches(self, method: str, path: str) -> bool:
        """True for conversations and their items."""
        return _PATH.fullmatch(path) is not None

    def continuation_names(self, response: bytes, stream: bool) -> list[str]:
        """The id of the conversation."""
        name = label((told := _conversation(response)).id)
        return [name] if name and told.object == "conversation" else []
