"""Tells whether an answer with a good HTTP status is a good answer. Providers that fail late say so in an event of the
stream, or not at all: the stream just ends. Some give an error as the body of a 200.

All events of a stream are looked at (`stream_events`). An answer that ends at its limit of tokens is complete.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Failure = Literal["stream_error", "ended_early", "error_body", "rpc_error", "tool_error"]
"""In this order: an error among the events of a stream; a stream without its end; a plain body that is an error; in
MCP, an error of JSON-RPC, whose code is an attribute; in MCP, a tool's result that is an error."""

_DONE = re.compile(rb"(?<![^\r\n])data: ?\[DONE\]\s*\Z")
_TAIL = 64
"""Bytes at the end of a stream that are searched for `[DONE]`."""


class ErrorFields(msgspec.Struct, gc=False):
    """The fields by which a body, or an event's data, says that it is an error, in all shapes that servers use."""

    error: Any = None
    object: Any = None
    type: Any = None
    detail: Any = None
    """The only field that web frameworks send when they refuse a request."""


def is_error(said: ErrorFields) -> bool:
    """True if a body or an event's data is an error."""
    return bool(said.error) or "error" in (said.object, said.type)


def body_failure(said: ErrorFields) -> Failure | None:
    """`error_body` if a plain body is an error or a web framework's refusal; else None."""
    refused = said.detail is not None and sum(value is not None for value in msgspec.structs.astuple(said)) == 1
    return "error_body" if refused or is_error(said) else None


def is_done(body: bytes) -> bool:
    """True if a stream ends with OpenAI's `[DONE]`."""
    return _DONE.search(body, max(0, len(body) - _TAIL)) is not None
