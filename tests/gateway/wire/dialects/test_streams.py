"""Streams as servers really send them: what was called and said, and that a summary says of them what a Turn says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from fakes.event_stream import event as frame
from fakes.wire_bodies import Json, sse
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import ANSWER_TEXT
from penstock.gateway.wire.dialects.sse import distinct_events
from penstock.gateway.wire.dialects.tokens import estimate_usage

F, G = 'f({"x":1})', 'g({"y":2})'


def said(turn: Turn) -> list[str]:
    """The parts of the first choice, short."""
    parts = turn.choices[0].message.parts if turn.choices else []
    return [
        f"{it.name}({it.arguments})" if it.type == "tool_call" else f"{it.type}:{it.text or it.data}" for it in parts
    ]


def agrees(name: str, body: bytes, request: bytes = b'{"model":"m"}', stream: bool = True) -> Turn:
    """The Turn of an answer, after asserting that the summary says the same."""
    facts, turn = by_name(name).facts(request, body, stream), by_name(name).read(request, body, stream)
    assert not stream or by_name(name).facts(request, distinct_events(body).body, stream) == facts
    parts = [part for choice in turn.choices for part in choice.message.parts]
    assert (facts.tool_calls, facts.choices) == (sum(it.type == "tool_call" for it in parts), len(turn.choices))
    assert facts.finish == (turn.choices[0].finish if turn.choices else facts.finish)
    served = (turn.model_served, turn.response_id, turn.usage)
    assert (facts.model_served, facts.response_id, facts.usage) == served
    assert (facts.failed in ("stream_error", "error_body")) == (turn.error is not None)
    early = turn.error is None and "response: the stream ended early" in turn.problems
    assert (facts.failed == "ended_early") == early
    return turn


ODD_TEXTS = ["a", "b c", "", "\\n", "é", r"q\"", "bad\\", '"x"', "m2", "usage", "stop", "\n"]


@given(st.lists(st.sampled_from(ODD_TEXTS), max_size=12))
def test_events_that_differ_in_a_text_are_one(texts: list[str]) -> None:
    one = '{"id":"c","model":"%s","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":%s}],"usage":%s}'
    told = [
        one % (text if text == "m2" else "m", text, '"stop"' if text == "stop" else "null", json.dumps(
            {"prompt_tokens": at} if text == "usage" else None)) for at, text in enumerate(["a"] * 40 + texts)
    ]  # fmt: skip
    body = "".join(f"data: {it}\n\n" for it in told).encode()
    (brief, left_out), facts = distinct_events(body), by_name("chat").facts
    assert facts(b"{}", brief, True) == facts(b"{}", body, True)
    assert len(brief) < len(body)
    known = estimate_usage(None, b"", body, ANSWER_TEXT)
    assert estimate_usage(None, b"", brief, ANSWER_TEXT, left_out) == known, "the texts that are left out count"


# Chat ---------------------------------------------------------------------------------------------------------------


def chunk(delta: Any = None, finish: str | None = None, key: str = "delta", **more: Any) -> Json:
    return {"id": "c", "model": "m", "choices": [{"index": 0, key: delta or {}, "finish_reason": finish, **more}]}


def piece(index: Any = None, id: Any = None, name: Any = None, arguments: Any = None, **more: Any) -> Json:
    function = {key: it for key, it in (("name", name), ("arguments", arguments)) if it is not None}
    return {key: it for key, it in (("index", index), ("id", id)) if it is not None} | {"function": function} | more


def cut(text: str) -> Json:
    """A piece of a call: its index, id, name and arguments; `-` where there is none, `''` where it is empty."""
    index, *others = ({"-": None, "''": ""}.get(it, it) for it in text.split(" "))
    return piece(None if index is None else int(index), *others)


def called(*deltas: Any, key: str = "delta") -> list[Any]:
    """A stream whose deltas have these pieces of calls, one or several each."""
    given: list[list[Any]] = [it if isinstance(it, list) else [it] for it in deltas]
    pieces = [[cut(it) if isinstance(it, str) else it for it in several] for several in given]
    return [chunk({"tool_calls": it}, key=key) for it in pieces] + [chunk(finish="tool_calls"), "[DONE]"]


def thought(field: str, *pieces: Any) -> list[Any]:
    """A stream that thinks, piece by piece, and says something."""
    return [*(chunk({field: it}) for it in pieces), chunk({"content": "Hi"}, "stop")]


CUSTOM = {"index": 0, "id": "a", "custom": {"name": "sh", "input": "{ls"}}
DETAIL, HM = {"type": "reasoning.text", "index": 0}, {"type": "text", "text": "Hm"}
MAGISTRAL = [[{"type": "thinking", "thinking": [{"type": "text", "text": it}]}] for it in "Hm"]
THOUGHT = ["reasoning:Hm", "text:Hi"]
CHAT: dict[str, tuple[list[Any], list[str]]] = {
    "as OpenAI does": (called("0 a f ''", '0 - - {"x":1}', '1 b g {"y":2}'), [F, G]),
    "index 0 for all": (called('0 a f {"x":1}', '0 b g {"y":2}'), [F, G]),
    "index 0 for all, twice the same": (called('0 a f {"x":1}', '0 b f {"x":1}'), [F, F]),
    "index 0 for all, in turns": (called("0 a f ''", "0 b g ''", '0 a - {"x":1}', '0 b - {"y":2}'), [F, G]),
    "index 0 for all, no ids": (called('0 - f {"x":1}', '0 - g {"y":2}'), [F, G]),
    "one id for all": (called('0 a f {"x":1}', '1 a g {"y":2}'), [F, G]),
    "one id and index for all": (called('0 a f {"x":1}', '0 a g {"y":2}'), [F, G]),
    "an id for every piece": (called('0 a f {"x"', "0 b - :1}"), [F]),
    "an id and the name for every piece": (called('0 a f {"x"', "0 b f :1}"), [F]),
    "no index, empty ids": (called(["- '' f {\"x\":1}", "- '' g {\"y\":2}"]), [F, G]),
    "no index, no ids, one delta, one tool": (called(['- - f {"x":1}', '- - f {"x":1}']), [F, F]),
    "no index, ids": (called('- a f {"x"', "- a - :1}", '- b g {"y":2}'), [F, G]),
    "no index, the id once": (called("- a f ''", '- - - {"x":1}'), [F]),
    "null index": (called(cut("- a f ''") | {"index": None}, cut('- - - {"x":1}') | {"index": None}), [F]),
    "the index only later": (called("- a f ''", '0 - - {"x":1}'), [F]),
    "indexes from 1": (called('1 a f {"x":1}', '2 b g {"y":2}'), [F, G]),
    "pieces in turns": (called('0 a f {"x"', '1 b g {"y"', "0 - - :1}", "1 - - :2}"), [F, G]),
    "the name with every piece": (called('0 a f {"x"', "0 a f :1", "0 a f }"), [F]),
    "the name with every piece, no ids": (called('0 - f {"x"', "0 - f :1}"), [F]),
    "an empty name later": (called("0 a f ''", "0 '' '' {\"x\":1}"), [F]),
    "the name in pieces": (called("0 a get_ -", "0 - weather ''", "0 - - {}"), ["get_weather({})"]),
    "the name in pieces and whole": (called("0 a get_ -", "0 - time -", "0 - get_time {}"), ["get_time({})"]),
    "the name grows": (called("0 a get -", "0 a get_time -", "0 - - {}"), ["get_time({})"]),
    "the arguments whole again": (called('0 a f {"x"', "0 - - :1}", '0 - - {"x":1}'), [F]),
    "all of it again": (called('0 a f {"x"', "0 - - :1}", '0 a f {"x":1}'), [F]),
    "the arguments grow": (called('0 a f {"x"', '0 - - {"x":1}'), [F]),
    "empty arguments first": (called("0 a f {}", '0 - - {"x"', "0 - - :1}"), [F]),
    "empty arguments last": (called('0 a f {"x":1}', "0 - - {}"), [F]),
    "an object": (called(piece(0, "a", "f", {"x": 1})), [F]),
    "an empty object first": (called(piece(0, "a", "f", {}), piece(0, None, None, {"x": 1})), [F]),
    "objects in one delta": (called([piece(None, None, "f", {"x": 1}), piece(None, None, "g", {"y": 2})]), [F, G]),
    "arguments before the name": (called('0 a - {"x":1}', "0 - f -"), [F]),
    "arguments before name and id": (called('0 - - {"x"', "0 a f :1}"), [F]),
    "objects in arguments": (called('0 a f {"x":', '0 - - {"x":1}', "0 - - }"), ['f({"x":{"x":1}})']),
    "no arguments": (called("0 a f -", "1 b g -"), ["f()", "g()"]),
    "an empty object for calls": ([chunk({"tool_calls": {}, "content": "Hi"}, "stop", key="message")], ["text:Hi"]),
    "message for delta": (called('0 a f {"x":1}', key="message"), [F]),
    "a message behind deltas": (
        [chunk({"content": "a"}), chunk({"content": "b"}), chunk({"content": "ab"}, "stop", key="message")],
        ["text:ab"],
    ),
    "one call is no list": ([chunk({"tool_calls": cut('0 a f {"x":1}')}), chunk(finish="tool_calls")], [F]),
    "no envelope": (called({"index": 0, "id": "a", "name": "f", "arguments": '{"x":1}'}), [F]),
    "parameters": (called({"index": 0, "id": "a", "function": {"name": "f", "parameters": {"x": 1}}}), [F]),
    "a custom tool": (called(CUSTOM, {"index": 0, "custom": {"input": "{x}"}}), ["sh({ls{x})"]),
    "function_call": (
        [
            chunk({"function_call": {"name": "f", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"x":1}'}}, "function_call"),
        ],
        [F],
    ),
    "Magistral": (thought("content", *MAGISTRAL, [{"type": "text", "text": "H"}]), ["reasoning:Hm", "text:HHi"]),
    "reasoning_details": (thought("reasoning_details", [DETAIL | {"text": "H"}], [DETAIL | {"text": "m"}]), THOUGHT),
    "reasoning_text": (thought("reasoning_text", "H", "m"), THOUGHT),
    "thinking": (thought("thinking", "H", "m"), THOUGHT),
    "reasoning as a list": (thought("reasoning", [HM]), THOUGHT),
}


@pytest.mark.parametrize("name", CHAT)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_chat(name: str, end: str) -> None:
    events, right = CHAT[name]
    assert said(agrees("chat", sse(*events, end=end))) == right


# The others ---------------------------------------------------------------------------------------------------------


def block(index: int | None, start: Json, *deltas: Json) -> list[Json]:
    at: Json = {} if index is None else {"index": index}
    begun, ended = {"type": "content_block_start", "content_block": start}, {"type": "content_block_stop"}
    return [it | at for it in (begun, *({"type": "content_block_delta", "delta": it} for it in deltas), ended)]


def message(*blocks: list[Json]) -> list[Json]:
    empty: Json = {"id": "m1", "model": "m", "content": [], "usage": {"input_tokens": 1}}
    end = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
    return [{"type": "message_start", "message": empty}, *chain(*blocks), end, {"type": "message_stop"}]


def tool(name: str, **more: Any) -> Json:
    return {"type": "tool_use", "id": name, "name": name} | more


def json_delta(text: Any) -> Json:
    return {"type": "input_json_delta", "partial_json": text}


MESSAGES: dict[str, tuple[list[Any], list[str]]] = {
    "begun again": ([*message(), {"type": "message_start", "message": {"content": 0}}], []),
    "pieces": (message(block(0, tool("f", input={}), json_delta('{"x"'), json_delta(":1}"))), [F]),
    "whole in the start": (message(block(0, tool("f", input={"x": 1}))), [F]),
    "both": (message(block(0, tool("f", input={"x": 0}), json_delta('{"x":1}'))), [F]),
    "whole again": (message(block(0, tool("f"), json_delta('{"x":1}'), json_delta('{"x":1}'))), [F]),
    "an object": (message(block(0, tool("f"), json_delta({"x": 1}))), [F]),
    "one index": (message(block(0, tool("f", input={"x": 1})), block(0, tool("g", input={"y": 2}))), [F, G]),
    "no index": (
        message(block(None, tool("f"), json_delta('{"x":1}')), block(None, tool("g"), json_delta('{"y":2}'))),
        [F, G],
    ),
    "no start": (
        message([{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}]),
        ["text:Hi"],
    ),
    "compaction": (
        message(block(0, {"type": "compaction", "content": None}, {"type": "compaction_delta", "content": "All."})),
        ["unknown:{'type': 'compaction', 'content': 'All.'}"],
    ),
    "unknown": (
        message(block(0, {"type": "new"}, {"type": "new_delta", "said": "a"}, {"type": "new_delta", "said": "b"})),
        ["unknown:{'type': 'new', 'said': 'ab'}"],
    ),
}


def response(*events: Json, output: Sequence[Json] = ()) -> list[Json]:
    empty: Json = {"id": "r", "model": "m", "status": "in_progress", "output": []}
    ended: Json = {"id": "r", "status": "completed", "output": list(output)}
    created, completed = {"type": "response.created", "response": empty}, {"type": "response.completed"}
    return [created, *events, completed | {"response": ended}]


def at(id: str | None, index: int | None, name: str) -> Json:
    return {key: it for key, it in ((name, id), ("output_index", index)) if it is not None}


def item(end: str, id: str | None, name: str, arguments: str = "", index: int | None = 0) -> Json:
    made = {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": arguments}
    return {"type": f"response.output_item.{end}", "item": made | at(id, None, "id")} | at(None, index, "")


def delta(text: str, id: str | None = None, index: int | None = None) -> Json:
    return {"type": "response.function_call_arguments.delta", "delta": text} | at(id, index, "item_id")


def done(text: str, id: str | None = None, index: int | None = None, **more: Any) -> Json:
    return {"type": "response.function_call_arguments.done", "arguments": text} | at(id, index, "item_id") | more


def said_in(kind: str, **said: Any) -> Json:
    return {"type": f"response.{kind}", "item_id": "i"} | said


ITEM_ADDED, ITEM_DONE = "response.output_item.added", "response.output_item.done"
BEGUN, ENDED = item("added", "i", "f"), item("done", "i", "f", '{"x":1}')
NOWHERE = [item("added", id, name, index=None) for id, name in (("i", "f"), ("j", "g"), (None, "f"))]
UNNAMED = item("done", None, "f", index=None)
PART, EMPTY = {"type": "output_text", "text": "Hi"}, {"type": "output_text", "text": ""}
HALVES = [said_in("output_text.delta", delta=it) for it in "Hi"]
RESPONSES: dict[str, tuple[list[Any], list[str]]] = {
    "as OpenAI does": (
        response(BEGUN, delta('{"x"', "i", 0), delta(":1}", "i", 0), done('{"x":1}', "i", 0), ENDED),
        [F],
    ),
    "done alone": (response(ENDED, item("done", "j", "g", '{"y":2}', 1)), [F, G]),
    "arguments done, no deltas": (response(BEGUN, done('{"x":1}', "i", 0)), [F]),
    "done replaces deltas": (response(BEGUN, delta('{"x":9', "i", 0), done('{"x":1}', "i", 0)), [F]),
    "no output_index": (response(*NOWHERE[:2], delta('{"x":1}', "i"), delta('{"y":2}', "j")), [F, G]),
    "neither index nor ids": (response(NOWHERE[2], delta('{"x":1}'), UNNAMED), [F]),
    "index 0 for all": (
        response(BEGUN, delta('{"x":1}', "i", 0), item("added", "j", "g"), delta('{"y":2}', "j", 0)),
        [F, G],
    ),
    "empty when done": (response(BEGUN, delta('{"x":1}', "i", 0), item("done", "i", "f")), [F]),
    "never begun": (response(done('{"x":1}', "i", 0, name="f")), [F]),
    "done without an item": (response({"type": ITEM_DONE}, delta('{"x":1}'), done('{"x":1}', name="f")), [F]),
    "begun without a type": (
        response({"type": ITEM_ADDED, "item": {"id": "i", "name": "f"}}, delta('{"x":1}', "i")),
        [F],
    ),
    "text done alone": (response(said_in("output_text.done", text="Hi")), ["text:Hi"]),
    "a part done alone": (response(said_in("content_part.done", part=PART)), ["text:Hi"]),
    "text twice": (
        response(said_in("content_part.added", part=EMPTY), *HALVES, said_in("output_text.done", text="Hi")),
        ["text:Hi"],
    ),
    "the end has all": (response(output=[ENDED["item"]]), [F]),
}


def gemini(*parts: Any, finish: str = "STOP") -> list[Any]:
    said: list[Any] = [{"candidates": [{"content": {"parts": it if isinstance(it, list) else [it]}}]} for it in parts]
    return [*said, {"candidates": [{"finishReason": finish}], "responseId": "r", "modelVersion": "m"}]


def partial(path: str, more: bool = False, **value: Any) -> Json:
    return {"jsonPath": path} | value | ({"willContinue": True} if more else {})


def function(more: bool = True, **call: Any) -> Json:
    return {"functionCall": call | ({"willContinue": True} if more else {})}


DELHI = [partial("$.a", True, stringValue="Delhi"), partial("$.b.c[0]", numberValue=1)]
REST = [partial("$.b['d e']", boolValue=False), partial("$.n", nullValue="NULL_VALUE")]
CALL_F, CALL_G = (function(False, name=name, args=args) for name, args in (("f", {"x": 1}), ("g", {"y": 2})))
ONE_PART = {"content": {"parts": CALL_F}, "finishReason": "STOP"}
SNAKE = {"function_call": {"name": "f", "partial_args": [{"json_path": "$.x", "number_value": 1}]}}
GEMINI: dict[str, tuple[list[Any], list[str]]] = {
    "several": (gemini([CALL_F, CALL_G]), [F, G]),
    "in pieces": (
        gemini(
            function(name="f"),
            function(partialArgs=[partial("$.a", True, stringValue="New ")]),
            function(partialArgs=DELHI),
            function(partialArgs=[partial("$.a", stringValue=""), *REST]),
            function(False),
            CALL_G,
        ),
        ['f({"a":"New Delhi","b":{"c":[1],"d e":false},"n":null})', G],
    ),
    "value": (gemini(function(False, name="f", partialArgs=[partial("$.x", value=1)])), [F]),
    "two in a row": (gemini(function(name="f", partialArgs=[partial("$.x", numberValue=1)]), CALL_G), [F, G]),
    "snake_case": (gemini(SNAKE), [F]),
    "one part is no list": ([{"candidates": [ONE_PART]}], [F]),
}


def converse(*blocks: list[bytes]) -> bytes:
    begun, ended = frame("messageStart", {"role": "assistant"}), frame("messageStop", {"stopReason": "tool_use"})
    return b"".join([begun, *chain(*blocks), ended])


def used(index: int, name: str, *pieces: Any, **more: Any) -> list[bytes]:
    start: Json = {"contentBlockIndex": index, "start": {"toolUse": {"toolUseId": name, "name": name} | more}}
    deltas = [{"contentBlockIndex": index, "delta": {"toolUse": {"input": it}}} for it in pieces]
    return [frame("contentBlockStart", start), *(frame("contentBlockDelta", it) for it in deltas)]


CONVERSE: dict[str, tuple[bytes, list[str]]] = {
    "pieces": (converse(used(0, "f", '{"x"', ":1}"), used(1, "g", '{"y":2}')), [F, G]),
    "whole in the start": (converse(used(0, "f", input={"x": 1})), [F]),
    "one index": (converse(used(0, "f", '{"x":1}'), used(0, "g", '{"y":2}')), [F, G]),
    "no start": (converse(used(0, "f", '{"x":1}')[1:]), ['None({"x":1})']),
}
OTHERS: list[tuple[str, str, bytes, list[str]]] = [
    *[("messages", name, sse(*events, named=True), right) for name, (events, right) in MESSAGES.items()],
    *[("responses", name, sse(*events, named=True), right) for name, (events, right) in RESPONSES.items()],
    *[("gemini", name, sse(*events, end="\r\n"), right) for name, (events, right) in GEMINI.items()],
    *[("converse", name, body, right) for name, (body, right) in CONVERSE.items()],
]


@pytest.mark.parametrize(("dialect", "name", "body", "right"), OTHERS, ids=[f"{it[0]}: {it[1]}" for it in OTHERS])
def test_others(dialect: str, name: str, body: bytes, right: list[str]) -> None:
    assert said(agrees(dialect, body)) == right


@given(data=st.data())
def test_calls_are_read_however_they_are_cut(data: st.DataObject) -> None:
    """By any server that keeps to one way: an index each, one for all, or none; the name once, or every time."""
    values = st.dictionaries(
        st.text(max_size=3), st.recursive(st.integers(-(2**53), 2**53) | st.text(max_size=5), st.lists), max_size=3
    )
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "get_time", "ff"]), values), min_size=1, max_size=4))
    indexed = data.draw(st.sampled_from(["each", "zero", "none"]))
    named, again, whole = (data.draw(st.booleans()) for _ in range(3))
    deltas: list[Any] = []
    for at, (name, value) in enumerate(calls):
        text = json.dumps(value)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        index = {"each": at, "zero": 0, "none": None}[indexed]
        deltas.append(piece(index, f"c{at}", name, {} if whole else parts[0]))
        more = [value] if whole else [*parts[1:], *([text] if again else [])]
        deltas += [piece(index, None, name if named else None, part) for part in more]
    turn = agrees("chat", sse(*called(*deltas)))
    found = [(part.id, part.name, json.loads(part.arguments or "")) for part in turn.choices[0].message.parts]
    assert found == [(f"c{at}", name, value) for at, (name, value) in enumerate(calls)]


# A summary and a Turn -----------------------------------------------------------------------------------------------

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", 0, 1, "x", "[]", {}, {"message": "No."}, [], [{}], {"x": 1}, True]
)
TEXT = st.sampled_from([None, "", "f", "g", '{"x"', ":1}", '{"x":1}', "{}", "data: [DONE]", "\n\ndata: {}\n\n"]) | ODD
INDEX = st.sampled_from([None, 0, 0, 0, 1, 2, -1, "0"])
ID = st.sampled_from([None, None, "", "a", "b", "i", "j"])
FINISH = st.sampled_from([None, None, None, "stop", "tool_calls", "error", "", 5])
USAGE = st.sampled_from([None, None, {}, {"prompt_tokens": 1, "input_tokens": 2}, {"completion_tokens": 3}])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


PIECES = st.lists(
    some(index=INDEX, id=ID, function=some(name=TEXT, arguments=TEXT) | ODD, custom=some(name=TEXT, input=TEXT)),
    max_size=3,
)
SAID = (
    some(content=TEXT, tool_calls=PIECES | ODD, function_call=some(name=TEXT, arguments=TEXT) | ODD, reasoning=TEXT)
    | ODD
)
CHOICES = st.lists(
    some(index=INDEX, delta=SAID, message=SAID, finish_reason=FINISH, error=ODD, text=TEXT) | ODD, max_size=2
)
CHUNKS = some(
    id=ID,
    model=ID,
    choices=CHOICES | ODD,
    usage=USAGE,
    error=ODD,
    type=st.sampled_from(["error", "x"]),
    object=st.just("error"),
)
BLOCKS = some(type=st.sampled_from(["tool_use", "text", "new", None]), id=ID, name=TEXT, input=ODD, text=TEXT)
DELTAS = some(
    type=st.sampled_from(["text_delta", "input_json_delta", "new"]), text=TEXT, partial_json=TEXT, stop_reason=FINISH
)
KINDS = "message_start content_block_start content_block_delta message_delta message_stop error"
MESSAGE_EVENTS = some(
    type=st.sampled_from(KINDS.split()),
    message=some(id=ID, model=ID, content=st.lists(BLOCKS, max_size=1) | ODD, usage=USAGE, stop_reason=FINISH) | ODD,
    index=INDEX,
    content_block=BLOCKS | ODD,
    delta=DELTAS | ODD,
    usage=USAGE,
    error=ODD,
)
ITEMS = some(
    type=st.sampled_from(["function_call", "message", "reasoning", 1]), id=ID, call_id=ID, name=TEXT, arguments=TEXT
)
STATUS = st.sampled_from([None, "in_progress", "completed", "failed", "incomplete", 1])
RESPONSE_KINDS = """response.created response.completed response.failed response.output_item.added error ping
    response.output_item.done response.function_call_arguments.delta response.function_call_arguments.done
    response.output_text.delta response.content_part.done response.reasoning_summary_text.done"""
RESPONSE_EVENTS = some(
    type=st.sampled_from(RESPONSE_KINDS.split()),
    response=some(id=ID, model=ID, status=STATUS, output=st.lists(ITEMS, max_size=2) | ODD, usage=USAGE, error=ODD)
    | ODD,
    output_index=INDEX,
    item_id=ID,
    item=ITEMS | ODD,
    delta=TEXT,
    arguments=TEXT,
    name=TEXT,
    part=ODD,
    error=ODD,
)
PARTIAL = some(
    jsonPath=st.sampled_from(["$.a", "$.a[0].b", "$", 1]), stringValue=TEXT, numberValue=ODD, willContinue=ODD
)
CALLS = some(name=TEXT, id=ID, args=ODD, partialArgs=st.lists(PARTIAL, max_size=2) | ODD, willContinue=ODD) | ODD
PARTS = some(text=TEXT, functionCall=CALLS, thought=ODD)
CANDIDATES = some(index=INDEX, finishReason=FINISH, content=some(parts=st.lists(PARTS | ODD, max_size=2) | PARTS) | ODD)
ANSWERS = some(
    candidates=st.lists(CANDIDATES | ODD, max_size=2) | ODD,
    responseId=ID,
    modelVersion=ID,
    error=ODD,
    usageMetadata=some(promptTokenCount=INDEX),
    promptFeedback=some(blockReason=ID) | ODD,
)
STEP_KINDS = "function_call model_output thought user_input google_search_call function_result new"
CONTENTS = st.lists(some(type=st.sampled_from(["text", "image", "new"]), text=TEXT, data=TEXT) | ODD, max_size=2) | ODD
STEPS = some(
    type=st.sampled_from([*STEP_KINDS.split(), None, 1]), id=ID, name=TEXT, arguments=TEXT, content=CONTENTS,
    summary=CONTENTS, signature=TEXT, result=TEXT, pieces=ODD,
)  # fmt: skip
STEP_DELTAS = some(
    type=st.sampled_from(["text", "arguments_delta", "thought_summary", "text_annotation_delta", "image", "new", None]),
    text=TEXT, arguments=TEXT, content=CONTENTS, annotations=ODD, result=TEXT, data=TEXT,
)  # fmt: skip
TOTALS = st.sampled_from([None, {}, {"total_input_tokens": 1}, {"total_output_tokens": 2, "total_thought_tokens": 3}])
STATES = st.sampled_from([None, "", "queued", "in_progress", "completed", "requires_action", "failed", "cancelled", 1])
INTERACTION = some(
    id=ID, model=ID, agent=ID, status=STATES, steps=st.lists(STEPS | ODD, max_size=2) | ODD, usage=TOTALS, error=ODD,
    outputs=CONTENTS, service_tier=ID,
)  # fmt: skip
INTERACTION_KINDS = "interaction.created interaction.completed interaction.status_update step.start step.delta error x"
INTERACTION_EVENTS = some(
    event_type=st.sampled_from([*INTERACTION_KINDS.split(), None, 1]),
    index=INDEX,
    step=STEPS | ODD,
    delta=STEP_DELTAS | ODD,
    metadata=some(total_usage=TOTALS) | ODD,
    interaction=INTERACTION | ODD,
    interaction_id=ID,
    status=STATES,
    usage=TOTALS,
    error=ODD,
)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "chat": CHUNKS, "completions": CHUNKS, "messages": MESSAGE_EVENTS, "responses": RESPONSE_EVENTS, "gemini": ANSWERS,
    "codeassist": some(response=ANSWERS | ODD, error=ODD, traceId=ID), "interactions": INTERACTION_EVENTS,
}  # fmt: skip
EVENT = st.sampled_from(["", "", "", "event: error\n", "event: x\n", "id: 1\n", ": ping\n\n", "retry: 1\n"])
Form = Callable[[Any], str]
ODD_FORMS = ["data: {}\n\n", "data:{}\n\n", "data: {}\r\n\r\n", "data: {}\nid: 3\n\n", "data: {}\ndata: {}\n\n",
             "data: {}, ?\n\n", "data: {}\n", "data: [DONE]\n\n", "data\n\n", "data: {}\r\r"]  # fmt: skip
PLAIN_FORMS = ["data: {}\n\n", "data: {}\n\n", "event: x\ndata: {}\n\n"]


def forms(*templates: str) -> st.SearchStrategy[Form]:
    """Ways to write an event; `?` stands for an empty object that is too much."""
    return st.sampled_from(templates).map(
        lambda it: lambda value: it.replace("{}", json.dumps(value)).replace("?", "{}")
    )


def on_lines(value: Any) -> str:
    return "data: " + json.dumps(value, indent=1).replace("\n", "\ndata: ") + "\n\n"


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_a_summary_says_what_a_turn_says(name: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([forms(*PLAIN_FORMS), forms(*ODD_FORMS) | st.just(on_lines)]))
    events = data.draw(st.lists(st.tuples(EVENT, form, DRAWN[name]), max_size=6))
    body = "".join(kind + write(event) for kind, write, event in events)
    agrees(name, body.encode())


@pytest.mark.parametrize("odd", [None, 1, "a", []])
def test_what_is_no_part_of_a_candidate_harms_nothing(odd: Any) -> None:
    parts: list[Any] = [odd, {}, {"text": "hi"}, odd, {"text": "there"}]
    for kind in ("data: ", "event: x\ndata: "):
        said = json.dumps({"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]})
        assert [it.text for it in agrees("gemini", f"{kind}{said}\n\n".encode()).choices[0].message.parts if it.text]


@given(data=st.data())
def test_a_summary_of_frames_says_what_a_turn_says(data: st.DataObject) -> None:
    names = st.sampled_from(["messageStart", "contentBlockStart", "contentBlockDelta", "messageStop", "metadata"])
    use = some(toolUseId=ID, name=TEXT, input=TEXT)
    payload = some(
        contentBlockIndex=INDEX,
        start=some(toolUse=use) | ODD,
        delta=some(toolUse=use, text=TEXT) | ODD,
        stopReason=FINISH,
        usage=some(inputTokens=INDEX),
    )
    drawn = data.draw(st.lists(st.tuples(names, payload), max_size=6))
    starts = [it for name, it in drawn if name == "contentBlockStart"]
    # AWS begins every call, or else its client could not.
    assume(not starts or all("toolUse" not in json.dumps(it.get("delta")) for _, it in drawn if it not in starts))
    agrees("converse", b"".join(frame(name, it) for name, it in drawn))
