"""OpenAI embeddings: `POST /v1/embeddings`. The texts and the token counts are read, the vectors are left alone."""

from __future__ import annotations

from typing import Any, ClassVar

from penstock.gateway.dialects.base import Facts, Otel
from penstock.gateway.dialects.completions import prompts
from penstock.gateway.dialects.ending import Said, body_failed
from penstock.gateway.dialects.family import OPENAI
from penstock.gateway.dialects.json_post import Post, routes
from penstock.gateway.dialects.loose_json import Json, Peek, label, lenient
from penstock.gateway.dialects.usage import embeddings_usage
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message


class _Answer(Said):
    model: Any = None
    usage: Any = None


_decode = lenient(_Answer)


class Embeddings(Post):
    name = "embeddings"
    family = OPENAI
    generates = False
    otel: Otel | None = Otel("embeddings", "openai")
    routes: ClassVar[frozenset[str]] = routes("/embeddings")
    apart: ClassVar[frozenset[str]] = frozenset({"input", "model"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """Model, usage and failure; the vectors are skipped."""
        answer = _decode(response)
        usage = embeddings_usage({"usage": answer.usage})
        model, failed = self.model(request, asked=asked), None if stream else body_failed(answer)
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
