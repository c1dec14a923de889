"""Streams as servers really send them: what was called and said, and that a summary says of them what a Turn says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes.event_stream import event as frame
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.dialects import by_name
from penstock.gateway.model.turn import Turn

Json = dict[str, Any]
F, G = 'f({"x":1})', 'g({"y":2})'


def sse(events: Sequence[Any], end: str = "\n", named: bool = False) -> bytes:
    """Events, each on a line; `named`: with their types."""
    names = [f"event: {it['type']}{end}" if named and isinstance(it, dict) and "type" in it else "" for it in events]
    datas = [it if isinstance(it, str) else json.dumps(it) for it in events]
    return "".join(f"{name}data: {data}{end}{end}" for name, data in zip(names, datas, strict=True)).encode()


def said(turn: Turn) -> list[str]:
    """The parts of the first choice, short."""
    parts = turn.choices[0].message.parts if turn.choices else []
    return [
        f"{it.name}({it.arguments})" if it.type == "tool_call" else f"{it.type}:{it.text or it.data}" for it in parts
    ]


def agrees(name: str, body: bytes, request: bytes = b'{"model":"m"}', stream: bool = True) -> Turn:
    """The Turn of an answer, after asserting that the summary says the same."""
    facts, turn = by_name(name).facts(request, body, stream), by_name(name).read(request, body, stream)
    parts = [part for choice in turn.choices for part in choice.message.parts]
    assert facts.tool_calls == sum(part.type == "tool_call" for part in parts)
    assert facts.choices == len(turn.choices)
    assert facts.finish == (turn.choices[0].finish if turn.choices else facts.finish)
    assert (facts.model_served, facts.response_id) == (turn.model_served, turn.response_id)
    assert facts.usage == turn.usage
    assert (facts.failed in ("stream_error", "error_body")) == (turn.error is not None)
    assert (facts.failed == "ended_early") == (
        turn.error is None and "response: the stream ended early" in turn.problems
    )
    return turn


# Chat ---------------------------------------------------------------------------------------------------------------


def chunk(delta: Any = None, finish: str | None = None, key: str = "delta", **more: Any) -> Json:
    return {"id": "c", "model": "m", "choices": [{"index": 0, key: delta or {}, "finish_reason": finish, **more}]}


def piece(index: Any = None, id: Any = None, name: Any = None, arguments: Any = None, **more: Any) -> Json:
    function = {key: it for key, it in (("name", name), ("arguments", arguments)) if it is not None}
    return {key: it for key, it in (("index", index), ("id", id)) if it is not None} | {"function": function} | more


def called(*deltas: Any, key: str = "delta") -> list[Any]:
    """A stream whose deltas have these pieces of calls, one or several each."""
    given: list[Any] = [it if isinstance(it, list) else [it] for it in deltas]
    return [chunk({"tool_calls": it}, key=key) for it in given] + [chunk(finish="tool_calls"), "[DONE]"]


CHAT: dict[str, tuple[list[Any], list[str]]] = {
    "as OpenAI does": (
        called(piece(0, "a", "f", ""), piece(0, None, None, '{"x":1}'), piece(1, "b", "g", '{"y":2}')),
        [F, G],
    ),
    "index 0 for all": (called(piece(0, "a", "f", '{"x":1}'), piece(0, "b", "g", '{"y":2}')), [F, G]),
    "index 0 for all, twice the same": (called(piece(0, "a", "f", '{"x":1}'), piece(0, "b", "f", '{"x":1}')), [F, F]),
    "index 0 for all, in turns": (
        called(
            piece(0, "a", "f", ""),
            piece(0, "b", "g", ""),
            piece(0, "a", None, '{"x":1}'),
            piece(0, "b", None, '{"y":2}'),
        ),
        [F, G],
    ),
    "index 0 for all, no ids": (called(piece(0, None, "f", '{"x":1}'), piece(0, None, "g", '{"y":2}')), [F, G]),
    "one id for all": (called(piece(0, "a", "f", '{"x":1}'), piece(1, "a", "g", '{"y":2}')), [F, G]),
    "one id and index for all": (called(piece(0, "a", "f", '{"x":1}'), piece(0, "a", "g", '{"y":2}')), [F, G]),
    "an id for every piece": (called(piece(0, "a", "f", '{"x"'), piece(0, "b", None, ":1}")), [F]),
    "an id and the name for every piece": (called(piece(0, "a", "f", '{"x"'), piece(0, "b", "f", ":1}")), [F]),
    "no index, empty ids": (called([piece(None, "", "f", '{"x":1}'), piece(None, "", "g", '{"y":2}')]), [F, G]),
    "no index, no ids, one delta, one tool": (
        called([piece(None, None, "f", '{"x":1}'), piece(None, None, "f", '{"x":1}')]),
        [F, F],
    ),
    "no index, ids": (
        called(piece(None, "a", "f", '{"x"'), piece(None, "a", None, ":1}"), piece(None, "b", "g", '{"y":2}')),
        [F, G],
    ),
    "no index, the id once": (called(piece(None, "a", "f", ""), piece(None, None, None, '{"x":1}')), [F]),
    "null index": (
        called({**piece(None, "a", "f", ""), "index": None}, {**piece(None, None, None, '{"x":1}'), "index": None}),
        [F],
    ),
    "the index only later": (called(piece(None, "a", "f", ""), piece(0, None, None, '{"x":1}')), [F]),
    "indexes from 1": (called(piece(1, "a", "f", '{"x":1}'), piece(2, "b", "g", '{"y":2}')), [F, G]),
    "pieces in turns": (
        called(
            piece(0, "a", "f", '{"x"'),
            piece(1, "b", "g", '{"y"'),
            piece(0, None, None, ":1}"),
            piece(1, None, None, ":2}"),
        ),
        [F, G],
    ),
    "the name with every piece": (
        called(piece(0, "a", "f", '{"x"'), piece(0, "a", "f", ":1"), piece(0, "a", "f", "}")),
        [F],
    ),
    "the name with every piece, no ids": (called(piece(0, None, "f", '{"x"'), piece(0, None, "f", ":1}")), [F]),
    "an empty name later": (called(piece(0, "a", "f", ""), piece(0, "", "", '{"x":1}')), [F]),
    "the name in pieces": (
        called(piece(0, "a", "get_"), piece(0, None, "weather", ""), piece(0, None, None, "{}")),
        ["get_weather({})"],
    ),
    "the name in pieces and whole": (
        called(piece(0, "a", "get_"), piece(0, None, "time"), piece(0, None, "get_time", "{}")),
        ["get_time({})"],
    ),
    "the name grows": (
        called(piece(0, "a", "get"), piece(0, "a", "get_time"), piece(0, None, None, "{}")),
        ["get_time({})"],
    ),
    "the arguments whole again": (
        called(piece(0, "a", "f", '{"x"'), piece(0, None, None, ":1}"), piece(0, None, None, '{"x":1}')),
        [F],
    ),
    "all of it again": (
        called(piece(0, "a", "f", '{"x"'), piece(0, None, None, ":1}"), piece(0, "a", "f", '{"x":1}')),
        [F],
    ),
    "the arguments grow": (called(piece(0, "a", "f", '{"x"'), piece(0, None, None, '{"x":1}')), [F]),
    "empty arguments first": (
        called(piece(0, "a", "f", "{}"), piece(0, None, None, '{"x"'), piece(0, None, None, ":1}")),
        [F],
    ),
    "empty arguments last": (called(piece(0, "a", "f", '{"x":1}'), piece(0, None, None, "{}")), [F]),
    "an object": (called(piece(0, "a", "f", {"x": 1})), [F]),
    "an empty object first": (called(piece(0, "a", "f", {}), piece(0, None, None, {"x": 1})), [F]),
    "objects in one delta": (called([piece(None, None, "f", {"x": 1}), piece(None, None, "g", {"y": 2})]), [F, G]),
    "arguments before the name": (called(piece(0, "a", None, '{"x":1}'), piece(0, None, "f")), [F]),
    "arguments before name and id": (called(piece(0, None, None, '{"x"'), piece(0, "a", "f", ":1}")), [F]),
    "objects in arguments": (
        called(piece(0, "a", "f", '{"x":'), piece(0, None, None, '{"x":1}'), piece(0, None, None, "}")),
        ['f({"x":{"x":1}})'],
    ),
    "no arguments": (called(piece(0, "a", "f"), piece(1, "b", "g")), ["f()", "g()"]),
    "message for delta": (called(piece(0, "a", "f", '{"x":1}'), key="message"), [F]),
    "a message behind deltas": (
        [chunk({"content": "a"}), chunk({"content": "b"}), chunk({"content": "ab"}, "stop", key="message")],
        ["text:ab"],
    ),
    "one call is no list": ([chunk({"tool_calls": piece(0, "a", "f", '{"x":1}')}), chunk(finish="tool_calls")], [F]),
    "no envelope": (called({"index": 0, "id": "a", "name": "f", "arguments": '{"x":1}'}), [F]),
    "parameters": (called({"index": 0, "id": "a", "function": {"name": "f", "parameters": {"x": 1}}}), [F]),
    "a custom tool": (
        called(
            {"index": 0, "id": "a", "custom": {"name": "sh", "input": "{ls"}}, {"index": 0, "custom": {"input": "{x}"}}
        ),
        ["sh({ls{x})"],
    ),
    "function_call": (
        [
            chunk({"function_call": {"name": "f", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"x":1}'}}, "function_call"),
        ],
        [F],
    ),
    "Magistral": (
        [
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}]}),
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "m."}]}]}),
            chunk({"content": [{"type": "text", "text": "He"}]}),
            chunk({"content": "llo"}, "stop"),
        ],
        ["reasoning:Hmm.", "text:Hello"],
    ),
    "reasoning_details": (
        [
            chunk({"reasoning_details": [{"type": "reasoning.text", "text": "H", "index": 0}]}),
            chunk({"reasoning_details": [{"type": "reasoning.text", "text": "m", "index": 0}]}),
            chunk({"content": "Hi"}, "stop"),
        ],
        ["reasoning:Hm", "text:Hi"],
    ),
    "reasoning_text": (
        [chunk({"reasoning_text": "H"}), chunk({"reasoning_text": "m"}), chunk({"content": "Hi"}, "stop")],
        ["reasoning:Hm", "text:Hi"],
    ),
    "thinking": (
        [chunk({"thinking": "H"}), chunk({"thinking": "m"}), chunk({"content": "Hi"}, "stop")],
        ["reasoning:Hm", "text:Hi"],
    ),
    "reasoning as a list": (
        [chunk({"reasoning": [{"type": "text", "text": "Hm"}]}), chunk({"content": "Hi"}, "stop")],
        ["reasoning:Hm", "text:Hi"],
    ),
}


@pytest.mark.parametrize("name", CHAT)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_chat(name: str, end: str) -> None:
    events, right = CHAT[name]
    assert said(agrees("chat", sse(events, end))) == right


# The others ---------------------------------------------------------------------------------------------------------


def block(index: int | None, start: Json, *deltas: Json) -> list[Any]:
    at: Json = {} if index is None else {"index": index}
    begun = {"type": "content_block_start", "content_block": start} | at
    return [
        begun,
        *({"type": "content_block_delta", "delta": it} | at for it in deltas),
        {"type": "content_block_stop"} | at,
    ]


def message(*blocks: list[Any]) -> list[Any]:
    begun: dict[str, Any] = {
        "type": "message_start",
        "message": {"id": "m1", "model": "m", "content": [], "usage": {"input_tokens": 1}},
    }
    end = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
    return [begun, *(it for events in blocks for it in events), end, {"type": "message_stop"}]


def tool(name: str, **more: Any) -> Json:
    return {"type": "tool_use", "id": name, "name": name} | more


def json_delta(text: Any) -> Json:
    return {"type": "input_json_delta", "partial_json": text}


MESSAGES: dict[str, tuple[list[Any], list[str]]] = {
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


def response(*events: Json, output: Any = None) -> list[Any]:
    begun: dict[str, Any] = {
        "type": "response.created",
        "response": {"id": "r", "model": "m", "status": "in_progress", "output": []},
    }
    return [
        begun,
        *events,
        {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": output or []}},
    ]


def item(end: str, id: str | None, name: str, arguments: str = "", index: int | None = 0) -> Json:
    made = {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": arguments}
    at: Json = {} if index is None else {"output_index": index}
    return {"type": f"response.output_item.{end}", "item": made | ({} if id is None else {"id": id})} | at


def arguments(end: str, text: str, id: str | None = None, index: int | None = None, **more: Any) -> Json:
    at = {key: it for key, it in (("item_id", id), ("output_index", index)) if it is not None}
    return (
        {"type": f"response.function_call_arguments.{end}", "delta" if end == "delta" else "arguments": text}
        | at
        | more
    )


RESPONSES: dict[str, tuple[list[Any], list[str]]] = {
    "as OpenAI does": (
        response(
            item("added", "i", "f"),
            arguments("delta", '{"x"', "i", 0),
            arguments("delta", ":1}", "i", 0),
            arguments("done", '{"x":1}', "i", 0),
            item("done", "i", "f", '{"x":1}'),
        ),
        [F],
    ),
    "done alone": (response(item("done", "i", "f", '{"x":1}'), item("done", "j", "g", '{"y":2}', 1)), [F, G]),
    "arguments done, no deltas": (response(item("added", "i", "f"), arguments("done", '{"x":1}', "i", 0)), [F]),
    "done replaces deltas": (
        response(item("added", "i", "f"), arguments("delta", '{"x":9', "i", 0), arguments("done", '{"x":1}', "i", 0)),
        [F],
    ),
    "no output_index": (
        response(
            item("added", "i", "f", index=None),
            item("added", "j", "g", index=None),
            arguments("delta", '{"x":1}', "i"),
            arguments("delta", '{"y":2}', "j"),
        ),
        [F, G],
    ),
    "neither index nor ids": (
        response(
            item("added", None, "f", index=None), arguments("delta", '{"x":1}'), item("done", None, "f", index=None)
        ),
        [F],
    ),
    "index 0 for all": (
        response(
            item("added", "i", "f"),
            arguments("delta", '{"x":1}', "i", 0),
            item("added", "j", "g"),
            arguments("delta", '{"y":2}', "j", 0),
        ),
        [F, G],
    ),
    "empty when done": (
        response(item("added", "i", "f"), arguments("delta", '{"x":1}', "i", 0), item("done", "i", "f")),
        [F],
    ),
    "never begun": (response(arguments("done", '{"x":1}', "i", 0, name="f")), [F]),
    "text done alone": (response({"type": "response.output_text.done", "item_id": "i", "text": "Hi"}), ["text:Hi"]),
    "a part done alone": (
        response({"type": "response.content_part.done", "item_id": "i", "part": {"type": "output_text", "text": "Hi"}}),
        ["text:Hi"],
    ),
    "text twice": (
        response(
            {"type": "response.content_part.added", "item_id": "i", "part": {"type": "output_text", "text": ""}},
            {"type": "response.output_text.delta", "item_id": "i", "delta": "H"},
            {"type": "response.output_text.delta", "item_id": "i", "delta": "i"},
            {"type": "response.output_text.done", "item_id": "i", "text": "Hi"},
        ),
        ["text:Hi"],
    ),
    "the end has all": (response(output=[item("done", "i", "f", '{"x":1}')["item"]]), [F]),
}


def gemini(*parts: Any, finish: str = "STOP") -> list[Any]:
    said: list[Any] = [{"candidates": [{"content": {"parts": it if isinstance(it, list) else [it]}}]} for it in parts]
    return [*said, {"candidates": [{"finishReason": finish}], "responseId": "r", "modelVersion": "m"}]


def partial(path: str, more: bool = False, **value: Any) -> Json:
    return {"jsonPath": path} | value | ({"willContinue": True} if more else {})


def function(more: bool = True, **call: Any) -> Json:
    return {"functionCall": call | ({"willContinue": True} if more else {})}


GEMINI: dict[str, tuple[list[Any], list[str]]] = {
    "several": (
        gemini([{"functionCall": {"name": "f", "args": {"x": 1}}}, {"functionCall": {"name": "g", "args": {"y": 2}}}]),
        [F, G],
    ),
    "in pieces": (
        gemini(
            function(name="f"),
            function(partialArgs=[partial("$.a", True, stringValue="New ")]),
            function(partialArgs=[partial("$.a", True, stringValue="Delhi"), partial("$.b.c[0]", numberValue=1)]),
            function(
                partialArgs=[
                    partial("$.a", stringValue=""),
                    partial("$.b['d e']", boolValue=False),
                    partial("$.n", nullValue="NULL_VALUE"),
                ]
            ),
            function(False),
            function(False, name="g", args={"y": 2}),
        ),
        ['f({"a":"New Delhi","b":{"c":[1],"d e":false},"n":null})', G],
    ),
    "value": (gemini(function(False, name="f", partialArgs=[partial("$.x", value=1)])), [F]),
    "two in a row": (
        gemini(
            function(name="f", partialArgs=[partial("$.x", numberValue=1)]), function(False, name="g", args={"y": 2})
        ),
        [F, G],
    ),
    "snake_case": (
        gemini({"function_call": {"name": "f", "partial_args": [{"json_path": "$.x", "number_value": 1}]}}),
        [F],
    ),
    "one part is no list": (
        [
            {
                "candidates": [
                    {"content": {"parts": {"functionCall": {"name": "f", "args": {"x": 1}}}}, "finishReason": "STOP"}
                ]
            }
        ],
        [F],
    ),
}


def converse(*blocks: list[tuple[str, Json]]) -> bytes:
    events = [
        ("messageStart", {"role": "assistant"}),
        *(it for block in blocks for it in block),
        ("messageStop", {"stopReason": "tool_use"}),
    ]
    return b"".join(frame(name, payload) for name, payload in events)


def used(index: int, name: str, *pieces: Any, **more: Any) -> list[tuple[str, Json]]:
    begun = (
        "contentBlockStart",
        {"contentBlockIndex": index, "start": {"toolUse": {"toolUseId": name, "name": name} | more}},
    )
    return [
        begun,
        *(("contentBlockDelta", {"contentBlockIndex": index, "delta": {"toolUse": {"input": it}}}) for it in pieces),
    ]


CONVERSE: dict[str, tuple[bytes, list[str]]] = {
    "pieces": (converse(used(0, "f", '{"x"', ":1}"), used(1, "g", '{"y":2}')), [F, G]),
    "whole in the start": (converse(used(0, "f", input={"x": 1})), [F]),
    "one index": (converse(used(0, "f", '{"x":1}'), used(0, "g", '{"y":2}')), [F, G]),
    "no start": (converse(used(0, "f", '{"x":1}')[1:]), ['None({"x":1})']),
}
OTHERS: list[tuple[str, str, bytes, list[str]]] = [
    *[("messages", name, sse(events, named=True), right) for name, (events, right) in MESSAGES.items()],
    *[("responses", name, sse(events, named=True), right) for name, (events, right) in RESPONSES.items()],
    *[("gemini", name, sse(events, "\r\n"), right) for name, (events, right) in GEMINI.items()],
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
    turn = agrees("chat", sse(called(*deltas)))
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
MESSAGE_EVENTS = some(
    type=st.sampled_from(
        ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "error"]
    ),
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
RESPONSE_EVENTS = some(
    type=st.sampled_from(
        [
            "response.created",
            "response.completed",
            "response.failed",
            "response.output_item.added",
            "error",
            "ping",
            "response.output_item.done",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_text.delta",
            "response.content_part.done",
            "response.reasoning_summary_text.done",
        ]
    ),
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
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "chat": CHUNKS, "completions": CHUNKS, "messages": MESSAGE_EVENTS, "responses": RESPONSE_EVENTS, "gemini": ANSWERS,
}  # fmt: skip
EVENT = st.sampled_from(["", "", "", "event: error\n", "event: x\n", "id: 1\n", ": ping\n\n", "retry: 1\n"])
FORM: st.SearchStrategy[Callable[[Any], str]] = st.sampled_from(
    [
        lambda it: f"data: {json.dumps(it)}\n\n",
        lambda it: f"data:{json.dumps(it)}\n\n",
        lambda it: f"data: {json.dumps(it)}\r\n\r\n",
        lambda it: f"data: {json.dumps(it)}\nid: 3\n\n",
        lambda it: "data: " + json.dumps(it, indent=1).replace("\n", "\ndata: ") + "\n\n",
        lambda it: f"data: {json.dumps(it)}\ndata: {json.dumps(it)}\n\n",
        lambda it: f"data: {json.dumps(it)}, {{}}\n\n",
        lambda it: f"data: {json.dumps(it)}\n",
        lambda it: "data: [DONE]\n\n",
        lambda it: "data\n\n",
        lambda it: f"data: {json.dumps(it)}\r\r",
    ]
)
PLAIN_FORM: st.SearchStrategy[Callable[[Any], str]] = st.sampled_from(
    ["data: {}\n\n", "data: {}\n\n", "event: x\ndata: {}\n\n"]
).map(lambda form: lambda it: form.replace("{}", json.dumps(it)))


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_a_summary_says_what_a_turn_says(name: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([PLAIN_FORM, FORM]))
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
