"""OpenAI embeddings: `POST /v1/embeddings`. The texts and the token counts are read, the vectors are left alone."""

from __future__ import annotations

from typing import Any, ClassVar

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message
from penstock.gateway.wire.dialects.base import Facts, GenAiNames
from penstock.gateway.wire.dialects.completions import prompts
from penstock.gateway.wire.dialects.failures import ErrorFields, body_failure
from penstock.gateway.wire.dialects.family import OPENAI
from penstock.gateway.wire.dialects.json_post import JsonPostDialect, routes
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, label, lenient
from penstock.gateway.wire.dialects.usage import embeddings_usage


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
