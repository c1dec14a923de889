"""Which answer belongs to which request on a pipe: the same whoever is killed, and however often frames come."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, SERVER, StdioFrame
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools import pipe as notes
from penstock.gateway.tools.pipe import Pipe, SessionProgress, WrapperSession
from penstock.sidecar.stdio.spool import LineSplitter

SOURCE = WrapperSession("r1", "a1", "header", "00000000000-0000000000000000", "tools")
Said = tuple[int, bytes]
"""Who says it, and the line."""


def new(saved: SessionProgress | None = None, limit: int = 1 << 20) -> Pipe:
    return Pipe(SOURCE, saved or SessionProgress(), limit)


def request(id: Any, method: str = "tools/call", **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n"


def reply(id: Any, **result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode() + b"\n"


def told(method: str, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode() + b"\n"


def framed(said: Iterable[Said], piece: int = 1 << 20) -> list[StdioFrame]:
    """What a wrapper makes of it, in pieces of this size."""
    made: list[StdioFrame] = []
    for number, (kind, line) in enumerate(said):
        parts = [line[at : at + piece] for at in range(0, len(line), piece)]
        for place, part in enumerate(parts, 1):
            made.append(
                StdioFrame(kind, len(made) + 1, 1000 + 10 * number + place, len(part), part, place == len(parts))
            )
    return made


def ended(some: list[StdioFrame], by: str = "client") -> list[StdioFrame]:
    said = json.dumps({"by": by}).encode()
    return [*some, StdioFrame(END, len(some) + 1, 10**6, len(said), said)]


def shown(entry: SpanEntry) -> tuple[Any, ...]:
    assert entry.body is not None or entry.kind == "event"
    body = entry.body
    texts = (None, None) if body is None else (body.request, body.response)
    return (entry.span_id, entry.name, entry.kind, entry.status, entry.error, entry.parent_id, entry.start_ns,
            entry.end_ns, *texts)  # fmt: skip


def taken(pipe: Pipe, said: list[Said], by: str = "client") -> dict[str, SpanEntry]:
    """The spans by name, without the end."""
    found = pipe.take(ended(framed(said), by))
    names = [entry.name or "" for entry in found]
    assert names[-1] == "end session"
    assert len(set(names)) == len(names), names
    return {entry.name or "": entry for entry in found[:-1]}


IDS = st.sampled_from([0, 1, 2, "1", "a"])
SIDES = st.sampled_from([CLIENT, SERVER])
SAID = st.one_of(
    st.tuples(SIDES, st.builds(request, IDS, st.sampled_from(["tools/call", "ping"]), name=st.just("t"))),
    st.tuples(SIDES, st.builds(reply, IDS, x=st.integers(0, 9))),
    st.tuples(SIDES, st.builds(told, st.just("notifications/cancelled"), requestId=IDS)),
    st.tuples(SIDES, st.sampled_from([told("notifications/message"), b"\n", b"garbage \xff\r\n"])),
)


def expected(said: list[Said]) -> list[tuple[str, bytes, bytes]]:
    """(how it ends, the request, its answer) of each request, by the rules as they are written down."""
    waiting: dict[tuple[int, str], bytes] = {}
    found: list[tuple[str, bytes, bytes]] = []
    for kind, line in said:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        key = kind, json.dumps(value.get("id"))
        if "result" in value:
            asker = (SERVER if kind == CLIENT else CLIENT, key[1])
            if asker in waiting:
                found.append(("ok", waiting.pop(asker), line.strip()))
        elif "id" in value:
            if key in waiting:
                found.append(("unanswered", waiting.pop(key), b""))
            waiting[key] = line.strip()
        elif value["method"] == "notifications/cancelled":
            unwanted = kind, json.dumps(value["params"]["requestId"])
            if unwanted in waiting:
                by = "client_cancelled" if kind == CLIENT else "server_cancelled"
                found.append((by, waiting.pop(unwanted), b""))
    return found + [("client_gone", line, b"") for line in waiting.values()]


def requests(entries: list[SpanEntry]) -> list[tuple[str, bytes, bytes]]:
    made: list[tuple[str, bytes, bytes]] = []
    for entry in entries:
        if entry.body is not None and b'"id"' in entry.body.request and b'"method"' in entry.body.request:
            made.append((entry.error or entry.status, entry.body.request, entry.body.response))
    return made


@given(st.lists(SAID, max_size=25))
def test_every_request_ends_once_and_as_it_did(said: list[Said]) -> None:
    entries = new().take(ended(framed(said)))
    assert sorted(requests(entries)) == sorted(expected(said))
    assert len({entry.span_id for entry in entries[:-1]}) == len(entries) - 1


@given(st.lists(SAID, max_size=20), st.integers(5, 200), st.data())
def test_a_gateway_that_is_killed_makes_the_same_spans(said: list[Said], piece: int, data: st.DataObject) -> None:
    """Between two requests of the wrapper the gateway may be killed, and the wrapper may send again what is there."""
    frames = ended(framed(said, piece))
    whole = new().take(frames)
    kept: list[SpanEntry] = []
    pipe, at = new(), 0
    while not pipe.over:
        size = data.draw(st.integers(1, 12))
        again = data.draw(st.integers(0, 5))
        kept += pipe.take(frames[max(0, at - again) : at + size])
        at += size
        if data.draw(st.booleans()):
            pipe = new(notes.decode_progress(notes.encode_progress(pipe.progress())))
            while need := pipe.need:
                most = data.draw(st.integers(1, len(need)))
                pipe.restore([frame for frame in frames if frame.sequence in need[:most]], ())
    assert [shown(entry)[:5] for entry in kept] == [shown(entry)[:5] for entry in whole]
    assert list(map(shown, kept[:-1])) == list(map(shown, whole[:-1]))


def test_a_span_says_what_one_of_http_says() -> None:
    call = request(1, name="add", arguments={"a": 1}, _meta={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    opening = request("one", "initialize"), reply("one", protocolVersion="2025-11-25")
    pipe = new()
    said = [(CLIENT, opening[0]), (SERVER, opening[1]), (CLIENT, call), (SERVER, reply(1, isError=True))]
    spans = taken(pipe, said)
    add = spans["tools/call add"]
    assert (add.kind, add.status, add.error) == ("tool", "error", "tool_error")
    assert (add.trace_id, add.parent_id) == ("ab" * 16, "cd" * 8)
    assert (add.upstream, add.path, add.dialect) == ("tools", "/mcp/tools", "mcp")
    assert add.attributes == {
        "mcp.method.name": "tools/call",
        "jsonrpc.request.id": "1",
        "gen_ai.tool.name": "add",
        "gen_ai.operation.name": "execute_tool",
        "network.transport": "pipe",
        "mcp.session.id": SOURCE.session,
        "mcp.protocol.version": "2025-11-25",
        "error.type": "tool_error",
    }
    assert spans["initialize"].kind == "mcp"
    assert add.body is not None
    assert (add.body.request, add.body.response) == (call.strip(), reply(1, isError=True).strip())
    assert (add.start_ns, add.end_ns) == (1021, 1031)


def test_what_a_server_says_stands_below_the_call_it_is_about() -> None:
    pipe = new()
    said = [
        (CLIENT, request(1, name="a", _meta={"progressToken": "p1"})),
        (SERVER, request(9, "sampling/createMessage")),
        (CLIENT, request(2, name="b", _meta={"progressToken": 2})),
        (SERVER, told("notifications/progress", progressToken=2)),
        (SERVER, request(10, "elicitation/create")),
        (CLIENT, reply(9)),
    ]
    spans = taken(pipe, said)
    assert spans["sampling/createMessage"].parent_id == spans["tools/call a"].span_id
    assert spans["sampling/createMessage"].status == "ok"
    assert spans["notifications/progress"].parent_id == spans["tools/call b"].span_id
    # Two calls are under way: nothing says which of them asks.
    assert spans["elicitation/create"].parent_id is None
    assert (spans["sampling/createMessage"].attributes or {})["penstock.mcp.sender"] == "server"


@pytest.mark.parametrize(
    ("by", "status", "error"),
    [
        ("client", "cancelled", "client_gone"),
        ("server", "error", "ended_early"),
        ("killed", "interrupted", "wrapper_died"),
    ],
)
def test_a_request_without_an_answer_ends_as_its_session(by: str, status: str, error: str) -> None:
    (span,) = taken(new(), [(CLIENT, request(1, name="a"))], by).values()
    assert (span.status, span.error, span.end_ns) == (status, error, 10**6)


def test_what_was_lost_is_said_of_the_request_whose_answer_may_be_in_it() -> None:
    gap = json.dumps({"lines": 4, "since_ns": 1005, "cut": ["server"]}).encode()
    frames = [*framed([(CLIENT, request(1, name="a"))]), StdioFrame(SERVER, 2, 1003, 4, b'{"id', False)]
    frames.append(StdioFrame(GAP, 3, 1010, 400, gap))
    frames += [frame._replace(sequence=frame.sequence + 3) for frame in framed([(CLIENT, request(2, name="b"))])]
    entries = {entry.name: entry for entry in new().take(ended(frames, "server"))}
    assert (entries["tools/call a"].error, entries["tools/call b"].error) == ("recording_gap", "ended_early")
    lost = entries["recording_gap"]
    assert (lost.kind, lost.attributes, lost.start_ns) == ("event", {"lines": 4, "bytes": 400}, 1005)
    assert entries["unreadable"].truncated


@pytest.mark.parametrize(
    "answer",
    [
        b'{"jsonrpc":"2.0","id":"x","result":{"content":"' + b"y" * 5000 + b'"}}\n',
        b'{"result":{"content":"' + b"y" * 5000 + b'","id":1},"jsonrpc":"2.0","id":"x"}\n',
        b'{"result":{"content":"' + b"y" * 5000 + b'"}, "id" : "x" } \r\n',
    ],
)
@pytest.mark.parametrize("by_wrapper", [True, False])
def test_an_answer_that_is_too_long_ends_its_request_all_the_same(answer: bytes, by_wrapper: bool) -> None:
    lines = LineSplitter()
    lines.limit = 1000 if by_wrapper else 1 << 20
    frames = framed([(CLIENT, request("x", name="a"))])
    for piece in lines.feed(answer):
        frames.append(StdioFrame(SERVER, len(frames) + 1, 2000, piece.size, piece.data, piece.last))
    span, _ = new(limit=1000).take(ended(frames))
    assert (span.name, span.status, span.truncated, span.response_bytes) == ("tools/call a", "ok", True, len(answer))
    assert span.body is not None
    assert span.body.response == answer[:1000]


def test_what_the_wrapper_has_lost_does_not_stop_the_session() -> None:
    first = new()
    assert first.take(framed([(CLIENT, request(1, name="a"))])) == []
    pipe = new(notes.decode_progress(notes.encode_progress(first.progress())))
    assert pipe.need == [1]
    pipe.restore([], [1])
    assert pipe.need == []
    assert pipe.take([StdioFrame(SERVER, 2, 5, 3, b"{}\n")])[0].name == "unreadable"


def test_messages_of_one_line_are_spans_each() -> None:
    batch = b"[%b,%b]\n" % (request(1, name="a").strip(), request(2, name="b").strip())
    spans = taken(new(), [(CLIENT, batch), (SERVER, reply(2)), (SERVER, reply(1))])
    assert [span.status for span in spans.values()] == ["ok", "ok"]
    assert [span.request_bytes for span in spans.values()] == [len(request(2, name="b")) - 1] * 2
