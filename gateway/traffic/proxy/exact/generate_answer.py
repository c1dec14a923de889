"""The answers of generate, plain or event by event. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.gateway.wire.dialects.loose_json import Json, arr, obj


class ChoiceDelta(msgspec.Struct):
    """One choice: complete in a plain answer, or a part of it in a streamed one."""

    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None


class GenerateEvent(msgspec.Struct):
    """An answer of generate, or an event of its stream."""

    choices: list[ChoiceDelta] = []
    usage: Any = None
    created: int | None = None
    error: Json | None = None


decode_event = msgspec.json.Decoder(GenerateEvent).decode
"""Reads an answer or an event; raises `ValueError` if it is neither."""


@dataclass(slots=True)
class PendingTokens:
    """The tokens of one choice that were not passed on yet."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[Any] | None = None
    finish: str | None = None
    stop: int | str | None = None
    usage: Any = None

    def add(self, delta: ChoiceDelta, usage: Any) -> None:
        """Add the choice of one event."""
        self.ids += delta.token_ids or ()
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *arr(obj(delta.logprobs).get("content"))]
        self.finish = delta.finish_reason or self.finish
        self.stop = delta.stop_reason if delta.stop_reason is not None else self.stop
        self.usage = usage or self.usage
