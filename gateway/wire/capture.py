"""A request of a model that is trained -> the request that asks the engine for token ids and log-probabilities. Pure;
`rewriting` takes them out of the answer again, for a client that did not ask.

The fields are written behind the opening brace; every other byte stays. A field that the client has set stays the
client's, whatever its value. With vLLM 0.32 this is the minimum that brings both: `top_logprobs` need not be set for
chat, and 0 is enough for completions.

Some requests are left alone. Log-probabilities are not added to a request with another field about them, because that
could turn an answer into an error. Nothing is added with `echo`: vLLM then leaves the prompt's text out. A body that is
no JSON object, or is compressed, passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.gateway.model.facts import CAPTURED
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, find
from penstock.gateway.wire.dialects.loose_json import UNREADABLE
from penstock.gateway.wire.dialects.tokens import IDS, LOGPROBS
from penstock.gateway.wire.http.request import Headers

_ABOUT_LOGPROBS: Final = frozenset({LOGPROBS, "top_logprobs", "logprob_token_ids"})
_WATCHED: Final[KeyTree] = dict.fromkeys((IDS, "echo", "stream", *_ABOUT_LOGPROBS), LEAF)
_ENCODING: Final = b"accept-encoding"
_EMPTY = re.compile(rb"[ \t\n\r]*\}")


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request that asks for more than its client did."""

    body: bytes
    """The body that goes upstream."""
    added: tuple[str, ...]
    """Names of the added fields."""
    fillers: bool
    """True if these fields cause events that bring nothing but tokens."""
    stream: bool = False
    """True if it asks for a stream."""


def add_capture_fields(dialect: Dialect, body: bytes) -> CaptureRequest | None:
    """The request with the missing fields; None if none is missing, or none can be added."""
    fields = dialect.token_fields
    if not fields:
        return None
    try:
        said = {one.path[0]: one.value for one in find(body, _WATCHED)}
    except UNREADABLE:
        return None
    taken = said.keys() | (_ABOUT_LOGPROBS if _ABOUT_LOGPROBS & said.keys() else set[str]())
    added = {name: value for name, value in fields.items() if name not in taken}
    if not added or said.get("echo"):
        return None
    fillers = dialect.name == "chat" and not (said.get(IDS) or said.get(LOGPROBS))
    return CaptureRequest(_with(body, added), tuple(added), fillers, said.get("stream") is True)


def original(dialect: Dialect, body: bytes, attributes: Mapping[str, Any] | None) -> bytes:
    """The client's own request again, byte for byte. `attributes`: those of the call's span."""
    added = (attributes or {}).get(CAPTURED, ())
    written = _written({name: value for name, value in dialect.token_fields.items() if name in added})
    at = body.find(b"{") + 1
    end = at + len(written)
    if not written or body[at:end] != written:
        return body
    return body[:at] + body[end + body.startswith(b",", end) :]


def _with(body: bytes, fields: dict[str, bytes]) -> bytes:
    at = body.index(b"{") + 1
    return b"%b%b%b%b" % (body[:at], _written(fields), b"" if _EMPTY.match(body, at) else b",", body[at:])


def _written(fields: dict[str, bytes]) -> bytes:
    return b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())


def accept_identity(headers: Headers) -> Headers:
    """Headers that ask for an answer without content encoding, which can be searched as it comes."""
    asked = [(low, name, b"identity" if low == _ENCODING else value) for low, name, value in headers]
    return (
        asked
        if any(low == _ENCODING for low, _, _ in asked)
        else [*asked, (_ENCODING, b"Accept-Encoding", b"identity")]
    )
