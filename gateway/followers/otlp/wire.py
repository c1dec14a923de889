"""OTLP over HTTP: requests and answers in protobuf or JSON; an answer has the encoding of its request.

Source: the OTLP specification, "OTLP/HTTP Request" and "OTLP/HTTP Response". Failures are a `google.rpc.Status`; bad
data names the field as a `google.rpc.BadRequest`. Protobuf is imported where it is needed (see the package). The server
must leave compressed bodies alone (`auto_decompress=False`), because it cannot tell one that was cut off from a
complete one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from base64 import b64encode
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiohttp import web

from penstock.gateway.followers.otlp.signals import (
    JSON,
    PROTO,
    PROTOBUF,
    Encoding,
    OtlpRequestError,
    RequestTree,
    Signal,
    camel,
    load_protobuf,
    tree_of,
)

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1 import common_pb2

    from penstock.gateway.followers.otlp import json_encoding

    AnyValue = common_pb2.AnyValue | json_encoding.AnyValue
    KeyValue = common_pb2.KeyValue | json_encoding.KeyValue

REQUEST_BYTES = 16 << 20
"""Most bytes of one request, without its compression: four times as many as SDKs and collectors send at most. Protobuf
can take fifty times its size in memory."""
COMPRESSIONS = ("", "identity", "gzip")
_INVALID, _UNAVAILABLE, _TOO_LARGE, _UNIMPLEMENTED, _INTERNAL = 3, 14, 8, 12, 13
_CODES = {
    400: _INVALID,
    404: _UNIMPLEMENTED,
    405: _UNIMPLEMENTED,
    413: _TOO_LARGE,
    415: _UNIMPLEMENTED,
    503: _UNAVAILABLE,
}


def encoding_of(request: web.Request) -> Encoding:
    """The encoding of a request and of its answer; raises `OtlpRequestError`."""
    if request.content_type == PROTOBUF:
        return PROTOBUF
    if request.content_type == JSON:
        return JSON
    allowed = f"use {PROTOBUF} or {JSON}"
    raise OtlpRequestError(
        415, f"Content-Type {request.content_type!r} is not an encoding of OTLP: {allowed}", "Content-Type"
    )


async def body_of(request: web.Request, limit: int) -> bytes:
    """The body without its compression; raises `OtlpRequestError`. `limit`: most bytes without compression."""
    compression = request.headers.get("Content-Encoding", "").strip().lower()
    if compression not in COMPRESSIONS:
        raise OtlpRequestError(
            415, f"Content-Encoding {compression!r} is not supported: use gzip or none", "Content-Encoding"
        )
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        _check_size(len(body), limit)
    return _gunzip(bytes(body), limit) if compression == "gzip" else bytes(body)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise OtlpRequestError(413, f"the request is larger than {limit} bytes; send smaller batches")


def _gunzip(body: bytes, limit: int) -> bytes:
    """The content of one gzip member; nothing is decompressed beyond the limit. Raises `OtlpRequestError`."""
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        decoded = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise OtlpRequestError(400, f"the body is not gzip: {error}", "body") from None
    _check_size(len(decoded), limit)
    if not inflater.eof or inflater.unused_data:
        raise OtlpRequestError(400, "the gzip body ends early, or goes on after its end", "body")
    return decoded


async def decode(signal: Signal, encoding: Encoding, body: bytes) -> RequestTree:
    """Decode a request of this signal; raises `OtlpRequestError`."""
    if encoding == PROTOBUF and PROTO + signal.module not in sys.modules:
        # The import takes a tenth of a second, and must not delay calls.
        await asyncio.to_thread(load_protobuf, signal)
    return tree_of(signal, encoding, body)


def success_response(signal: Signal, encoding: Encoding, rejected: int = 0, message: str = "") -> web.Response:
    """The answer to an accepted request; also to one of which some items were rejected, or that gets a warning."""
    if encoding == JSON:
        partial = {camel(signal.rejected): str(rejected), "errorMessage": message} if rejected or message else None
        return _answer(200, JSON, json.dumps({} if partial is None else {"partialSuccess": partial}).encode())
    if not (rejected or message):
        return _answer(200, PROTOBUF, b"")
    partial = signal.response_class("PartialSuccess")(**{signal.rejected: rejected, "error_message": message})
    return _answer(200, PROTOBUF, signal.response_class("ServiceResponse")(partial_success=partial).SerializeToString())


def error_response(encoding: Encoding, failure: OtlpRequestError) -> web.Response:
    """The answer to a refused request."""
    code = _CODES.get(failure.status, _INTERNAL)
    body = (_json_status if encoding == JSON else _protobuf_status)(code, failure)
    answer = _answer(failure.status, encoding, body)
    if failure.status == 503:
        answer.headers["Retry-After"] = "1"
    if failure.status == 405:
        answer.headers["Allow"] = "POST"
    return answer


def _json_status(code: int, failure: OtlpRequestError) -> bytes:
    status: dict[str, object] = {"code": code, "message": failure.message}
    if failure.field is not None:
        violation = {"field": failure.field, "description": failure.message}
        status["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    return json.dumps(status).encode()


def _protobuf_status(code: int, failure: OtlpRequestError) -> bytes:
    from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

    status = status_pb2.Status(code=code, message=failure.message)
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status.SerializeToString()


def _answer(status: int, encoding: Encoding, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": encoding})


# OpenTelemetry attribute values as plain values: text, bools, ints, floats, None, and lists and dicts of them.
#
# The heads of spans are read in lists, so the content of a foreign span is limited: a long text is cut, everything
# beyond the limits is left out, and the span is marked. Bytes become base64 text.
#
# The input is messages of protobuf or those of `gateway.followers.otlp.json_encoding`, which have the same fields.


MOST_ATTRIBUTES = 128
"""Most attributes of one span, event, link, resource or map: the SDKs' own default."""
MOST_ITEMS = 128
"""Most elements of one list."""
LONGEST_KEY = 256
"""Most characters of a key."""
LONGEST_TEXT = 8192
"""Most characters of one text."""
MOST_CHARACTERS = 65536
"""Most characters of all texts of one span, keys included."""
MOST_LOOKED = 8192
"""Most attributes and elements of one span that are read: two bytes can stand for one."""
DEEPEST = 6
"""Most levels of lists and maps."""


