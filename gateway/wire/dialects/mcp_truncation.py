"""MCP messages whose middle is missing, because they were too long to be kept: reads their two ends.

A message of 100 MB is one large result or one large argument. Its id and its method are short, and stand before it or
behind it: the scalar members at the beginning of the object, and those at its end, are read as if the object had no
others.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, message

_SCALAR: Final = rb'(?:"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null)'
_MEMBER: Final = rb'"(?:[^"\\]|\\.)*"\s*:\s*' + _SCALAR
_BEGINNING: Final = re.compile(rb"\s*\{((?:\s*" + _MEMBER + rb"\s*,)*)")
_END: Final = re.compile(rb"((?:,\s*" + _MEMBER + rb"\s*)+)\}\s*\Z")
_READ: Final = 2048
"""Bytes of each end that are read."""


def read_truncated_message(head: bytes, tail: bytes) -> JsonRpcMessage:
    """A message of which only the beginning and the end are known."""
    begun, ended = _BEGINNING.match(head[:_READ]), _END.search(tail[-_READ:])
    before = b"" if begun is None else begun[1].rstrip().rstrip(b",")
    after = b"" if ended is None else ended[1].lstrip(b",")
    said = message(b"{%b}" % b",".join(filter(None, (before, after))))
    # The missing part is the parameters or the result: a message with an id and without a method is an answer.
    kind = "answer" if said.kind == "unreadable" and said.id else said.kind
    return said._replace(kind=kind, raw=head)
