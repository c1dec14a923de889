"""`penstock mcp replay`: what servers said through a gateway is said again by a process on stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import mcp_types as types
import pytest
from conftest import StartGateway
from fakes.mcp_client import Talk, connected
from fakes.mcp_sdk_server import serving
from fakes.mcp_wire import INITIALIZE, Client, McpServer, answer, call, mcp_server
from fakes.mistakes import tells
from fakes.process import Gateway
from fakes.rig import inside
from fakes.shell import Shell
from fakes.tape import Tape, finished
from mcp import Client as SdkClient
from mcp.client.sse import sse_client
from mcp.shared.exceptions import MCPError

from penstock.gateway.model.span import Span

Json = dict[str, Any]


@pytest.fixture
async def server() -> AsyncGenerator[McpServer]:
    async with mcp_server() as made:
        yield made


@pytest.fixture
async def gateway(tmp_path: Path, http: aiohttp.ClientSession, server: McpServer) -> AsyncGenerator[Gateway]:
    servers = {name: {"url": server.url} for name in ("tools", "other")}
    async with inside(tmp_path, http, mcp={"servers": servers}) as made:
        yield Gateway(tmp_path / "none.toml", made.base.data, made.base.log_path, url=made.base.url)


@pytest.fixture
def client(gateway: Gateway, http: aiohttp.ClientSession) -> Client:
    return Client(f"{gateway.address('r1')}/mcp/tools", http, {})


@pytest.fixture
def tape(gateway: Gateway, http: aiohttp.ClientSession) -> Tape:
    return Tape(gateway.url, http)


@pytest.fixture
def shell(gateway: Gateway, tmp_path: Path) -> Shell:
    return Shell(gateway.url, tmp_path)


@asynccontextmanager
async def replayed(shell: Shell, *arguments: str) -> AsyncGenerator[Talk]:
    process = await shell.start("mcp", "replay", *arguments, stdin=asyncio.subprocess.PIPE)
    try:
        yield Talk(process)
    finally:
        if process.returncode is None:
            process.kill()
            _ = await process.wait()


def request(method: str, params: Any = None, id: Any = "q") -> Json:
    return {"jsonrpc": "2.0", "id": id, "method": method, **({} if params is None else {"params": params})}


def text_of(told: Json) -> str:
    return told["result"]["content"][0]["text"]


# What is played -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_recorded_bytes_are_played_under_the_ids_of_the_client(
    client: Client, gateway: Gateway, shell: Shell, tape: Tape
) -> None:
    await client.open()
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"a":[1.50,"\\u00e9"]}}}'
    async with client.http.post(client.url, data=body, headers=client.headers) as reply:
        recorded = json.loads(await reply.read())
    _ = await client.say(call("echo", {"b": 1}, id=2))
    _ = await client.say(call("refused", id=3))
    _ = await client.say({"jsonrpc": "2.0", "id": 4, "method": "tools/list", "params": {}})
    _ = await tape.spans("r1", 5)
    async with replayed(shell, "r1") as talk:
        opened = await talk.ask(INITIALIZE | {"id": 0.5})
        assert (opened["id"], opened["result"]["serverInfo"]["name"]) == (0.5, "f")
        talk.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
        told = await talk.ask(call("echo", {"a": [1.5, "é"]}, id="mine"))
        assert told == recorded | {"id": "mine"}
        assert (await talk.ask(call("refused", id=-1)))["error"] == {"code": -32602, "message": "Unknown tool: refused"}
        for _ in range(2):
            assert (await talk.ask(request("tools/list")))["result"]["tools"][0]["name"] == "echo"
        miss = await talk.ask(call("echo", {"b": 2}))
        assert miss["error"]["code"] == -32602
        assert tells(str(miss), "tools/call echo (a1#3)", "1 place differs", "/arguments/b is 1 there and 2 here")
        assert miss["error"]["data"]["nearest"] == {"span": "a1#3", "server": "tools", "method": "tools/call"}
        assert (await talk.ask(request("prompts/list")))["error"]["code"] == -32601
        assert (await talk.ask(request("ping")))["result"] == {}
        said = await talk.end()
    assert said.count("\n") == 2
    assert said.startswith("tools/call: this call is not recorded.")


@pytest.mark.slow
async def test_what_came_in_a_stream_comes_before_the_answer(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    _ = await client.say(call("stream", id=9))
    _ = await client.say(call("later", id=10))
    async with client.listen(**{"Last-Event-ID": "1"}) as stream:
        _ = await stream.content.readuntil(b"\n\n")
        _ = await tape.when("r1", "a1", lambda spans: sum(span.kind == "tool" for span in finished(spans)) == 2)
    async with replayed(shell, "r1") as talk:
        asked = call("stream")
        asked["params"]["_meta"] = {"progressToken": "mine"}
        progress = await talk.ask(asked)
        assert (progress["method"], progress["params"]) == (
            "notifications/progress",
            {"progressToken": "mine", "progress": 1},
        )
        assert text_of(await talk.hear()) == "done"
        first = await talk.ask(call("later"))
        assert first["method"] == "notifications/message"
        assert text_of(await talk.hear()) == "at last"
        assert await talk.end() == ""
    async with replayed(shell, "r1") as talk:
        assert text_of(await talk.ask(call("stream"))) == "done", "who names no token is told of no progress"


@pytest.mark.slow
async def test_what_the_server_asked_is_asked_again(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    for _ in range(2):
        async with client.post(call("ask")) as stream:
            asking = json.loads((await stream.content.readuntil(b"\n\n"))[6:])
            told = answer(asking, {"role": "assistant", "content": {"type": "text", "text": "yes"}})
            assert (await client.say(told))[0] == 202
            assert b"yes" in await stream.read()
    _ = await tape.spans("r1", 7)
    async with replayed(shell, "r1") as talk:
        asking = await talk.ask(call("ask", id=1))
        assert (asking["method"], asking["params"]) == ("sampling/createMessage", {"maxTokens": 5})
        # While it waits for its client, it answers others.
        assert (await talk.ask(request("ping", id=2)))["id"] == 2
        talk.tell(answer(asking, {"role": "assistant", "content": {"type": "text", "text": "yes"}}))
        assert text_of(await talk.hear()) == "yes"
        again = await talk.ask(call("ask", id=3))
        assert again["id"] != asking["id"]
        talk.tell({"jsonrpc": "2.0", "id": again["id"], "error": {"code": -1, "message": "no"}})
        told = await talk.hear()
        assert (told["id"], text_of(told)) == (3, "yes")
        said = await talk.end()
    assert re.match(r"the answer to sampling/createMessage .* \(a1#\d\): /result is {", said)
    assert said.count("\n") == 1


@pytest.mark.slow
async def test_a_call_that_is_cancelled_is_not_answered(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    async with client.post(call("ask")) as stream:
        asking = json.loads((await stream.content.readuntil(b"\n\n"))[6:])
        _ = await client.say(answer(asking, {"content": {"text": "yes"}}))
        _ = await stream.read()
    _ = await tape.spans("r1", 4)
    async with replayed(shell, "r1") as talk:
        _ = await talk.ask(call("ask", id=1))
        talk.tell({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
        assert (await talk.ask(request("ping")))["id"] == "q"
        assert await talk.end() == ""


@pytest.mark.slow
async def test_rounds_are_played_as_recorded(client: Client, server: McpServer, shell: Shell, tape: Tape) -> None:
    server.sessions = False
    first, second = call("rounds", id=1), call("rounds", id=2)
    second["params"] |= {"requestState": "state-1", "inputResponses": {"q": {"action": "accept"}}}
    for one in (first, second):
        assert (await client.say(one))[0] == 200
    _ = await tape.spans("r1", 2)
    async with replayed(shell, "r1") as talk:
        asked = (await talk.ask(first))["result"]
        assert (asked["resultType"], asked["requestState"]) == ("input_required", "state-1")
        second["params"]["inputResponses"] = {"q": {"action": "decline"}}
        assert "accept" in text_of(await talk.ask(second))


@pytest.mark.slow
async def test_calls_without_an_answer_say_why(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    _ = await client.say(call("busy"))
    client.headers["Mcp-Session-Id"] = "gone"
    assert (await client.say(call("echo")))[0] == 404
    _ = await tape.spans("r1", 3)
    async with replayed(shell, "r1") as talk:
        told = await talk.ask(call("busy"))
        assert told["error"]["code"] == -32603
        assert tells(told["error"]["message"], "tools/call (a1#2) has no answer", "http_503")
        # That the client was told to open another session is no answer of the tool.
        assert "not recorded" in (await talk.ask(call("echo")))["error"]["message"]


@pytest.mark.slow
async def test_batches_and_what_is_no_message(client: Client, server: McpServer, shell: Shell, tape: Tape) -> None:
    server.sessions = False
    for number in range(2):
        _ = await client.say(call("echo", {"n": number}))
    _ = await tape.spans("r1", 2)
    async with replayed(shell, "r1") as talk:
        told = await talk.ask(
            [call("echo", {"n": 1}, id=1), call("echo", {"n": 0}, id=2), {"jsonrpc": "2.0", "method": "x"}]
        )
        assert [(one["id"], text_of(one)) for one in told] == [(1, '{"n": 1}'), (2, '{"n": 0}')]
        assert (await talk.ask("what?"))["error"]["code"] == -32700
        assert (await talk.ask({"jsonrpc": "2.0", "id": 7}))["error"]["code"] == -32600
        talk.tell({"jsonrpc": "2.0", "id": "nobody asked", "result": {}})
        assert await talk.end() == ""


@pytest.mark.slow
async def test_lines_of_a_file_are_answered_before_it_ends(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    _ = await client.say(call("echo"))
    _ = await tape.spans("r1", 2)
    asked = [INITIALIZE, {"jsonrpc": "2.0", "method": "notifications/initialized"}, call("echo", id=5)]
    done = await shell.run("mcp", "replay", "r1", stdin=b"\n".join(json.dumps(one).encode() for one in asked))
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == [0, 5]
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
async def test_a_client_that_has_gone_is_no_error(client: Client, shell: Shell, tape: Tape) -> None:
    await client.open()
    _ = await tape.spans("r1", 1)
    async with replayed(shell, "r1") as talk:
        talk.stop_reading()
        talk.tell(INITIALIZE)
        assert await talk.ended() == (0, "")


# What is refused before a word ---------------------------------------------------------------------------------------


async def refused(shell: Shell, *arguments: str, **env: str) -> str:
    done = await shell.run("mcp", "replay", *arguments, stdin=json.dumps(INITIALIZE).encode() + b"\n", **env)
    assert (done.code, done.out) == (1, b"")
    return done.err


@pytest.mark.slow
async def test_what_cannot_be_played_is_said_at_once(
    client: Client, gateway: Gateway, shell: Shell, tape: Tape
) -> None:
    assert "there is no rollout 'r1'" in await refused(shell, "r1")
    url = f"{gateway.address('r2')}/mcp"
    for name in ("tools", "other"):
        one = Client(f"{url}/{name}", client.http, {})
        await one.open()
        _ = await one.say(call("echo", {"from": name}))
    _ = await tape.spans("r2", 4)
    said = await refused(shell, "r2")
    assert tells(said, "r2/a1", "(tools 'echo': tools, other)", "--server")
    assert tells(await refused(shell, "r2", "--server", "x"), "no recorded call of 'x'", "tools, other")
    assert "rollout 'r2' has no attempt 'a9'" in await refused(shell, "r2", "--attempt", "a9")
    async with replayed(shell, "r2", "--server", "other") as talk:
        assert "other" in text_of(await talk.ask(call("echo", {"from": "other"})))
        assert "not recorded" in str(await talk.ask(call("echo", {"from": "tools"})))
    await client.open()
    async with client.http.delete(client.url, headers=client.headers):
        pass
    other = Client(f"{gateway.address('r1', 'a2')}/mcp/tools", client.http, {})
    await other.open()
    await tape.written()
    assert tells(await refused(shell, "r1"), "rollout 'r1' has 2 attempts (a1, a2)", "--attempt ID")
    async with client.http.post(f"{gateway.address('r3')}/v1/events", json={"events": [{"name": "x"}]}):
        pass
    async with client.http.post(f"{gateway.address('r4')}/nowhere", json={}):
        pass
    await tape.written()
    assert "r4/a1 has no recorded call" in await refused(shell, "r4")
    assert "cannot reach the gateway" in await refused(Shell("http://127.0.0.1:9", shell.folder), "r2")


@pytest.mark.slow
async def test_several_servers_are_one(
    client: Client, server: McpServer, gateway: Gateway, shell: Shell, tape: Tape
) -> None:
    await client.open()
    _ = await client.say(request("tools/list"))
    _ = await client.say(call("echo"))
    other = Client(f"{gateway.address('r1')}/mcp/other", client.http, {})
    await other.open()
    _ = await other.say(call("stream"))
    _ = await tape.spans("r1", 5)
    async with replayed(shell, "r1") as talk:
        opened = (await talk.ask(INITIALIZE))["result"]
        assert (opened["protocolVersion"], opened["serverInfo"]["name"]) == ("2025-11-25", "penstock-replay")
        assert opened["capabilities"] == {"tools": {}}
        listed = (await talk.ask(request("tools/list")))["result"]["tools"]
        # What was called without being listed is known by its name.
        assert [(one["name"], "description" in one) for one in listed] == [("echo", True), ("stream", False)]
        assert text_of(await talk.ask(call("echo"))) == "{}"
        assert text_of(await talk.ask(call("stream"))) == "done"


# The official SDK ----------------------------------------------------------------------------------------------------


async def used(client: Any) -> list[Any]:
    """What an agent sees that uses each tool."""
    listed: list[types.Tool] = (await client.list_tools()).tools
    seen: list[Any] = [tool.model_dump() for tool in listed]
    seen.append(client.instructions if hasattr(client, "instructions") else None)

    async def noted(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    for tool, arguments in (("add", {"a": 1, "b": 2}), ("count", {"to": 3}), ("broken", {})):
        result = await client.call_tool(tool, arguments, progress_callback=noted)
        seen.append(result.model_dump(exclude={"meta"}))
    return seen


def over(spans: list[Span]) -> int:
    """Tool calls that have ended."""
    return sum(span.kind == "tool" and span.end_ns is not None for span in spans)


async def test_the_official_client_sees_the_same_in_every_era(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    live = dict[str, list[Any]]()
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        new, old = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
        gateway = await start_gateway(f'[mcp.servers.new]\nurl = "{new}/mcp"\n[mcp.servers.old]\nurl = "{old}/sse"\n')
        async with serving([first, second]):
            for mode in ("auto", "legacy"):
                async with SdkClient(f"{gateway.address(mode)}/mcp/new", mode=mode) as client:
                    live[mode] = await used(client)
            async with SdkClient(sse_client(f"{gateway.address('sse')}/mcp/old"), mode="legacy") as client:
                live["sse"] = await used(client)
    for rollout in live:
        _ = await Tape(gateway.url, http).when(rollout, "a1", lambda spans: over(spans) == 3)
    # Each is played for clients of its own era, and for those of the other one.
    for rollout, mode in (
        ("auto", "auto"),
        ("legacy", "legacy"),
        ("legacy", "auto"),
        ("sse", "auto"),
        ("auto", "legacy"),
    ):
        async with connected(gateway.url, "replay", rollout, mode=mode) as client:
            assert await used(client) == live[rollout], (rollout, mode)
            with pytest.raises(MCPError, match="1 place differs: /arguments/b is 2 there and 3 here"):
                _ = await client.call_tool("add", {"a": 1, "b": 3})
