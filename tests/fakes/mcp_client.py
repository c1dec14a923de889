"""The official SDK's client beside a `penstock mcp`: over stdio, or in the test's own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fakes.process import PATIENCE, ROOT
from fakes.shell import Shell
from mcp.client.client import Client
from mcp.shared.message import SessionMessage

from penstock.console.mcp_server.server import make_server
from penstock.gateway.client.client import Client as Control

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def connected(url: str, *options: str, mode: str = "auto", **env: str) -> AsyncGenerator[Client]:
    """A client of a server that speaks to the gateway at `url`."""
    shell = Shell(url, ROOT)
    process = await shell.start("mcp", *options, stdin=asyncio.subprocess.PIPE, **env)
    try:
        async with Client(piped(process), mode=mode) as client:
            yield client
    finally:
        print((await shell.end_of(process, ("mcp", *options), b""))[1].decode())


@asynccontextmanager
async def piped(process: asyncio.subprocess.Process) -> AsyncGenerator[Streams]:
    """The SDK's own, `stdio_client`, starts a process itself: one that has yet to import everything."""
    heard, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, told = anyio.create_memory_object_stream[SessionMessage](0)

    async def hear() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            await heard.send(SessionMessage(message))

    async def tell() -> None:
        assert process.stdin is not None
        async for one in told:
            process.stdin.write(one.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async with heard, read, write, told, anyio.create_task_group() as group:
        group.start_soon(hear)
        group.start_soon(tell)
        yield read, write
        group.cancel_scope.cancel()


@asynccontextmanager
async def beside(url: str, write: bool = False, mode: str = "auto") -> AsyncGenerator[Client]:
    """A client of the server of `penstock mcp` in this process. It lives in a task of its own: fixtures begin and end
    in different ones."""
    begun: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def live() -> None:
        async with Control(url) as control, Client(make_server(control, write), mode=mode) as client:
            begun.set_result(client)
            await over.wait()

    living = asyncio.ensure_future(live())
    await asyncio.wait([living, begun], return_when=asyncio.FIRST_COMPLETED)
    try:
        if living.done():
            await living
        yield begun.result()
    finally:
        over.set()
        await living


class Talk:
    """A client of a process that writes lines itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self._stdin, self._stdout, self._stderr = process, process.stdin, process.stdout, process.stderr

    def tell(self, message: Any) -> None:
        """A message, or bytes that are a line of their own."""
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        self._stdin.write(line + b"\n")

    async def hear(self) -> Any:
        """The next message."""
        return json.loads(await asyncio.wait_for(self._stdout.readline(), PATIENCE))

    async def ask(self, message: Any) -> Any:
        """The message that comes next."""
        self.tell(message)
        return await self.hear()

    def stop_reading(self) -> None:
        """Whatever it is told from now on breaks its pipe."""
        self.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]

    async def ended(self) -> tuple[int, str]:
        """(exit code, what it has noted), as soon as it ends although its stdin is open."""
        code = await asyncio.wait_for(self.process.wait(), PATIENCE)
        return code, (await self._stderr.read()).decode()

    async def end(self) -> str:
        """What it has noted. Nothing else is on stdout, and it has ended well."""
        out, err = await asyncio.wait_for(self.process.communicate(b""), PATIENCE)
        assert (self.process.returncode, out) == (0, b""), err
        return err.decode()


async def answered(client: Client, tool: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """(fields, text) of a good answer."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    fields: Any = result.structured_content
    assert isinstance(fields, dict)
    return cast("dict[str, Any]", fields), text_of(result)


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """What is said of a call that cannot be answered."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, text_of(result)
    assert result.structured_content is None
    return text_of(result)


def text_of(result: types.CallToolResult) -> str:
    """The text of an answer."""
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text
