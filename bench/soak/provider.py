"""The provider of a soak: `python -m bench.soak.provider` prints its port and serves until killed.

The model of a request tells it what to do: answer at once, slowly or with an error, break off in the middle, or send
nothing (more) until the other side leaves. A call that its client leaves is never finished, so that it has one end
only. Below /shaky every call is refused with a status after which the gateway tries another upstream.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

import httptools
import uvloop

from bench.soak.answers import Answers, stream
from bench.soak.kinds import NAME

_ASKED = re.compile(rb'"model":"soak-(\w+)"')
_NAMED = re.compile(rb'"(?:user|user_id|id)":"([0-9a-f]{16})"')
SLOW_HEAD_S, SLOW_TOKENS_S = 0.4, 0.15
PATIENCE_S = 30.0
"""Seconds after which a call that should be left, and is not, is broken off."""
ANSWERS = Answers()
SHAKY = ("500 Internal Server Error", "429 Too Many Requests", "503 Service Unavailable")


class Connection(asyncio.Protocol):
    """A connection from the gateway."""

    shaken = 0

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        named, asked = _NAMED.search(body[-400:]) or _NAMED.search(body), _ASKED.search(body)
        if named is None:
            self._transport.write(Answers.refused("400 Bad Request"))
        elif self._path.startswith(b"/shaky"):
            Connection.shaken += 1
            self._transport.write(Answers.refused(SHAKY[Connection.shaken % len(SHAKY)]))
        else:
            self._answer("tool" if asked is None else asked[1].decode(), named[1])

    def _answer(self, kind: str, name: bytes) -> None:
        if kind == "leaves_before":
            self._later(PATIENCE_S, self._transport.abort)
        elif kind == "slow_head":
            self._later(SLOW_HEAD_S, lambda: self._transport.write(ANSWERS.chat.replace(NAME, name)))
        elif kind.startswith("refused_"):
            self._transport.write(Answers.refused({"500": SHAKY[0], "429": SHAKY[1]}[kind[-3:]]))
        elif kind in PLAIN:
            self._transport.write(PLAIN[kind].replace(NAME, name))
        else:
            self._stream(kind, stream(STREAMS.get(kind, ANSWERS.chat_stream), name, kind == "stream_gzip"))

    def _stream(self, kind: str, writes: list[bytes]) -> None:
        half = len(writes) // 2
        if kind == "slow_tokens":
            self._go_on(writes)
        elif kind == "broken":
            self._transport.write(b"".join(writes[:half]))
            # Not at once: the written bytes must arrive.
            self._later(0.01, self._transport.close)
        elif kind == "leaves_middle":
            self._transport.write(b"".join(writes[:half]))
            self._later(PATIENCE_S, self._transport.abort)
        else:
            self._transport.writelines(writes)

    def _go_on(self, writes: list[bytes]) -> None:
        self._transport.write(writes.pop(0))
        if writes:
            self._later(SLOW_TOKENS_S, lambda: self._go_on(writes))

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.call_later(seconds, lambda: None if self._transport.is_closing() else then())


PLAIN = {
    **dict.fromkeys(("turns", "implicit", "chat", "opening", "failover"), ANSWERS.chat),
    "messages": ANSWERS.messages,
    "responses": ANSWERS.responses,
    "embeddings": ANSWERS.embeddings,
    "tool": ANSWERS.tool,
}
STREAMS = {"messages_stream": ANSWERS.messages_stream, "responses_stream": ANSWERS.responses_stream}


async def main() -> None:
    """Listen on a free port of loopback."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
