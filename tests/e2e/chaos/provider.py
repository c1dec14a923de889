"""The provider of the chaos test and of histories: one small answer, plain or streamed, whose id is the caller's own.

A call names itself in `user`, and the answer's id is `chatcmpl-` and that name: so an agent knows the id of an answer
that it never saw. Streams take a moment, so that a kill often comes in the middle of one; those of the model `slow`
take longer, and those of `breaks` break off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from fakes.raw import chunk, events_head, reply

from examples.demo.model import sse

PIECES, PIECE_S, SLOW_PIECE_S = 4, 0.01, 0.2


class Connection(asyncio.Protocol):
    """A keep-alive connection of the gateway."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._provider.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._provider.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if not mark or len(body) < int(lengths[0]):
            return
        self._received = b""
        asked: dict[str, Any] = json.loads(body)
        self._provider.seen[asked["user"]] = asked["messages"][0]["content"]
        name = f"chatcmpl-{asked['user']}"
        if asked["stream"]:
            self._stream(name, asked["model"])
        else:
            self._answer(name)

    def _answer(self, name: str) -> None:
        message = {"role": "assistant", "content": "Done."}
        made: dict[str, Any] = {"id": name, "object": "chat.completion", "model": "m-1"}
        made["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        made["usage"] = {"prompt_tokens": 3, "completion_tokens": 2}
        self._transport.write(reply(200, json.dumps(made).encode()))

    def _stream(self, name: str, model: str) -> None:
        self._transport.write(events_head() + _event(name, {"role": "assistant", "content": ""}, None))
        self._go_on(name, model, PIECES)

    def _go_on(self, name: str, model: str, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == PIECES // 2 and model == "breaks":
            self._transport.abort()
        elif left:
            self._transport.write(_event(name, {"content": "word "}, None))
            pause_s = SLOW_PIECE_S if model == "slow" else PIECE_S
            _ = asyncio.get_running_loop().call_later(pause_s, self._go_on, name, model, left - 1)
        else:
            self._transport.write(_event(name, {}, "stop") + chunk(b"data: [DONE]\n\n") + chunk(b""))


def _event(name: str, delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": name, "object": "chat.completion.chunk", "model": "m-1", "choices": [choice]}
    return chunk(sse(value))


@dataclass(slots=True)
class Provider:
    """One that runs."""

    url: str = ""
    """Its base URL."""
    seen: dict[str, str] = field(default_factory=dict[str, str])
    """The first message of each call that has come, by the call's name."""
    connections: set[asyncio.Transport] = field(default_factory=set[asyncio.Transport])

    def break_off(self) -> None:
        """Cuts every answer that is on its way, and every connection that is kept."""
        for transport in list(self.connections):
            transport.abort()


@asynccontextmanager
async def serving() -> AsyncGenerator[Provider]:
    """A running provider."""
    made = Provider()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(made), "127.0.0.1", 0, backlog=1024)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()
