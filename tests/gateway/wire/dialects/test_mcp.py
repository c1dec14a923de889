"""Messages of MCP, read: which is what, who answers whom, and how a request ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.mcp import (
    McpDialect,
    answer_to,
    cancelled_request_id,
    message,
    messages,
    outcome,
    request_facts,
)

MCP = McpDialect()
IDS = st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False))


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("sent", "kind", "id", "method"),
    [
        ({"jsonrpc": "2.0", "id": 1, "method": "ping"}, "request", b"1", "ping"),
        ({"jsonrpc": "2.0", "id": "1", "method": "ping"}, "request", b'"1"', "ping"),
        ({"jsonrpc": "2.0", "method": "notifications/initialized"}, "notification", b"", "notifications/initialized"),
        ({"jsonrpc": "2.0", "id": 0, "result": {}}, "answer", b"0", ""),
        ({"jsonrpc": "2.0", "id": None, "error": {"code": -32700}}, "answer", b"", ""),
        ({"jsonrpc": "2.0", "id": 1}, "unreadable", b"1", ""),
        ({"id": 1, "method": 5}, "unreadable", b"1", ""),
        ("text", "unreadable", b"", ""),
    ],
)
def test_a_message_is_what_it_is(sent: Any, kind: str, id: bytes, method: str) -> None:
    assert message(raw(sent))[:3] == (kind, id, method)


@given(IDS)
def test_an_answer_is_found_however_its_id_is_written(id: Any) -> None:
    plain, escaped = json.dumps(id, ensure_ascii=False), json.dumps(id)
    request = message(b'{"id":%b,"method":"x"}' % escaped.encode("utf-8", "surrogatepass"))
    answered = message(b'{"id": %b ,"result":{}}' % plain.encode("utf-8", "surrogatepass"))
    if "unreadable" not in (request.kind, answered.kind):
        assert request.id == answered.id


@pytest.mark.parametrize("id", [b'"\xff"', b"1e999", b"[" * 400 + b"]" * 400, b"9" * 400])
def test_an_id_that_cannot_be_compared_makes_a_message_unreadable(id: bytes) -> None:
    for rest in (b'"method":"ping"', b'"result":{}'):
        body = b'{"id":%b,%b}' % (id, rest)
        assert messages(body)[0][:3] == ("unreadable", b"", "")
        assert (MCP.facts(body, body, False), answer_to(b"1", body, False)) == (MCP.facts(b"?", b"", False), None)


def test_large_ids_are_told_apart_and_of_equal_keys_the_last_counts() -> None:
    """As for servers in Python and JavaScript."""
    sent = message(b'{"id":1,"method":"ping","method":"tools/call","id":2,"params":{"name":"a","name":"b"}}')
    assert (sent.id, sent.method, request_facts(sent).target) == (b"2", "tools/call", "b")
    one, other = (message(b'{"id":%d,"method":"ping"}' % (10**30 + last)) for last in (1, 2))
    assert (one.kind, one.id) == ("request", b"%d" % (10**30 + 1))
    assert one.id != other.id
    assert message(b'{"id":-0,"method":"ping"}').id == b"0"


@given(st.binary(max_size=60))
def test_nothing_is_raised_on_odd_bytes(body: bytes) -> None:
    assert messages(body)
    for stream in (False, True):
        _ = MCP.facts(body, body, stream), MCP.read(body, body, stream)
    _ = request_facts(message(body)), cancelled_request_id(message(body)), outcome(body)


@pytest.mark.parametrize(
    ("id", "canonical"),
    [
        (b"1", b"1"),
        (b'"1"', b'"1"'),
        (b"1.0", b"1"),
        (b"10e-1", b"1"),
        (b"-0.0", b"0"),
        (b'"\\u0061"', b'"a"'),
        (b"9007199254740993.0", b"9007199254740993.0"),
        (b"18446744073709551615", b"18446744073709551615"),
        (b"123456789012345678901234567890", b"123456789012345678901234567890"),
        (b"1e999", None),
        (b"[" * 3000 + b"]" * 3000, None),
    ],
)
def test_an_id_is_a_typed_value_and_any_is_borne(id: bytes, canonical: bytes | None) -> None:
    """Numbers of the same value are the same, as for servers in JavaScript; no two others are."""
    found = message(b'{"id":%b,"method":"tools/call"}' % id)
    assert found.id == canonical if canonical is not None else found.kind in ("request", "unreadable")
    unwanted = cancelled_request_id(message(b'{"method":"notifications/cancelled","params":{"requestId":%b}}' % id))
    assert unwanted in (canonical, None), "what cannot be read as a value is cancelled by nobody"


@pytest.mark.parametrize(
    ("body", "id"),
    [
        (b'{"id":1,"method":"tools/call","params":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, b"1"),
        (b'\xef\xbb\xbf{"id":1,"method":"tools/call"}', b"1"),
        (b'\xef\xbb\xbf[{"id":1,"method":"tools/call","x":NaN}]', b"1"),
        (rb'[{"id":"\u0061\ud800","method":"tools/call"}]', rb'"a\ud800"'),
        (b'{"id":"\xed\xa0\x80","method":"tools/call"}', rb'"\ud800"'),
        (rb'{"id":"\ud800","method":"x","meth\u006fd":"tools/call","id":"\ud801"}', rb'"\ud801"'),
    ],
)
def test_what_other_parsers_read_is_a_message(body: bytes, id: bytes) -> None:
    (found,) = messages(body)
    assert (found.kind, found.method, found.id) == ("request", "tools/call", id)
    assert found.raw in body


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000 + b"]" * 10_000,
        '{"id":1,"method":"ping"}'.encode("utf-16"),
        b'{"id":1,"method":"ping"',
        b'{"id":1,"method":"ping"}{"id":2}',
        b"[{},{}," + b"{}," * 600_000 + b"{}]",
        b"[1,2]",
        b"",
    ],
    ids=["deep", "utf-16", "cut off", "two", "crowd", "numbers", "nothing"],
)
def test_what_cannot_be_read_is_said_to_be_so(body: bytes) -> None:
    assert [one.kind for one in messages(body)] in (["unreadable"], ["unreadable", "unreadable"])


def test_a_batch_has_several() -> None:
    body = raw([{"id": number, "method": "tools/call", "params": {"name": "x"}} for number in range(10_000)])
    assert [one.id for one in messages(body)] == [b"%d" % number for number in range(10_000)]
    body = raw([{"id": 1, "method": "tools/list"}, {"method": "notifications/initialized"}])
    assert [one.kind for one in messages(body)] == ["request", "notification"]


def test_what_a_request_says_of_itself() -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "traceparent": "00-a"}
    sent = {"id": 3, "method": "tools/call", "params": {"name": "get", "_meta": meta, "requestState": "s"}}
    about = request_facts(message(raw(sent)))
    assert about[:3] == ("get", "2026-07-28", "00-a")
    asked_for = outcome(raw({"id": 2, "result": {"resultType": "input_required", "requestState": "s"}}))[2]
    linked = about.attributes["penstock.mcp.continues"] == asked_for["penstock.mcp.state"]
    assert linked, "rounds of one request are linked"


ANSWERS: list[tuple[Any, Any]] = [
    ({"result": {"content": []}}, (None, None, {})),
    ({"result": {"content": [], "isError": True}}, ("tool_error", None, {"error.type": "tool_error"})),
    ({"error": {"code": -3}}, ("rpc_error", None, {"rpc.response.status_code": "-3", "error.type": "-3"})),
    ({"result": {"resultType": "input_required"}}, (None, "input_required", {})),
    ({"result": {"resultType": "complete"}}, (None, None, {})),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_how_a_request_ended(said: Any, expected: Any, stream: bool) -> None:
    told = raw({"jsonrpc": "2.0", "id": "a", **said})
    if stream:
        others = [b'data: {"method":"notifications/progress"}\n\n' for _ in range(9)]
        told = b"".join([b"id: 1\ndata: \n\n", *others, b"data: %b\n\n" % told, *others])
    facts = MCP.facts(raw({"id": "a", "method": "tools/call", "params": {"name": "x"}}), told, stream)
    assert (facts.failed, facts.finish, facts.attributes) == expected


def test_calls_lists_and_refusals_are_read() -> None:
    """An answer without the id is a refusal."""
    refused = raw({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "Parse error"}})
    assert MCP.facts(raw({"id": 1, "method": "ping"}), refused, False).failed == "error_body"
    assert answer_to(b"1", refused, False) is None
    request = raw({"id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1}}})
    blocks = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    turn = MCP.read(request, raw({"id": 1, "result": {"content": blocks, "structuredContent": {"n": 3}}}), False)
    called, told = turn.messages[0].parts[0], turn.choices[0].message.parts[0]
    assert (called.type, called.name, called.arguments) == ("tool_call", "add", '{"a":1}')
    assert (told.type, told.text, told.data["structuredContent"]) == ("tool_call_response", "1\n2", {"n": 3})

    tools = [{"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}]
    turn = MCP.read(raw({"id": 1, "method": "tools/list"}), raw({"id": 1, "result": {"tools": tools}}), False)
    made = turn.tools[0]
    assert (made.name, made.description, made.parameters) == ("add", "Adds.", {"type": "object"})


def test_routes() -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        assert (find(method, "/mcp/tools").name, find(method, "/mcp").name) == ("mcp", "opaque")
