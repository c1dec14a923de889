"""Features of exchanges: what they refuse, wait for, read and change, wherever an answer passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from fakes.mcp_wire import Client, McpServer, answer, call, event, said
from fakes.rig import Inside, inside
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tools.middleware import McpRequest
from penstock.gateway.tools.response_rewriter import ResponseRewriter
from penstock.gateway.tools.sessions import ResponseHandlers
from penstock.gateway.traffic.proxy.proxy_context import CallPlan
from penstock.gateway.wire.http.request import ClientFault
from penstock.gateway.wire.rewriting import EventStreamRewriter


class Loud:
    """Writes the answers of tools in capitals, refuses those of `fails`, and lets `hang` wait for a person."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.person: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def changes(self, server: str) -> bool:
        return True

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        for one in asking.messages:
            if one.method == "tools/call":
                asking.observe_response(one.id, self.heard.append)
                asking.transform_response(one.id, self._refused if b'"fails"' in one.raw else bytes.upper)
                if b'"hang"' in one.raw:
                    return self.person
            elif one.method == "ping":
                raise ClientFault(200, "unwanted", "no pings here")
        return None

    def _refused(self, raw: bytes) -> bytes:
        raise ClientFault(400, "policy", "not this one")


@pytest.fixture
async def behind(tmp_path: Path, http: aiohttp.ClientSession, server: McpServer) -> AsyncGenerator[Inside]:
    url = server.url.replace("/mcp", "")
    servers = {"tools": {"url": url + "/mcp"}, "old": {"url": url + "/sse"}, "down": {"url": "http://127.0.0.1:1/mcp"}}
    async with inside(tmp_path, http, mcp={"servers": servers}) as made:
        made.gateway.mcp.features = (Loud(),)
        yield made


@pytest.fixture
def loud(behind: Inside) -> Loud:
    (found,) = behind.gateway.mcp.features
    assert isinstance(found, Loud)
    return found


@pytest.fixture
def caller(behind: Inside, http: aiohttp.ClientSession) -> Client:
    return Client(f"{behind.base.url}/rollout/r1/attempt/a1/mcp/tools", http, {"Accept-Encoding": "gzip"})


async def test_documents_and_streams_are_changed_and_heard(caller: Client, server: McpServer, loud: Loud) -> None:
    await caller.open()
    for tool, text in (("echo", b'{"CONTENT": [{"TYPE": "TEXT"'), ("stream", b'"TEXT": "DONE"')):
        status, body = await caller.say(call(tool, {"a": 1}, id=tool))
        assert (status, text in body, b'"progress": 1' in body) == (200, True, tool == "stream")
        assert server.asked[-1][2]["accept-encoding"] == "identity"
    assert [json.loads(one)["id"] for one in loud.heard] == ["echo", "stream"]


async def test_an_answer_in_a_later_stream_is_changed_each_time(
    caller: Client, server: McpServer, loud: Loud, behind: Inside
) -> None:
    await caller.open()
    _ = await caller.say(call("later", id=7))
    async with caller.listen() as stream:
        assert b"AT LAST" in await stream.content.readuntil(b"\n\n")
        server.tell(answer({"id": "7"}, said("at last")), 3)
        assert b"AT LAST" in await stream.content.readuntil(b"\n\n")
    assert len(loud.heard) == 2


async def test_http_with_sse_is_changed_too(behind: Inside, http: aiohttp.ClientSession, loud: Loud) -> None:
    async with http.get(f"{behind.base.url}/rollout/r1/attempt/a1/mcp/old") as stream:
        path = (await stream.content.readuntil(b"\n\n")).decode().split("data: ")[1].strip()
        assert path.startswith("/rollout/r1/attempt/a1/mcp/old/@/messages?sessionId=")
        async with http.post(behind.base.url + path, json=call("echo", {"a": 1}, id=3)) as reply:
            assert reply.status == 202
        assert b'"ID": 3' in await stream.content.readuntil(b"\n\n")
    assert len(loud.heard) == 1


async def test_a_refused_answer_is_an_error_of_its_request(caller: Client, behind: Inside) -> None:
    await caller.open()
    status, body = await caller.say(call("fails", id=5))
    assert (status, json.loads(body)["error"]["data"], json.loads(body)["id"]) == (200, {"reason": "policy"}, 5)
    made = (await behind.tape.spans("r1", 2))[1]
    assert (made.name, made.status, made.error) == ("tools/call fails", "error", "policy")


