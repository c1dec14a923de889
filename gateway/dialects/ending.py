"""Whether an answer with a good HTTP status is a good answer. Providers that fail late say so in a stream, or do not
say it at all: the stream just ends. Some give an error as the body of a 200.

Cheap, as all facts are: the last few events of a stream are looked at. Only of a stream that does not end
as it should is everything read, before it is called unfinished (`stream_failed`). An answer that was ended by its limit
of tokens is a whole answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

Failed = Literal["stream_error", "ended_early", "error_body", "rpc_error", "tool_error"]
"""An error among the events of a stream; a stream without its end; a plain body that is an error. Of MCP: an error of
JSON-RPC, whose code is an attribute; a tool's result that is an error."""

_ERROR_EVENT = re.compile(rb"(?<![^\r\n])event: ?error[\r\n]")
_DONE = re.compile(rb"(?<![^\r\n])data: ?\[DONE\]\s*\Z")
_TAIL, _LATE = 64, 4096
"""Bytes at the end of a stream in which its [DONE], and the name of an error event, are looked for."""


class Said(msgspec.Struct):
    """What says of a body, or of the data of an event, that it is an error, in any of the shapes that servers use."""

    error: Any = None
    object: Any = None
    type: Any = None
    detail: Any = None
    """All that web frameworks say when they refuse a request."""


def is_error(said: Said) -> bool:
    """Whether it is one."""
    return bool(said.error) or "error" in (said.object, said.type)


def body_failed(said: Said) -> Failed | None:
    """Of a plain body."""
    refused = said.detail is not None and sum(value is not None for value in msgspec.structs.astuple(said)) == 1
    return "error_body" if refused or is_error(said) else None


def stream_failed(body: bytes, tail: Iterable[Said], ended: Callable[[], bool]) -> Failed | None:
    """Of a stream. `tail`: the data of its last events, an error being one of the last; `ended`: whether it has come to
    its end, asked when there is no error."""
    if any(map(is_error, tail)) or _has_error_event(body):
        return "stream_error"
    return None if ended() else "ended_early"


def is_done(body: bytes) -> bool:
    """Whether a stream ends with OpenAI's `[DONE]`."""
    return _DONE.search(body, max(0, len(body) - _TAIL)) is not None


def _has_error_event(body: bytes) -> bool:
    # A line of a stream begins like this nowhere else: in JSON the line end before it would be escaped.
    late = max(0, len(body) - _LATE)
    # Most streams tell of no error at all, which is seen forty times as fast.
    return body.find(b"error", late) >= 0 and _ERROR_EVENT.search(body, late) is not None
