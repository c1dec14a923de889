"""The provider of the chaos test: one small answer, plain or streamed, whose id is the caller's own.

A call names itself in `user`, and the answer's id is `chatcmpl-` and that name: so an agent knows the id of an answer
that it never saw. Streams take a moment, so that a kill often comes in the middle of one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

PIECES, PIECE_S = 4, 0.01


class Connection(asyncio.Protocol):
    """A keep-alive connection of the gateway."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if not mark or len(body) < int(lengths[0]):
            return
        self._received = b""
        asked: dict[str, Any] = json.loads(body)
        (self._stream if asked["stream"] else self._answer)(f"chatcmpl-{asked['user']}")

    def _answer(self, name: str) -> None:
        message = {"role": "assistant", "content": "Done."}
        body = json.dumps(
            {
                "id": name,
                "object": "chat.completion",
                "model": "m-1",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2},
            }
        ).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _stream(self, name: str) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head + _event(name, {"role": "assistant", "content": ""}, None))
        self._go_on(name, PIECES)

    def _go_on(self, name: str, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_event(name, {"content": "word "}, None))
            _ = asyncio.get_running_loop().call_later(PIECE_S, self._go_on, name, left - 1)
        else:
            self._transport.write(_event(name, {}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(name: str, delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": name, "object": "chat.completion.chunk", "model": "m-1", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def serving() -> AsyncGenerator[str]:
    """The base URL of a running provider."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