async def test_a_refused_request_goes_nowhere(caller: Client, server: McpServer, behind: Inside) -> None:
    await caller.open()
    batch = [{"jsonrpc": "2.0", "id": id, "method": "ping"} for id in (1, 2)]
    async with caller.http.post(caller.url, json=batch, headers=caller.headers) as reply:
        assert (reply.status, [one["id"] for one in await reply.json()]) == (200, [1, 2])
    assert [json.loads(body)["method"] for _, _, _, body in server.asked] == ["initialize"]
    assert (await behind.tape.spans("r1", 2))[1].error == "unwanted"


@pytest.mark.parametrize("agreed", [True, False])
async def test_a_call_waits_for_a_person(
    caller: Client, server: McpServer, behind: Inside, loud: Loud, agreed: bool
) -> None:
    await caller.open()
    server.let_go.set()
    waiting = asyncio.ensure_future(caller.say(call("hang", id=5)))
    _ = await behind.tape.open_span("r1", name="tools/call hang")
    assert len(server.asked) == 1
    if agreed:
        loud.person.set_result(None)
    else:
        loud.person.set_exception(ClientFault(200, "declined", "a person said no"))
    assert (b"LET GO" in (await waiting)[1]) == agreed
    assert (await behind.tape.spans("r1", 2))[1].error == (None if agreed else "declined")


async def test_a_client_that_leaves_takes_its_question_back(caller: Client, behind: Inside, loud: Loud) -> None:
    await caller.open()
    waiting = asyncio.ensure_future(caller.say(call("hang", id=5)))
    _ = await behind.tape.open_span("r1", name="tools/call hang")
    _ = waiting.cancel()
    made = await behind.tape.spans("r1", 2)
    assert (made[1].error, loud.person.cancelled()) == ("client_gone", True)


@pytest.mark.parametrize("id", ["7", "7.0", '" 7 "', '"0x7"', '"7e0"', '"7"'])
def test_ids_are_compared_as_the_loosest_client_does(id: str) -> None:
    kept = ResponseHandlers()
    kept.handler_of(b"7").transforms.append(bytes.upper)
    body = b'{"jsonrpc":"2.0","id":%b,"result":{"a":"b"}}' % id.encode()
    assert ResponseRewriter(lambda: [kept], None).document(body) == body.upper()


@given(st.one_of(st.integers(), st.text(max_size=30), st.floats(allow_nan=False, allow_infinity=False)))
def test_every_id_finds_its_own(id: object) -> None:
    kept, raw = ResponseHandlers(), json.dumps(id).encode()
    kept.handler_of(raw).transforms.append(lambda _: b"changed")
    body = b'{"jsonrpc":"2.0","id":%b,"result":{}}' % raw
    assert ResponseRewriter(lambda: [kept], None).document(body) in (b"changed", body if id is None else b"changed")


def test_what_cannot_be_read_is_not_passed_where_an_answer_is_changed() -> None:
    kept = ResponseHandlers()
    changer = ResponseRewriter(lambda: [kept], None)
    odd = b'{"jsonrpc":"2.0","id":7,"result":{"a":"\xff"},}'
    assert changer.document(odd) is odd
    kept.handler_of(b"7").transforms.append(bytes.upper)
    assert json.loads(changer.document(odd))["error"]["data"] == {"reason": "unreadable"}
    assert changer.last_refusal is not None
    assert changer.event(b"") == b""


def test_messages_that_nobody_changes_are_the_same_bytes() -> None:
    kept = ResponseHandlers()
    kept.handler_of(b"7").transforms.append(bytes.upper)
    changer = ResponseRewriter(lambda: [kept], None)
    for body in (b'{"method":"x"}', b'{"id":8,"result":{}}', b'[{"id":8,"result":{}}, {"method":"x"}]'):
        assert changer.document(body) is body
    both = changer.document(b'[{"id":8,"result":{}}, {"id":7,"result":{}}]')
    assert both == b'[{"id":8,"result":{}},{"ID":7,"RESULT":{}}]'


def test_the_mark_of_the_byte_order_hides_no_event() -> None:
    kept = ResponseHandlers()
    kept.handler_of(b"7").transforms.append(bytes.upper)
    events = EventStreamRewriter(ResponseRewriter(lambda: [kept], None), 1 << 20)
    made = events.feed(b"\xef\xbb\xbf" + event({"id": 7, "result": {}}))
    assert b'"RESULT"' in made
