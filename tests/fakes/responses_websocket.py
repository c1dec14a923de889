"""A model host that speaks responses on a WebSocket, by a library of its own; what it says is decided by the input.

    the word `error`      an error with status 429 in place of an answer
    `limits`              an event that is no part of an answer, first
    `hang`                begins an answer, and ends it when it is let go
    `leave`               begins an answer and closes the connection
    `big`                 an answer of many megabytes
    anything else         says `said N` for the Nth request of its connection

A request with `generate: false` gets an answer without items.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus

from fakes.formats import response, response_head, response_story
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from examples.demo.model import DemoAnswer, Json

BIG = 8 << 20


@dataclass
class Host:
    """What it was asked, and what it will do."""

    url: str = ""
    opened: list[tuple[str, Headers]] = field(default_factory=list[tuple[str, Headers]])
    """(path, headers) of every opening."""
    asked: list[Json] = field(default_factory=list[Json])
    sent: list[str] = field(default_factory=list[str])
    """Messages."""
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody waits for the end of an answer."""
    left: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue[int | None])
    """The code with which a connection has ended."""
    status: int = 101
    """What openings are answered."""
    drained: int = 0
    """Bytes of a big answer that were taken."""

    def open(self, connection: ServerConnection, request: Request) -> Response | None:
        """Agrees, or not."""
        self.opened.append((request.path, request.headers))
        if self.status == 101:
            return None
        return connection.respond(HTTPStatus(self.status), json.dumps({"error": {"message": "no"}}))

    async def talk(self, connection: ServerConnection) -> None:
        """One connection."""
        count = 0
        with suppress(ConnectionClosed):
            async for message in connection:
                asked: Json = json.loads(message)
                self.asked.append(asked)
                count += 1
                await self._answer(connection, asked, count)
        self.left.put_nowait(connection.close_code)

    async def _answer(self, connection: ServerConnection, asked: Json, count: int) -> None:
        words = json.dumps(asked.get("input"))
        if "error" in words:
            error = {"type": "usage_limit_reached", "message": "slow down", "code": "slow"}
            await self._say(connection, {"type": "error", "status": 429, "error": error})
            return
        if "limits" in words:
            await self._say(connection, {"type": "codex.rate_limits", "plan_type": "plus"})
        answer = (
            DemoAnswer()
            if asked.get("generate") is False
            else DemoAnswer("x" * BIG if "big" in words else f"said {count}")
        )
        story = list(response_story(asked, answer)) if asked.get("generate") is not False else _empty(asked)
        for event in story[:2]:
            await self._say(connection, event)
        if "leave" in words:
            await connection.close(1011, "bye")
            return
        if "hang" in words:
            self.hangs.set()
            await self.let_go.wait()
        for event in story[2:]:
            await self._say(connection, event)
            self.drained += len(str(event))

    async def _say(self, connection: ServerConnection, event: Json) -> None:
        text = json.dumps(event | {"sequence_number": len(self.sent)})
        self.sent.append(text)
        await connection.send(text)


def _empty(asked: Json) -> list[Json]:
    made: Json = response(asked, DemoAnswer()) | {"output": []}
    return [
        {"type": "response.created", "response": response_head(asked)},
        {"type": "response.completed", "response": made},
    ]


@asynccontextmanager
async def websocket_host(tls: ssl.SSLContext | None = None) -> AsyncGenerator[Host]:
    """A host on a free port of localhost."""
    made = Host()
    async with serve(made.talk, "127.0.0.1", 0, process_request=made.open, max_size=None, ssl=tls) as server:
        scheme, name = ("http", "127.0.0.1") if tls is None else ("https", "localhost")
        made.url = f"{scheme}://{name}:{next(iter(server.sockets)).getsockname()[1]}"
        try:
            yield made
        finally:
            made.let_go.set()
