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