class Bounds:
    """The limits of one span's content; everything in the span counts towards them."""

    __slots__ = ("clipped", "dropped", "left", "looks")

    def __init__(self) -> None:
        self.left = MOST_CHARACTERS
        self.looks = MOST_LOOKED
        self.dropped = 0
        """Number of attributes that were left out."""
        self.clipped = False
        """True when anything was cut or left out."""

    def attributes(self, pairs: Sequence[KeyValue] | None, depth: int = 0) -> dict[str, Any]:
        """Attributes as a dict; of two with one key the last counts."""
        found: dict[str, Any] = {}
        for at, pair in enumerate(pairs or ()):
            if not self.looks:
                self.clipped = True
                self.dropped += len(pairs or ()) - at
                break
            self.looks -= 1
            key = pair.key
            size = len(key)
            if size > self.left or size > LONGEST_KEY or len(found) >= MOST_ATTRIBUTES:
                self.clipped = True
                self.dropped += 1
            else:
                self.left -= size
                found[key] = self.value(pair.value, depth)
        return found

    def value(self, value: AnyValue | None, depth: int = 0) -> Any:
        """An attribute's value as a plain value."""
        if value is None:
            return None
        if text := value.string_value:  # the commonest kind, and only one kind can be there
            return self.text(text)
        kind = value.WhichOneof("value")
        if kind == "array_value" or kind == "kvlist_value":
            return self._nested(value, kind, depth + 1)
        if kind == "bytes_value":
            raw = value.bytes_value or b""
            return self.text(raw if isinstance(raw, str) else b64encode(raw).decode())
        # An index into a table of strings exists in profiles only; here it has no meaning.
        return None if kind is None or kind == "string_value_strindex" else getattr(value, kind)

    def text(self, text: str, longest: int = LONGEST_TEXT) -> str:
        """A text, cut to the limits."""
        size = len(text)
        if size > longest or size > self.left:
            self.clipped = True
            text = text[: min(longest, self.left)]
            size = len(text)
        self.left -= size
        return text

    def _nested(self, value: AnyValue, kind: str, depth: int) -> Any:
        inner = getattr(value, kind)
        found = (inner.values if inner is not None else None) or ()
        if depth > DEEPEST:
            self.clipped = True
            return None
        if kind == "kvlist_value":
            return self.attributes(found, depth)
        # An element costs something even if it is empty.
        self.left -= min(len(found), MOST_ITEMS, self.left)
        most = min(MOST_ITEMS, self.looks)
        self.looks -= min(len(found), most)
        self.clipped |= len(found) > most
        return [self.value(one, depth) for one in islice(found, most)]
