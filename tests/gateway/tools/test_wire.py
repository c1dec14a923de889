"""Messages of MCP through a gateway process: the bytes pass, and every request is one span with its true outcome."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fakes.mcp_wire import Client, McpServer, answer, call, said
from fakes.process import PATIENCE, Gateway, limit_files
from fakes.tape import Tape
from fakes.waiting import until

from penstock.console.commands.check import examine
from penstock.gateway.model.span import Span, SpanStatus

PARENT = "00-11111111111111112222222222222222-c0ffee0123456789-01"


@pytest.fixture
def more(server: McpServer) -> str:
    slow = f'[mcp.servers.slow]\nurl = "{server.url}"\nfirst_byte_timeout = 0.2\n'
    return slow + '[mcp.servers.dead]\nurl = "http://127.0.0.1:1/mcp"\n'


def attributes(span: Span) -> dict[str, Any]:
    return span.attributes or {}


async def test_a_tool_call_is_a_tool_span(client: Client, server: McpServer, tape: Tape) -> None:
    await client.open()
    status, body = await client.say(call("echo", {"city": "Oslo"}, id="a"))
    assert (status, json.loads(body)) == (200, answer({"id": "a"}, said({"city": "Oslo"})))
    opened, made = await tape.spans("r1", 2)
    assert (opened.kind, opened.name, opened.status) == ("mcp", "initialize", SpanStatus.OK)
    assert (made.kind, made.name, made.upstream, made.http_status) == ("tool", "tools/call echo", "tools", 200)
    session = attributes(made).pop("mcp.session.id")
    assert attributes(made) == {
        "mcp.method.name": "tools/call",
        "jsonrpc.request.id": "a",
        "gen_ai.tool.name": "echo",
        "gen_ai.operation.name": "execute_tool",
    }
    assert session == attributes(opened)["mcp.session.id"]
    assert client.headers["Mcp-Session-Id"] not in str(await tape.get("/api/rollouts/r1/attempts/a1/spans/2"))


async def test_bytes_pass_and_only_the_address_is_ours(client: Client, server: McpServer) -> None:
    await client.open()
    body = b'{ "jsonrpc":"2.0","id":1.0, "method":"tools/call","params":{"name":"echo","arguments":{"a":1e5}} }'
    headers = {"X-Odd": "1", "x-rollout-id": "r1", "Mcp-Session-Id": client.headers["Mcp-Session-Id"]}
    async with client.http.post(client.url, data=body, headers=headers) as reply:
        assert reply.status == 200
    method, path, seen, got = server.asked[-1]
    assert (method, path, got, seen["x-odd"]) == ("POST", "/mcp", body, "1")
    assert seen["host"] == server.url.split("/")[2]


@pytest.mark.parametrize(
    ("headers", "odd"),
    [
        ({}, None),
        ({"Mcp-Method": "tools/call", "Mcp-Name": "echo"}, None),
        ({"Mcp-Name": "=?base64?ZWNobw==?="}, None),
        ({"Mcp-Name": "=?base64?ZWNob?="}, "mcp-name"),
        ({"Mcp-Method": "tools/list", "Mcp-Name": "Echo"}, "mcp-method,mcp-name"),
    ],
)
async def test_headers_that_say_something_else_pass_and_are_noted(
    client: Client, server: McpServer, tape: Tape, headers: dict[str, str], odd: str | None
) -> None:
    await client.open()
    async with client.post(call("echo"), **headers) as reply:
        assert reply.status == 200
    assert {name.lower(): value for name, value in headers.items()}.items() <= server.asked[-1][2].items()
    assert attributes((await tape.spans("r1", 2))[1]).get("penstock.mcp.mismatch") == odd


@pytest.mark.parametrize(("tool", "error", "code"), [("fails", "tool_error", None), ("refused", "rpc_error", "-32602")])
async def test_an_error_of_the_tool_is_an_error_of_the_span(
    client: Client, tape: Tape, tool: str, error: str, code: str | None
) -> None:
    await client.open()
    _ = await client.say(call(tool))
    made = (await tape.spans("r1", 2))[1]
    assert (made.status, made.error, made.http_status) == (SpanStatus.ERROR, error, 200)
    assert attributes(made)["error.type"] == (code or "tool_error")
    assert attributes(made).get("rpc.response.status_code") == code


async def test_a_stream_passes_as_it_comes_and_is_kept_whole(client: Client, tape: Tape) -> None:
    await client.open()
    _, body = await client.say(call("stream"))
    assert body.count(b"data: ") == 2
    made = (await tape.spans("r1", 2))[1]
    assert (made.name, made.stream, made.status, made.response_bytes) == ("tools/call stream", True, "ok", len(body))


async def test_what_the_server_asks_is_a_span_below_the_call(client: Client, server: McpServer, tape: Tape) -> None:
    await client.open()
    async with client.post(call("ask")) as stream:
        asking = json.loads((await stream.content.readuntil(b"\n\n"))[6:])
        assert asking["method"] == "sampling/createMessage"
        told = answer(asking, {"role": "assistant", "content": {"type": "text", "text": "yes"}})
        assert (await client.say(told))[0] == 202
        assert b"yes" in await stream.read()
    spans = {span.name: span for span in await tape.spans("r1", 4)}
    tool, asked = spans["tools/call ask"], spans["sampling/createMessage"]
    assert (tool.status, asked.status, asked.kind) == ("ok", "ok", "mcp")
    assert asked.parent_id == tool.span_id
    assert attributes(asked)["penstock.mcp.sender"] == "server"
    detail = await tape.get(f"/api/rollouts/r1/attempts/a1/spans/{asked.sequence}")
    assert "yes" in str(detail["turn"])
    assert spans["answer"].status == "ok"


async def test_an_answer_in_a_later_stream_ends_its_call(client: Client, server: McpServer, tape: Tape) -> None:
    await client.open()
    _, body = await client.say(call("later", id=7))
    assert b"at last" not in body
    open_span = await tape.open_span("r1", name="tools/call later")
    async with client.listen(**{"Last-Event-ID": "1"}) as stream:
        assert b"at last" in await stream.content.readuntil(b"\n\n")
        spans = {span.name: span for span in await tape.spans("r1", 2)}
    made = spans["tools/call later"]
    assert (made.status, made.error) == (SpanStatus.OK, None)
    assert (made.end_ns or 0) > open_span.start_ns
    detail = await tape.get(f"/api/rollouts/r1/attempts/a1/spans/{made.sequence}")
    assert "at last" in str(detail["turn"])
    assert server.asked[-1][2]["last-event-id"] == "1"


async def test_a_session_that_ends_gives_up_what_it_owes(client: Client, tape: Tape) -> None:
    await client.open()
    _ = await client.say(call("never"))
    async with client.http.delete(client.url, headers=client.headers) as reply:
        assert reply.status == 200
    spans = {span.name: span for span in await tape.spans("r1", 3)}
    assert (spans["tools/call never"].status, spans["tools/call never"].error) == ("error", "ended_early")
    assert spans["end session"].status == "ok"
    # A session that is over stays over: the client is told by the server.
    assert (await client.say(call("echo")))[0] == 404


async def test_a_call_that_its_client_cancels_is_cancelled(client: Client, tape: Tape) -> None:
    await client.open()
    unwanted = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}}
    assert (await client.say(unwanted))[0] == 202
    _ = await client.say(call("never", id=5))
    async with client.http.delete(client.url, headers=client.headers):
        pass
    spans = {span.name: span for span in await tape.spans("r1", 4)}
    assert (spans["tools/call never"].status, spans["tools/call never"].error) == ("cancelled", "client_cancelled")


async def test_a_client_that_leaves_is_noticed_by_the_server(client: Client, server: McpServer, tape: Tape) -> None:
    await client.open()
    async with client.listen():
        await server.listening.wait()
    await asyncio.wait_for(server.left.wait(), PATIENCE)
    assert (await tape.spans("r1", 2))[1].status == SpanStatus.OK
    leaving = asyncio.ensure_future(client.say(call("hang")))
    _ = await tape.open_span("r1", name="tools/call hang")
    leaving.cancel()
    made = (await tape.spans("r1", 3))[2]
    assert (made.name, made.status, made.error) == ("tools/call hang", "cancelled", "client_gone")


async def test_what_a_listening_client_is_told_are_spans(
    apart: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    client, tape = Client(f"{apart.address('r1')}/mcp/tools", http, {}), Tape(apart.url, http)
    await client.open()
    async with client.listen() as stream:
        await server.listening.wait()
        server.tell({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        server.tell({"jsonrpc": "2.0", "id": 9, "method": "roots/list"})
        _ = await stream.content.readuntil(b"roots/list")
        assert (await client.say(answer({"id": 9}, {"roots": []})))[0] == 202
        spans = {span.name: span for span in await tape.spans("r1", 4)}
        assert spans["notifications/tools/list_changed"].status == "ok"
        assert (spans["roots/list"].status, spans["roots/list"].method) == ("ok", "GET")
    spans = {span.name: span for span in await tape.spans("r1", 5)}
    assert spans["listen"].response_bytes, "which are counted, and kept as those spans only"
    assert examine(apart.data)[1] == []


async def test_a_gateway_that_stops_or_dies_leaves_no_call_without_an_end(
    apart: Gateway, http: aiohttp.ClientSession
) -> None:
    client, tape = Client(f"{apart.address('r1')}/mcp/tools", http, {}), Tape(apart.url, http)
    await client.open()
    _ = await client.say(call("never"))
    _ = await tape.open_span("r1", name="tools/call never")
    await apart.kill()
    await apart.start(apart.port)
    spans = await tape.spans("r1", 2)
    assert [(span.name, span.status) for span in spans] == [("initialize", "ok"), ("tools/call never", "interrupted")]
    _ = await client.say(call("never", id=2))
    assert await apart.terminate() == 0
    await apart.start(apart.port)
    ended = (await tape.spans("r1", 3))[2]
    assert (ended.status, ended.error) == ("error", "ended_early")


async def test_calls_without_an_address_belong_to_their_session(
    gateway: Gateway, http: aiohttp.ClientSession, tape: Tape
) -> None:
    sessions = [Client(f"{gateway.url}/mcp/tools", http, {}) for _ in range(2)]
    for one in sessions:
        await one.open()
    for one in (*sessions, *sessions):
        assert (await one.say(call("echo")))[0] == 200
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < 2:
            found = [rollout["id"] for rollout in (await tape.get("/api/rollouts"))["rollouts"]]
    for rollout in found:
        assert [span.name for span in await tape.spans(rollout, 3)] == [
            "initialize",
            "tools/call echo",
            "tools/call echo",
        ]


async def test_http_with_sse(gateway: Gateway, server: McpServer, http: aiohttp.ClientSession, tape: Tape) -> None:
    async with http.get(f"{gateway.address('r1')}/mcp/old", headers={"Accept": "text/event-stream"}) as stream:
        first = await stream.content.readuntil(b"\n\n")
        path = first.split(b"data: ")[1].strip().decode()
        assert path.startswith("/rollout/r1/attempt/a1/mcp/old/@/messages?sessionId=")
        async with http.post(gateway.url + path, json=call("echo", {"a": 1}, id=3)) as reply:
            assert reply.status == 202
        assert b'"id": 3' in await stream.content.readuntil(b"\n\n")
        made = (await tape.spans("r1", 1))[0]
        assert (made.name, made.kind, made.status, made.http_status) == ("tools/call echo", "tool", "ok", 202)
        # A path that the server has not named is not reached through the gateway.
        async with http.post(f"{gateway.url}/mcp/old/@/admin", json=call("echo")) as reply:
            assert (reply.status, (await reply.json())["id"]) == (404, 1)
        assert not any("/admin" in path for _, path, _, _ in server.asked)


async def test_an_unknown_server_and_a_dead_one(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{gateway.url}/mcp/other", json=call("echo", id="x")) as reply:
        said = await reply.json()
        assert (reply.status, said["id"], said["error"]["data"]) == (404, "x", {"reason": "mcp_server"})
        assert "add [mcp.servers.other]" in said["error"]["message"]
        assert "there are: tools, old, slow, dead" in said["error"]["message"]
    async with http.post(f"{gateway.url}/mcp/dead", json=call("echo")) as reply:
        assert reply.status == 502
        assert "upstream 'dead'" in (await reply.json())["error"]["message"]


async def test_the_tape_knows_a_call_that_it_could_not_take(
    apart: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    """A call that is refused before it goes anywhere is one of tools, too: no call of a model is counted."""
    tape, url = Tape(apart.url, http), f"{apart.url}/rollout/r1/attempt/a1/mode/train/mcp/tools"
    limit_files(apart.pid, 16_384)
    try:

        async def is_refused() -> bool:
            async with http.post(url, json=call("echo"), headers={"traceparent": PARENT}) as reply:
                return reply.status == 503

        await until(is_refused)
    finally:
        limit_files(apart.pid, None)
    spans = await tape.when("r1", "a1", lambda spans: any(span.error == "tape" for span in spans))
    assert {(span.kind, span.name) for span in spans} == {("tool", "tools/call echo")}
    assert [span.parent_id for span in spans if span.error == "tape"] == ["c0ffee0123456789"]
    assert (await tape.get("/api/rollouts/r1"))["totals"]["calls"] == 0


async def test_a_late_answer_names_its_setting(
    gateway: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    server.sessions = False
    async with http.post(f"{gateway.url}/mcp/slow", json=call("hang")) as reply:
        assert reply.status == 504
        assert "(mcp.servers.slow.first_byte_timeout)" in (await reply.json())["error"]["message"]
