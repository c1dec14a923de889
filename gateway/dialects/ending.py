"""Whether an answer with a good HTTP status is a good answer. Providers that fail late say so in a stream, or do not
say it at all: the stream just ends. Some give an error as the body of a 200.

All events of a stream are looked at (`stream_events`). An answer that was ended by its limit of tokens is a whole
answer.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Failed = Literal["stream_error", "ended_early", "error_body", "rpc_error", "tool_error"]
"""An error among the events of a stream; a stream without its end; a plain body that is an error. Of MCP: an error of
JSON-RPC, whose code is an attribute; a tool's result that is an error."""

_DONE = re.compile(rb"(?<![^\r\n])data: ?\[DONE\]\s*\Z")
_TAIL = 64
"""Bytes at the end of a stream in which its [DONE] is looked for."""


class Said(msgspec.Struct, gc=False):
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


def is_done(body: bytes) -> bool:
    """Whether a stream ends with OpenAI's `[DONE]`."""
    return _DONE.search(body, max(0, len(body) - _TAIL)) is not None
