"""One choice of a streamed answer: makes events of derender's answers. Pure.

If the agent has named texts that end an answer (`stop`), the end of the text is held back as long as it may belong to
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.gateway.traffic.proxy.exact.chat_answer import ChatCompletionWriter
from penstock.gateway.traffic.proxy.exact.generate_answer import PendingTokens
from penstock.gateway.wire.dialects.loose_json import Json, obj, objs


class _DerenderedChunk(msgspec.Struct):
    choices: list[Json] = []


class _DerenderStep(msgspec.Struct):
    chunk: _DerenderedChunk
    stream_state: msgspec.Raw


_step = msgspec.json.Decoder(_DerenderStep).decode


class ChoiceStream:
    """One choice of a streamed answer: the state of derender, and the text that is held back."""

    def __init__(self, words: ChatCompletionWriter, index: int) -> None:
        self._words, self._index = words, index
        self._state = b"null"
        self._held = ""
        self._tools = False

    def derender_request(self, piece: PendingTokens) -> bytes:
        """The request to derender for the new tokens."""
        return self._words.stream_request(self._index, piece, self._state)

    def event(self, piece: PendingTokens, answer: bytes) -> bytes:
        """The event for derender's answer; raises `ValueError` if that cannot be read."""
        step = _step(answer)
        self._state = bytes(step.stream_state)
        delta = _told(obj(step.chunk.choices[0].get("delta")) if step.chunk.choices else {})
        self._tools = self._tools or "tool_calls" in delta
        text = self._let_go(delta.pop("content", ""), piece)
        return self._words.event(self._index, piece, ({"content": text} if text else {}) | delta, self._tools)

    def _let_go(self, text: str, piece: PendingTokens) -> str:
        """The text that can be sent now; the rest is held."""
        text, keep = self._held + text, self._words.longest_stop
        if piece.finish is not None:
            self._held = ""
            return self._words.cut(text, piece.stop) if isinstance(piece.stop, str) else text
        at = len(text) - keep if keep else len(text)
        self._held = text[max(at, 0) :]
        return text[: max(at, 0)]


def _told(delta: Mapping[str, Any]) -> Json:
    """A delta without empty fields."""
    kept: Json = {name: value for name, value in delta.items() if value not in (None, []) and name != "role"}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call) for call in objs(kept["tool_calls"])]
    return kept


def _call(call: Json) -> Json:
    found = {name: value for name, value in call.items() if value is not None}
    function = {name: value for name, value in obj(call.get("function")).items() if value is not None}
    return found | ({"function": function} if function else {})
