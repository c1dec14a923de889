"""OpenAI completions: `POST /v1/completions`, text in and text out, still the endpoint of base models.

The answer has chat's frame with `text` where chat has `message`. There is no conversation to follow in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from penstock.gateway.dialects.base import Otel
from penstock.gateway.dialects.chat import Chat
from penstock.gateway.dialects.items import cutter
from penstock.gateway.dialects.json_post import routes
from penstock.gateway.dialects.loose_json import Json, Peek, arr, count, earliest, joined, objs, text
from penstock.gateway.dialects.text_spans import Pointed
from penstock.gateway.dialects.token_ids import IDS, LOGPROBS
from penstock.gateway.model.turn import Choice, Message, Part, Tool


class Completions(Chat):
    """Text completions."""

    name = "completions"
    routes: ClassVar[frozenset[str]] = routes("/completions")
    apart: ClassVar[frozenset[str]] = frozenset({"prompt", "model", "stream"})
    client_tools: ClassVar[tuple[str, ...]] = ()
    conversation_field = ""
    token_fields: Mapping[str, bytes] = MappingProxyType({IDS: b"true", LOGPROBS: b"0"})
    otel: Otel | None = Otel("text_completion", "openai")
    cut = staticmethod(cutter(Peek))

    def quoted_system(self, request: bytes) -> Pointed:
        """None: a prompt has no roles."""
        return (), None

    def quoted_descriptions(self, request: bytes) -> Pointed:
        """None."""
        return (), None

    def fold(self, index: int, pieces: list[Json]) -> Json:
        """The pieces of one choice as a choice of a plain answer."""
        finish = earliest(pieces, "finish_reason")
        return {"index": index, "finish_reason": finish, "text": joined(pieces, "text")}

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """A user's message per prompt."""
        return [Message(role="user", parts=[part]) for part in prompts(asked.get("prompt"))]

    def tools(self, asked: Json) -> list[Tool]:
        """None."""
        return []

    def choices(self, answer: Json) -> list[Choice]:
        """As many as there are, by index."""
        return [_choice(at, item) for at, item in enumerate(objs(answer.get("choices")))]

    def conversation(self, request: bytes) -> list[bytes]:
        """None: a prompt is no message."""
        return []

    def reply(self, response: bytes, stream: bool) -> bytes:
        """None, for want of a conversation."""
        return b""

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """None, for the same reason."""
        return None


def prompts(value: Any) -> list[Part]:
    """The texts of a prompt or an embedding's input: one or several, each a string or a list of token ids."""
    if value is None or value == []:
        return []
    items: list[Any] = (
        [value] if not isinstance(value, list) or all(type(it) is int for it in arr(value)) else arr(value)
    )
    return [Part(type="text", text=it) if isinstance(it, str) else Part(type="unknown", data=it) for it in items]


def _choice(at: int, item: Json) -> Choice:
    index, said = count(item.get("index")), text(item.get("text"))
    message = Message(role="assistant", parts=[Part(type="text", text=said)] if said else [])
    return Choice(index=at if index is None else index, message=message, finish=text(item.get("finish_reason")))
