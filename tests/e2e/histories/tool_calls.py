"""A client of a server of tools, through the gateway. It writes down what it was answered."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from e2e.histories.history import Operation
from e2e.histories.tool_server import TOOLS
from e2e.histories.world import PATIENCE, World
from fakes.mcp_wire import ACCEPT, INITIALIZE, call

from penstock.gateway.client.client import ClientError

HOSTED_TOOLS = ("echo", "echo", "echo", "fails", "slow", "dies")
SERVERS = {"tools": TOOLS, "hosted": HOSTED_TOOLS}
"""Their names at the gateway, and their tools. The second one is hosted there: it is killed with the gateway."""
HOSTED = 0.2
"""How often it is that one."""


@dataclass(slots=True)
class ToolClient:
    """The session of one attempt. It is begun with the first call, and again when it was lost."""

    world: World
    actor: str
    chance: random.Random
    address: str
    """Below the gateway's URL."""
    where: dict[str, str]
    """Its `rollout` and `attempt`."""
    token: str = "none"
    server: str = ""
    session: dict[str, str] = field(default_factory=dict[str, str])

    async def use(self) -> Operation:
        """A call of a tool. Some are cut off by their client."""
        self.server = self.server or ("hosted" if self.chance.random() < HOSTED else "tools")
        name, tool = f"{self.chance.getrandbits(64) | 1:016x}", self.chance.choice(SERVERS[self.server])
        cut, trace = tool == "slow" and self.chance.random() < 0.3, f"{self.chance.getrandbits(128) | 1:032x}"
        with self.world.history.doing("tool", self.actor, call=name, tool=tool, cut=cut, **self.where) as done:
            try:
                done.answer["text"] = await self._call(name, tool, cut, trace)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ClientError(f"{type(error).__name__}: {error}") from error
        return done

    async def _call(self, name: str, tool: str, cut: bool, trace: str) -> str:
        """The text of the answer."""
        if not self.session:
            await self._begin()
        asked = call(tool, {"call": name}, name)
        async with self._post(asked, traceparent=f"00-{trace}-{name}-01") as answer:
            if cut:
                _ = await answer.content.readany()
                raise ClientError("the client has left")
            told = await answer.read()
        if answer.status != 200:
            self.session = {}
            raise ClientError(told.decode(), answer.status)
        if tool == "later" and (last := _last(told)) is not None:
            told = await self._resume(last)
        return _text(told, name)

    async def end(self) -> None:
        """Ends the session, where the gateway is there."""
        with suppress(aiohttp.ClientError, TimeoutError):
            if self.session:
                async with self.world.http.delete(self._url, headers=self._headers, timeout=PATIENCE):
                    self.session = {}

    async def _begin(self) -> None:
        async with self._post(INITIALIZE) as answer:
            if answer.status != 200:
                raise ClientError(f"no session: {await answer.text()}")
            self.session = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}

    async def _resume(self, last: str) -> bytes:
        headers = self._headers | {"Accept": "text/event-stream", "Last-Event-ID": last}
        async with self.world.http.get(self._url, headers=headers, timeout=PATIENCE) as answer:
            if answer.status != 200:
                raise ClientError(f"it cannot be resumed: {await answer.text()}")
            return await answer.read()

    def _post(self, message: Any, **headers: str) -> Any:
        return self.world.http.post(self._url, json=message, headers=ACCEPT | self._headers | headers, timeout=PATIENCE)

    @property
    def _url(self) -> str:
        return f"{self.world.url}{self.address}/mcp/{self.server}"

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} | self.session


def _last(told: bytes) -> str | None:
    """The number of the last event of a stream that has numbers."""
    numbers = [line[4:] for line in told.split(b"\n") if line.startswith(b"id: ")]
    return numbers[-1].decode() if numbers else None


def _text(told: bytes, id: str) -> str:
    found = text_in(told, id)
    if found is None:
        raise ClientError("the stream has no answer")
    return found


def text_in(told: bytes, id: str) -> str | None:
    """What a tool said, in a document or a stream, to the request of this id; None: nothing."""
    lines = told.split(b"\n")
    for line in [line.removeprefix(b"data: ") for line in lines if line.startswith((b"data: ", b"{"))]:
        message = json.loads(line)
        if message.get("id") == id and "result" in message:
            return message["result"]["content"][0]["text"]
    return None
