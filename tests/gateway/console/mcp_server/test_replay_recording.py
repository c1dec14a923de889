"""Calls made of spans, and what a recording offers that was not asked for, or that several servers offer together."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.mcp_server.replay import Player, ReplayCatalog
from penstock.console.mcp_server.replay_calls import ReplayCall, SpanExchange, read
from penstock.gateway.model.span import Span, SpanStatus

VERSION = "io.modelcontextprotocol/protocolVersion"
SECOND = 10**9


def raw(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode()


def events(*messages: bytes) -> bytes:
    return b"".join(b"data: %b\n\n" % one for one in messages)


class Spans(list[SpanExchange]):
    """Spans of an attempt, a second each."""

    def add(self, request: bytes, response: bytes, **fields: Any) -> Span:
        at = (len(self) + 1) * SECOND
        made: dict[str, Any] = {"start_ns": at, "end_ns": at + SECOND - 1, "upstream": "s", "span_id": f"{at:016x}"}
        span = Span(rollout="r", attempt="a1", sequence=len(self) + 1, kind="mcp", **(made | fields))
        self.append(SpanExchange(span, request, response))
        return span

    def told(self, request: bytes, at: float, answer: bytes = b"", session: str | None = None, **fields: Any) -> None:
        """What the server said, in a stream of its own."""
        attributes = {"penstock.mcp.sender": "server", "mcp.session.id": session}
        self.add(request, answer, start_ns=int(at * SECOND), attributes=attributes, **fields)


def call(id: Any, name: str = "t", **params: Any) -> bytes:
    return raw(id=id, method="tools/call", params={"name": name, **params})


def methods(found: ReplayCall) -> list[str]:
    return [step.sent.method for step in found.steps]


def test_a_batch_is_as_many_calls_each_with_its_answer() -> None:
    spans = Spans()
    request = b"[" + b",".join([call(1), call("1"), raw(method="notifications/x")]) + b"]"
    spans.add(request, b"[" + b",".join([raw(id="1", result={"n": 2}), raw(id=1, result={"n": 1})]) + b"]")
    assert [(one.answer, one.missing) for one in read(spans)] == [
        (raw(id=1, result={"n": 1}), "ok"),
        (raw(id="1", result={"n": 2}), "ok"),
    ]


def test_what_stands_in_a_stream_stands_in_its_call() -> None:
    spans = Spans()
    stream = events(raw(method="a"), raw(id=5, method="roots/list"), raw(id=1, result={}), raw(method="late"))
    above = spans.add(call(1), stream, stream=True)
    spans.told(raw(id=5, method="roots/list"), 1.5, raw(id=5, result={"roots": []}), parent_id=above.span_id)
    (found,) = read(spans)
    assert methods(found) == ["a", "roots/list", "late"]
    assert [step.answer for step in found.steps] == [None, raw(id=5, result={"roots": []}), None]


def test_what_stands_in_another_stream_belongs_to_the_call_under_way() -> None:
    spans = Spans()
    listening = spans.add(b"", b"", method="GET", end_ns=None, stream=True)
    first = spans.add(call(1, _meta={"progressToken": "p"}), raw(id=1, result={}), end_ns=9 * SECOND,
                      attributes={"mcp.session.id": "mine"})  # fmt: skip
    spans.add(call(2), raw(id=2, result={}), attributes={"mcp.session.id": "other"})
    progress = raw(method="notifications/progress", params={"progressToken": "p", "progress": 1})
    spans.told(progress, 3.2, parent_id=listening.span_id)
    spans.told(raw(method="early"), 1.1, parent_id=listening.span_id)
    spans.told(raw(id=7, method="roots/list"), 8.5, parent_id=listening.span_id)
    # A wrapper knows the call itself.
    spans.told(raw(method="within"), 8.7, parent_id=first.span_id)
    for session in ("mine", "other", "a third"):
        spans.told(raw(method=session), 3.5, session=session)
    assert [methods(one) for one in read(spans)] == [
        ["notifications/progress", "mine", "roots/list", "within"],
        ["other"],
    ]
    assert first.end_ns == 9 * SECOND


def test_a_stream_that_listens_is_acknowledged_and_says_no_more() -> None:
    spans = Spans()
    above = spans.add(raw(id=1, method="subscriptions/listen", params={}), b"", stream=True)
    for method in ("notifications/subscriptions/acknowledged", "notifications/tools/list_changed"):
        spans.told(raw(method=method), 1.5, parent_id=above.span_id)
    (found,) = read(spans)
    assert methods(found) == ["notifications/subscriptions/acknowledged"]


class Drawn(NamedTuple):
    """A span of a call, or what a server said."""

    start: int
    lasts: int | None
    upstream: str
    session: str | None
    token: Any
    listens: bool = False


SESSIONS = st.sampled_from([None, "a", "b"])
TOKENS: st.SearchStrategy[Any] = st.sampled_from([None, "p", "q", 1, True, [1], {"x": 1}])
TIMES, UPSTREAMS = st.integers(1, 12), st.sampled_from("st")
CALLS = st.builds(Drawn, TIMES, st.none() | st.integers(-1, 6), UPSTREAMS, SESSIONS, TOKENS, st.booleans())
SAID = st.builds(Drawn, TIMES, st.none(), UPSTREAMS, SESSIONS, TOKENS)


def recorded(calls: Sequence[Drawn], said: Sequence[Drawn]) -> Spans:
    spans = Spans()
    for number, one in enumerate(calls):
        params = {"name": "t", "_meta": {"progressToken": one.token}}
        method = "subscriptions/listen" if one.listens else "tools/call"
        end_ns = None if one.lasts is None else (one.start + one.lasts) * SECOND
        spans.add(raw(id=number, method=method, params=params), raw(id=number, result={}), span_id=f"{number:016x}",
                  start_ns=one.start * SECOND, end_ns=end_ns, upstream=one.upstream,
                  attributes={"mcp.session.id": one.session})  # fmt: skip
    for number, one in enumerate(said):
        line = raw(method=f"{number}", params={"progressToken": one.token})
        spans.told(line, one.start, session=one.session, upstream=one.upstream, parent_id="a stream's")
    return spans


def belongs_to(one: Drawn, calls: Sequence[Drawn]) -> Drawn | None:
    """The rule, call by call."""

    def under_way(call: Drawn) -> bool:
        same = call.upstream == one.upstream and (call.session == one.session or None in (call.session, one.session))
        begun = call.start <= one.start and (call.lasts is None or one.start <= call.start + call.lasts)
        return same and begun and not call.listens

    found = [call for call in sorted(calls, key=lambda call: call.start) if under_way(call)]
    named = [call for call in found if one.token is not None and call.token == one.token]
    return next(reversed(named or found), None)


@given(st.lists(CALLS, max_size=8), st.lists(SAID, max_size=8))
def test_what_stands_in_another_stream_belongs_to_the_named_or_the_newest_call(
    calls: list[Drawn], said: list[Drawn]
) -> None:
    ordered = sorted(enumerate(said), key=lambda one: one[1].start)
    expected = [
        [f"{number}" for number, one in ordered if belongs_to(one, calls) is call]
        for call in sorted(calls, key=lambda call: call.start)
    ]
    assert [methods(one) for one in read(recorded(calls, said))] == expected


def test_calls_that_overlap_take_linear_time() -> None:
    def steps(number: int) -> int:
        """How many functions are called for so many calls, all under way at once, each with its progress."""
        calls = [Drawn(at, None, "s", None, at) for at in range(1, number + 1)]
        said = [one._replace(start=2 * number) for one in calls]
        spans, counted = recorded(calls, said), 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = read(spans)
        finally:
            sys.setprofile(before)
        assert [len(one.steps) for one in found] == [1] * number
        return counted

    assert steps(200) < 3 * steps(100)


@pytest.mark.parametrize(
    ("response", "fields", "missing"),
    [
        (b"", {"error": "timeout", "status": SpanStatus.ERROR}, "timeout"),
        (b'{"jsonrpc"', {"truncated": True}, "it was too large to be kept whole"),
        (b"", {"status": SpanStatus.OPEN}, "open"),
        (raw(id=9, result={}), {}, "ok"),
        (raw(id=None, error={"code": 1, "message": "m"}), {"http_status": 404}, None),
        (b"", {"http_status": 404, "error": "http_404"}, ()),
        (b"", {"http_status": 401, "error": "http_401"}, ()),
    ],
)
def test_what_is_said_of_a_call_without_an_answer(response: bytes, fields: Any, missing: Any) -> None:
    spans = Spans()
    spans.add(call(1), response, **fields)
    found = [one.missing if one.answer is None else None for one in read(spans)]
    assert found == ([] if missing == () else [missing])


# What it offers ------------------------------------------------------------------------------------------------------


def offered(*exchanges: tuple[str, str, dict[str, Any], dict[str, Any]]) -> ReplayCatalog:
    """Of (server, method, params, result)."""
    spans = Spans()
    for server, method, params, result in exchanges:
        spans.add(raw(id=1, method=method, params=params), raw(id=1, result=result), upstream=server)
    return ReplayCatalog(read(spans))


def test_without_a_recorded_beginning_one_is_made() -> None:
    old = offered(("a", "tools/call", {"name": "t"}, {}), ("a", "resources/read", {"uri": "u:1"}, {}))
    made = old.make_result("initialize", {"protocolVersion": "2026-07-28"})
    assert made == {
        "protocolVersion": "2025-11-25",
        "serverInfo": {"name": "penstock-replay", "version": "1"},
        "capabilities": {"tools": {}, "resources": {}},
    }
    assert old.make_result("server/discover", {}) is None, "it has sessions"
    assert old.make_result("tools/list", {}) == {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    assert old.make_result("resources/list", {}) == {"resources": [{"name": "u:1", "uri": "u:1"}]}
    assert old.make_result("prompts/list", {}) is None
    new = offered(("a", "tools/call", {"name": "t", "_meta": {VERSION: "2026-07-28"}}, {}))
    discovered = new.make_result("server/discover", {}) or {}
    assert (discovered["supportedVersions"], discovered["capabilities"]) == (["2026-07-28"], {"tools": {}})
    assert (new.make_result("tools/list", {}) or {})["resultType"] == "complete"


def test_what_is_recorded_is_left_to_the_recording() -> None:
    one = offered(("a", "initialize", {}, {"protocolVersion": "2025-06-18"}), ("a", "tools/list", {}, {"tools": []}))
    assert [one.make_result(method, {}) for method in ("initialize", "tools/list", "prompts/list")] == [None] * 3
    assert one.make_result("ping", {}) == {}


def test_several_servers_begin_and_list_together() -> None:
    def begun(version: str, words: str, **capabilities: Any) -> dict[str, Any]:
        return {"protocolVersion": version, "capabilities": capabilities, "instructions": words, "serverInfo": {}}

    both = offered(
        ("a", "initialize", {}, begun("2025-11-25", "Add.", tools={"listChanged": True})),
        ("b", "initialize", {}, begun("2025-06-18", "Find.", tools={"x": 1}, prompts={})),
        ("a", "tools/list", {}, {"tools": [{"name": "old"}]}),
        ("a", "tools/list", {}, {"tools": [{"name": "one"}], "nextCursor": "c"}),
        ("a", "tools/list", {"cursor": "c"}, {"tools": [{"name": "two"}]}),
        ("b", "tools/list", {}, {"tools": [{"name": "three"}]}),
    )
    assert both.make_result("initialize", {"protocolVersion": "2025-11-25"}) == {
        "protocolVersion": "2025-06-18",
        "serverInfo": {"name": "penstock-replay", "version": "1"},
        "capabilities": {"tools": {"listChanged": True, "x": 1}, "prompts": {}},
        "instructions": "a: Add.\n\nb: Find.",
    }
    assert both.make_result("tools/list", {}) == {"tools": [{"name": "one"}, {"name": "two"}, {"name": "three"}]}
    assert both.make_result("tools/list", {"cursor": "c"}) is None
    assert both.make_result("server/discover", {}) is None


def test_what_two_servers_have_under_one_name_is_named() -> None:
    both = offered(
        ("a", "tools/list", {}, {"tools": [{"name": "search"}, {"name": "x"}]}),
        ("b", "tools/call", {"name": "search"}, {}),
        ("a", "resources/read", {"uri": "f:1"}, {}),
        ("b", "resources/list", {}, {"resources": [{"uri": "f:1"}]}),
    )
    assert list(both.collisions()) == [("tools", "search", ["a", "b"]), ("resources", "f:1", ["a", "b"])]


# What is written -----------------------------------------------------------------------------------------------------


async def played(spans: Spans, *lines: bytes) -> list[bytes]:
    said = list[bytes]()

    async def given() -> AsyncGenerator[str]:
        for line in lines:
            yield line.decode()

    await Player(read(spans), said.append, lambda note: None).play(given())
    return said


async def test_values_keep_their_bytes_in_one_line() -> None:
    spans = Spans()
    pretty = (
        b'{\r\n  "jsonrpc": "2.0",\n "id": 1,\n "result": {\n "n": 1.50, "big": 12345678901234567890123,\n "s": "\\n"}}'
    )
    spans.add(call(1), pretty)
    (line,) = await played(spans, call("x"))
    assert line == b'{"jsonrpc":"2.0","id":"x","result":{  "n": 1.50, "big": 12345678901234567890123,  "s": "\\n"}}'


async def test_what_is_said_while_listening_names_the_request() -> None:
    spans = Spans()
    above = spans.add(raw(id=1, method="subscriptions/listen", params={}), b"", stream=True)
    meta = {"io.modelcontextprotocol/subscriptionId": 1, "x": 1.50}
    told = raw(method="notifications/subscriptions/acknowledged", params={"_meta": meta, "n": 1.50})
    spans.told(told.replace(b"1.5", b"1.50"), 1.5, parent_id=above.span_id)
    (line,) = await played(spans, raw(id="mine", method="subscriptions/listen"))
    said = json.loads(line)
    assert said["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": "mine", "x": 1.5}
    assert b'"n":1.50' in line.replace(b" ", b"")


async def test_a_request_that_its_server_did_not_wait_for_is_not_waited_for() -> None:
    spans = Spans()
    spans.add(call(1), events(raw(id=5, method="roots/list"), raw(id=1, result={})), stream=True)
    asked, answered = await played(spans, call(3))
    assert json.loads(asked) == {"jsonrpc": "2.0", "id": "replay-1", "method": "roots/list"}
    assert json.loads(answered)["id"] == 3


async def test_an_answer_that_cannot_come_any_more_is_not_waited_for() -> None:
    spans = Spans()
    asked, answer = raw(id=5, method="roots/list"), raw(id=5, result={"roots": []})
    above = spans.add(call(1), events(asked, raw(id=1, result={})), stream=True)
    spans.told(asked, 1.5, answer, parent_id=above.span_id)
    async with asyncio.timeout(10):
        (line,) = await played(spans, call(3))
    assert json.loads(line)["method"] == "roots/list"


async def test_what_is_too_deep_is_no_reason_to_end() -> None:
    spans = Spans()
    spans.add(call(1), raw(id=1, result={}))
    deep = b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"t","arguments":%b}}'
    lines = await played(spans, deep % (b'{"a":' * 900 + b"1" + b"}" * 900), call(3))
    assert ["error" in json.loads(line) for line in lines] == [True, False]
