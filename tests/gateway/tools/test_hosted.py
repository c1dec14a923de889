"""Messages of a server that the gateway hosts: lines pass as they are, each to whom it belongs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from fakes.mcp_hosted import MODERN, Hosted, error, events, hosting, text
from fakes.mcp_stdio_server import SPACED
from fakes.mcp_wire import call
from fakes.waiting import until

from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.wire.dialects.loose_json import BOM

Named = Callable[[str, aiohttp.ClientSession], Hosted]


SERVERS = 30


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    """One gateway for all tests; each has a server of its own."""
    with hosting(tmp_path_factory.mktemp("gateway"), {f"evil{number}": () for number in range(SERVERS)}) as made:
        yield made


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    """Of servers that no test has used yet."""
    return (f"evil{number}" for number in range(SERVERS))


@pytest.fixture
def hosted(named: Named, names: Iterator[str], http: aiohttp.ClientSession) -> Hosted:
    return named(next(names), http)


async def test_a_session_is_a_process(hosted: Hosted) -> None:
    one, other = await hosted.opened(), await hosted.opened()
    ids = {client.headers["Mcp-Session-Id"] for client in (one, other)}
    assert len(ids) == 2
    assert all(len(id) >= 32 for id in ids)
    pids = [json.loads(await text(client, "echo"))["pid"] for client in (one, one, other)]
    assert pids[0] == pids[1] != pids[2]
    assert await hosted.end(one) == 200
    assert (await one.say(call("echo")))[0] == 404
    assert json.loads(await text(other, "echo"))["pid"] == pids[2]
    for client in (one, other):
        assert await hosted.end(client) == (404 if client is one else 200)
    await hosted.gone()


async def test_the_bytes_are_those_of_the_line(hosted: Hosted) -> None:
    client = await hosted.opened()
    for id in (7, "a b"):
        _, body = await client.say(call("spaced", id=id))
        assert body == SPACED % json.dumps(id).encode()
    spread = json.dumps(call("echo", {"a": "x\ny"}), indent=2).replace("\n", "\r\n")
    headers = client.headers | {"Content-Type": "application/json", "Accept": "*/*"}
    async with hosted.http.post(client.url, data=spread, headers=headers) as response:
        assert json.loads((await response.json())["result"]["content"][0]["text"])["a"] == "x\ny"


ODD = [
    rb'"cut \ud83d"', rb'"\ude00\ud83d"', b'"cut \xed\xa0\xbd"', b'"caf\xe9"', '"a\u2028b\u2029c\u0085d"'.encode(),
    b"NaN", b"[-Infinity, 1e999]", b"9" * 5000, b"[" * 10_000 + b"]" * 10_000, rb'{"\ud83d": 1, "a": 1, "a": 2}',
]  # fmt: skip


@pytest.mark.parametrize("mark", [b"", BOM])
async def test_a_line_that_is_a_message_passes_whatever_it_says(hosted: Hosted, mark: bytes) -> None:
    client = await hosted.opened()
    headers = client.headers | {"Content-Type": "application/json", "Accept": "*/*"}
    for id in (b"7", rb'"\ud83d"', b"1e0"):
        for odd in ODD:
            line = mark + b'{"jsonrpc":"2.0","result":{"content":[],"odd":%b},"id":%b}' % (odd, id)
            said = b"1" if odd[:2] in (b"[[", b"99") or b"\xe9" in odd else odd  # The server is Python.
            told = json.dumps({"line": line.decode("latin-1")}).encode()[:-1] + b',"odd":%b}' % said
            asked = b'{"id":%b,"jsonrpc":"2.0","method":"tools/call","params":{"name":"raw","arguments":%b}}' % (
                id,
                told,
            )
            async with hosted.http.post(client.url, data=mark + asked, headers=headers) as response:
                assert (response.status, await response.read()) == (200, line)
    spans = await hosted.tape.when(
        hosted.rollout(), "a1", lambda found: sum(it.end_ns is not None for it in found) > 3 * len(ODD)
    )
    names = Counter((span.kind, span.name, span.status) for span in spans)
    assert names["tool", "tools/call raw", SpanStatus.OK] == 3 * len(ODD)


async def test_every_request_is_a_span(hosted: Hosted) -> None:
    client = await hosted.opened()
    await text(client, "echo", id="e")
    assert (await error(client, "dies", id="d"))["code"] == -32603
    opened, echo, dies, ended = sorted(await hosted.tape.spans(hosted.rollout(), 4), key=lambda span: span.start_ns)
    assert [span.name for span in (opened, echo, dies)] == ["initialize", "tools/call echo", "tools/call dies"]
    assert [(span.kind, span.status, span.error) for span in (echo, dies)] == [
        ("tool", SpanStatus.OK, None),
        ("tool", SpanStatus.ERROR, "rpc_error"),
    ]
    for span in (opened, echo, dies):
        about = span.attributes or {}
        assert (about["network.transport"], span.upstream) == ("pipe", hosted.name)
        assert about["mcp.session.id"] == (ended.attributes or {})["mcp.session.id"]
    assert (ended.kind, ended.name, ended.error) == ("event", "mcp server ended", "mcp_process")
    assert (ended.attributes or {})["penstock.mcp.ended"] == "ended with exit status 7"
    assert (ended.attributes or {})["penstock.mcp.stderr"] == "it cannot go on"


async def test_what_comes_before_an_answer_is_a_stream(hosted: Hosted) -> None:
    client = await hosted.opened()
    asked = call("progress")
    asked["params"]["_meta"] = {"progressToken": "t"}
    async with client.post(asked) as response:
        assert response.content_type == "text/event-stream"
        told = await events(response, 4)
        assert [one.get("method", "answer") for one in told] == [
            "notifications/progress",
            "notifications/progress",
            "notifications/message",
            "answer",
        ]
        assert await response.content.read() == b"\n"


async def test_what_belongs_to_no_request_waits_for_a_listener(hosted: Hosted) -> None:
    client = await hosted.opened()
    assert await text(client, "changed") == "changed"
    async with client.listen() as first:
        assert first.status == 200
        assert [one["method"] for one in await events(first, 1)] == ["notifications/tools/list_changed"]
        async with client.listen() as second:
            assert await first.content.read() == b"\n"
            assert await text(client, "changed") == "changed"
            await events(second, 1)


async def test_answers_come_to_their_requests_in_any_order(hosted: Hosted) -> None:
    client = await hosted.opened()
    waiting = [asyncio.ensure_future(text(client, "held_back", id=id)) for id in (1, "1", 2)]
    held = ("tools/call held_back", SpanStatus.OPEN)
    await hosted.tape.when(
        hosted.rollout(), "a1", lambda spans: [(span.name, span.status) for span in spans].count(held) == 3
    )
    status, body = await client.say(call("echo", id="1"))
    assert (status, json.loads(body)["error"]["data"]) == (400, {"reason": "id"})
    await text(client, "release", id=3)
    assert await asyncio.gather(*waiting) == ["released"] * 3


async def test_a_server_asks_its_client(hosted: Hosted) -> None:
    client = await hosted.opened()
    async with client.post(call("ask")) as response:
        (asked,) = await events(response, 1)
        assert asked["method"] == "sampling/createMessage"
        said = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hello"}}
        assert (await client.say({"jsonrpc": "2.0", "id": asked["id"], "result": said}))[0] == 202
        (answer,) = await events(response, 1)
    assert answer["result"]["content"][0]["text"] == "hello"
    spans = await hosted.tape.spans(hosted.rollout(), 4)
    by_name = {span.name: span for span in spans}
    assert by_name["sampling/createMessage"].parent_id == by_name["tools/call ask"].span_id
    assert by_name["sampling/createMessage"].status == SpanStatus.OK


async def test_what_could_belong_to_several_requests_goes_to_the_listener(hosted: Hosted) -> None:
    client = await hosted.opened()
    waiting = asyncio.ensure_future(text(client, "held_back", id="h"))
    await hosted.tape.open_span(hosted.rollout(), name="tools/call held_back")
    async with client.post(call("ask", id=1)) as response:
        # Nobody listens: it is taken for one of the newest request.
        assert (await events(response, 1))[0]["id"] == "s-1"
        async with client.listen() as stream:
            asking = asyncio.ensure_future(text(client, "ask", id=2))
            assert (await events(stream, 1))[0]["id"] == "s-1"
            said = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "second"}}
            assert (await client.say({"jsonrpc": "2.0", "id": "s-1", "result": said}))[0] == 202
            assert await asking == "second"
    await text(client, "release", id=3)
    assert await waiting == "released"


async def test_several_requests_in_one_body(hosted: Hosted) -> None:
    """As revision 2025-03-26 has it."""
    client = await hosted.opened()
    async with client.post([call("echo", id=1), call("echo", id=2)]) as response:
        assert [one["id"] for one in await events(response, 2)] == [1, 2]


async def test_a_request_that_is_cancelled_is_over(hosted: Hosted) -> None:
    client = await hosted.opened()
    waiting = asyncio.ensure_future(error(client, "hangs", id="h"))
    await hosted.tape.open_span(hosted.rollout(), name="tools/call hangs")
    params = {"requestId": "h"}
    unwanted = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
    assert (await client.say(unwanted))[0] == 202
    assert (await waiting)["data"] == {"reason": "client_cancelled"}
    assert json.loads(await text(client, "requests"))["cancelled"] == ["h"]


async def test_the_transport_refuses_what_is_not_of_it(hosted: Hosted) -> None:
    client = await hosted.opened()
    bare, wrong = hosted.client(), hosted.client("r2")
    wrong.headers["Mcp-Session-Id"] = client.headers["Mcp-Session-Id"]
    for other, status in ((bare, 400), (wrong, 404)):
        assert (await other.say(call("echo")))[0] == status
        async with other.listen() as response:
            assert response.status == status
    wrong_ones: list[Any] = [{"id": 1}, "text", []]
    for message in wrong_ones:
        assert (await client.say(message))[0] == 400
    async with client.post(call("echo"), Accept="application/json") as response:
        assert response.status == 406
    async with client.listen(Accept="application/json") as response:
        assert response.status == 406
    async with hosted.http.put(client.url, headers=client.headers) as response:
        assert (response.status, response.headers["Allow"]) == (405, "DELETE, GET, POST")
    plain = client.headers | {"Content-Type": "text/plain"}
    async with hosted.http.post(client.url, data=json.dumps(call("echo")), headers=plain) as response:
        assert response.status == 415
    async with hosted.http.post(client.url + "/@/other", json=call("echo"), headers=client.headers) as response:
        assert response.status == 404

    # What is refused is on the tape, and what comes after it.
    def refused(spans: list[Span]) -> int:
        return sum(span.path.endswith("/@/other") and span.end_ns is not None for span in spans)

    before = await hosted.tape.when(hosted.rollout(), "a1", lambda spans: refused(spans) == 1)
    assert "pid" in await text(client, "echo")
    await hosted.tape.when(hosted.rollout(), "a1", lambda spans: len(spans) > len(before))


async def test_nobody_says_whose_call_it_is(hosted: Hosted) -> None:
    """The header in which the gateway says it is not taken from a client."""
    client = await hosted.opened()
    other = hosted.client("r2")
    other.headers = client.headers | {"Penstock-Owner": "r1/a1", "Penstock-Named": "1"}
    assert (await other.say(call("echo")))[0] == 404


async def test_without_sessions_an_address_is_a_process(hosted: Hosted) -> None:
    one, two, other = hosted.modern(), hosted.modern(), hosted.modern("r2")
    pids = [json.loads(await text(client, "echo", id=at))["pid"] for at, client in enumerate((one, two, other))]
    assert pids[0] == pids[1] != pids[2]
    nowhere = [hosted.nobody() for _ in range(2)]
    for client in nowhere:
        client.headers["MCP-Protocol-Version"] = MODERN
    shared = {json.loads(await text(client, "echo"))["pid"] for client in nowhere}
    assert len(shared) == 1
    assert not shared & {*pids}
    status, body = await one.say({"jsonrpc": "2.0", "id": 1, "method": "nothing/known"})
    assert (status, json.loads(body)["error"]["code"]) == (404, -32601)
    async with one.listen() as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_without_sessions_equal_ids_take_turns(hosted: Hosted) -> None:
    one, two = hosted.modern(), hosted.modern()
    first = asyncio.ensure_future(text(one, "held_back", id=5))
    await hosted.tape.open_span(hosted.rollout())
    second = asyncio.ensure_future(text(two, "echo", id=5))
    await hosted.tape.when(hosted.rollout(), "a1", lambda spans: len(spans) == 2)
    assert not second.done()
    await text(one, "release", id=6)
    assert await first == "released"
    assert "pid" in json.loads(await second)


async def test_without_sessions_whoever_meets_a_listener_gets_a_further_process(hosted: Hosted) -> None:
    one, two = hosted.modern(), hosted.modern()
    async with one.post({"jsonrpc": "2.0", "id": 5, "method": "subscriptions/listen"}) as response:
        assert (await events(response, 1))[0]["method"] == "notifications/subscriptions/acknowledged"
        pids = [json.loads(await text(two, "echo", id=id))["pid"] for id in (5, 6)]
        assert pids[0] != pids[1]
        assert await text(one, "changed", id=7) == "changed"
        assert (await events(response, 1))[0]["method"] == "notifications/tools/list_changed"


async def test_without_sessions_leaving_cancels(hosted: Hosted) -> None:
    client = hosted.modern()
    waiting = asyncio.ensure_future(text(client, "held_back", id="gone"))

    async def has(what: str) -> bool:
        return json.loads(await text(client, "requests", id="r"))[what] == ["gone"]

    await until(lambda: has("held"))
    waiting.cancel()
    await until(lambda: has("cancelled"))


async def test_a_server_of_an_earlier_revision_does_not_stay_when_it_is_asked_for_a_later_one(hosted: Hosted) -> None:
    client = hosted.modern()
    assert (await client.say({"jsonrpc": "2.0", "id": 1, "method": "server/discover"}))[0] == 404
    await hosted.gone()
    del client.headers["MCP-Protocol-Version"]
    await client.open()
    assert "pid" in await text(client, "echo")


async def test_a_rollout_is_made_for_each_session_that_names_none(hosted: Hosted) -> None:
    clients = [hosted.nobody() for _ in range(2)]
    for client in clients:
        await client.open()
        await text(client, "echo")

    async def both_are_there() -> bool:
        spans = (await hosted.tape.get("/api/spans?limit=1000"))["spans"]
        mine = [span["rollout"] for span in spans if span["upstream"] == hosted.name]
        return sorted(Counter(mine).values()) == [2, 2]

    await until(both_are_there)
