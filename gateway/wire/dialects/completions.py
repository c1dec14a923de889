"""OpenAI completions: `POST /v1/completions`, text in and text out, still the endpoint of base models.

The answer has chat's frame with `text` where chat has `message`. There is no conversation to follow in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from penstock.gateway.model.turn import Message, Part
from penstock.gateway.wire.dialects.base import GenAiNames
from penstock.gateway.wire.dialects.choices import ChoicesDialect
from penstock.gateway.wire.dialects.json_post import routes
from penstock.gateway.wire.dialects.loose_json import Json, arr, earliest, joined, text
from penstock.gateway.wire.dialects.token_ids import IDS, LOGPROBS


class CompletionsDialect(ChoicesDialect):
    name = "completions"
    routes: ClassVar[frozenset[str]] = routes("/completions")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"prompt", "model", "stream"})
    token_fields: Mapping[str, bytes] = MappingProxyType({IDS: b"true", LOGPROBS: b"0"})
    otel: GenAiNames | None = GenAiNames("text_completion", "openai")

    def fold(self, index: int, pieces: list[Json]) -> Json:
        """Put the pieces of one choice together as a choice of a plain answer."""
        said = {key: earliest(pieces, key) for key in ("finish_reason", "error")}
        return {"index": index, **said, "text": joined(pieces, "text")}

    def message(self, choice: Json) -> Message:
        said = text(choice.get("text"))
        return Message(role="assistant", parts=[Part(type="text", text=said)] if said else [])

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message per prompt."""
        return [Message(role="user", parts=[part]) for part in prompts(asked.get("prompt"))]


def prompts(value: Any) -> list[Part]:
    """The texts of a prompt or an embedding's input: one or several, each a string or a list of token ids."""
    if value is None or value == []:
        return []
    items: list[Any] = (
        [value] if not isinstance(value, list) or all(type(it) is int for it in arr(value)) else arr(value)
    )
    return [Part(type="text", text=it) if isinstance(it, str) else Part(type="unknown", data=it) for it in items]
