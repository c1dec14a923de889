"""A model host whose WebSockets are played by the test: it hears what comes and says what it likes, in its order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes.rig import Within
from fakes.tape import Tape
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request

from penstock.gateway.model.span import Span

Json = dict[str, Any]


@dataclass
class Peer:
    """The host's end of one connection, and what has passed."""

    connection: ServerConnection
    heard: list[str | bytes] = field(default_factory=list[str | bytes])
    said: list[str | bytes] = field(default_factory=list[str | bytes])

    async def hear(self) -> Json:
        self.heard.append(await self.connection.recv())
        return json.loads(self.heard[-1])

    async def say(self, *messages: Json, binary: bool = False) -> None:
        for one in messages:
            text = json.dumps(one)
            self.said.append(text.encode() if binary else text)
            await self.connection.send(self.said[-1])


@dataclass
class Rig:
    """A gateway before that host."""

    url: str
    tape: Tape
    accepted: asyncio.Queue[Peer] = field(default_factory=asyncio.Queue[Peer])
    opened: list[tuple[str, Headers]] = field(default_factory=list[tuple[str, Headers]])
    """(path, headers) of every opening."""

    @property
    def base(self) -> str:
        """The base URL of one rollout, r1."""
        return f"{self.url}/rollout/r1/attempt/a1"

    async def spans(self, count: int) -> list[Span]:
        return await self.tape.spans("r1", count)

    async def said(self, span: Span) -> tuple[list[str], str]:
        """(role and text of each message of the request, text of the answer)."""
        turn = (await self.tape.detail(span)).turn
        assert turn is not None
        assert turn.problems == []
        asked = [f"{one.role}: {' '.join(part.text or part.type for part in one.parts)}" for one in turn.messages]
        answer = [part for choice in turn.choices for part in choice.message.parts]
        calls = (f"{part.name}({part.arguments})" if part.name else part.type for part in answer)
        return asked, " ".join(part.text or call for part, call in zip(answer, calls, strict=True))


@asynccontextmanager
async def session_rig(
    within: Within, dialect: str, settings: Json | None = None, upstream: Json | None = None, **host: Any
) -> AsyncGenerator[Rig]:
    """`dialect`: of the upstream; `settings`: more of the gateway's; `upstream`: more of the upstream's."""
    rig = Rig("", Tape("", None))  # type: ignore[arg-type] # both are known below

    def opened(_: ServerConnection, request: Request) -> None:
        rig.opened.append((request.path, request.headers))

    async def talk(connection: ServerConnection) -> None:
        rig.accepted.put_nowait(Peer(connection))
        await connection.wait_closed()

    async with serve(talk, "127.0.0.1", 0, process_request=opened, max_size=None, **host) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        below = "/v1" if dialect == "openai" else ""
        known: Json = {"name": "host", "base_url": url + below, "dialect": dialect, **(upstream or {})}
        async with within(upstream=[known], **(settings or {})) as made:
            rig.url, rig.tape = made.base.url, made.tape
            yield rig
