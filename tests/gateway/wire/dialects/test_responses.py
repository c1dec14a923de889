"""Responses: real wire bodies (checked against the official SDK's models), plain, streamed and cut short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.wire_bodies import Json, agreed, body, cut, same, sse
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn
from penstock.gateway.wire.dialects import by_name

RESPONSES = by_name("responses")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

REASONING: Json = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Think."}]}
TEXT: Json = {"type": "output_text", "text": "Calling.", "annotations": []}
SAID: Json = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
LOOK = {"call_id": "call_1", "name": "look", "arguments": '{"at": "sky"}'}
CALL: Json = {"type": "function_call", "id": "fc_1", "status": "completed", **LOOK}
CUSTOM: Json = {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_2", "name": "shell", "input": "ls -l"}
ACTION = {"type": "search", "query": "x"}
SEARCH: Json = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": ACTION}
CONTENT = [
    {"type": "input_text", "text": "Look."},
    {"type": "input_image", "image_url": "http://h/i.png"},
    {"type": "input_file", "file_id": "f"},
]
REQUEST: Json = {
    "model": "gpt-x",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": CONTENT},
        {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "xx"},
        SAID,
        CALL,
        {"type": "local_shell_call", "id": "ls_1", "call_id": "call_3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "a.txt"}]},
        {"type": "function_call_output", "call_id": "call_4", "output": [{"type": "input_image", "image_url": "u"}]},
        {"type": "item_reference", "id": "x"},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "shell", "description": "Runs."},
        {"type": "web_search"},
    ],
    **{"reasoning": {"effort": "low"}, "store": False, "stream": True},
}
USAGE: Json = {
    "input_tokens": 30,
    "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 2},
    "output_tokens": 12,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 42,
}


def answer(*output: Json, status: str = "completed", **more: Any) -> Json:
    rest: Json = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    rest |= {"error": None, "incomplete_details": None}
    head: Json = {"id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-x-1", "status": status, **rest}
    return {**head, "output": list(output), "usage": USAGE, **more}


def deltas(at: int, item: Json) -> list[Json]:
    """The pieces of an item as OpenAI sends them."""
    place = {"item_id": item["id"], "output_index": at}
    made: list[Json] = []
    for number, part in enumerate(item.get("content", [])):
        field, kind = ("text", "output_text") if "text" in part else ("refusal", "refusal")
        made += [{"type": f"response.{kind}.delta", "content_index": number, "delta": it} for it in cut(part[field])]
    for number, part in enumerate(item.get("summary", [])):
        kind = "response.reasoning_summary_text.delta"
        made += [{"type": kind, "summary_index": number, "delta": it} for it in cut(part["text"])]
    made += [{"type": "response.function_call_arguments.delta", "delta": it} for it in cut(item.get("arguments", ""))]
    made += [{"type": "response.custom_tool_call_input.delta", "delta": it} for it in cut(item.get("input", ""))]
    return [{**it, **place, **({"logprobs": []} if "output_text" in it["type"] else {})} for it in made]


def told(plain: Json) -> list[Json]:
    """A plain answer as the events of a stream."""
    started: Json = {**plain, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": "response.created", "response": started}]
    for at, item in enumerate(plain["output"]):
        empty: Json = {"content": [], "summary": [], "arguments": "", "input": ""}
        start: Json = {key: empty.get(key, value) for key, value in item.items()}
        events.append({"type": "response.output_item.added", "output_index": at, "item": start})
        events += deltas(at, item)
        events.append({"type": "response.output_item.done", "output_index": at, "item": item})
    events.append({"type": f"response.{plain['status']}", "response": plain})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def read(response: bytes, streamed: bool, request: Any = REQUEST) -> Turn:
    return RESPONSES.read(body(request), response, streamed)


WHOLE = answer(REASONING, SEARCH, SAID, CALL, CUSTOM)


def test_a_request_is_read_whole() -> None:
    turn = read(body(WHOLE), False)
    roles = [message.role for message in turn.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [part.type for part in turn.messages[1].parts] == ["text", "media", "media"]
    thought, said, call, shell = turn.messages[2].parts
    assert (thought.type, thought.text, thought.data["encrypted_content"]) == ("reasoning", None, "xx")
    assert said == Part(type="text", text="Calling.")
    assert call == Part(type="tool_call", id="call_1", name="look", arguments='{"at": "sky"}')
    assert (shell.id, shell.name, shell.arguments) == ("call_3", "local_shell", '{"type":"exec","command":["ls"]}')
    assert turn.messages[3].parts == [Part(type="tool_call_response", id="call_1", text="blue")]
    assert turn.messages[4].parts == [Part(type="tool_call_response", id="call_2", text="a.txt")]
    assert turn.messages[5].parts[0].data == [{"type": "input_image", "image_url": "u"}]
    assert turn.messages[6].parts == [Part(type="unknown", data={"type": "item_reference", "id": "x"})]
    assert [tool.name for tool in turn.tools] == ["look", "shell", "web_search"]
    assert turn.sampling == {"reasoning": {"effort": "low"}, "store": False}
    assert turn.problems == []


def test_tools_may_be_in_the_input_and_in_namespaces() -> None:
    exec_tool = {"type": "custom", "name": "exec", "description": "Runs a script."}
    spawn = {"type": "function", "name": "spawn", "description": "Starts another.", "parameters": {"type": "object"}}
    inner = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [spawn]}
    added = {"type": "additional_tools", "role": "developer", "tools": [exec_tool, inner, {"type": "web_search"}]}
    own = {"type": "function", "name": "look", "description": "Looks."}
    request = {"model": "m", "tools": [own], "input": [added, {"role": "user", "content": "Hi."}]}
    turn = read(body(WHOLE), False, request)
    assert [message.role for message in turn.messages] == ["user"]
    assert [tool.name for tool in turn.tools] == ["look", "exec", "spawn", "web_search"]
    assert turn.tools[2].parameters == {"type": "object"}
    places = RESPONSES.tool_texts(body(request))
    assert [(place.name, place.text, place.path) for place in places] == [
        ("look", "Looks.", ("tools", 0, "description")),
        ("exec", "Runs a script.", ("input", 0, "tools", 0, "description")),
        ("spawn", "Starts another.", ("input", 0, "tools", 1, "tools", 0, "description")),
    ]
    assert RESPONSES.server_tools(request) == ["web_search"]
    assert RESPONSES.server_tools({"input": "Hi.", "tools": None}) == []


def test_a_plain_answer() -> None:
    """To an input that may be a string."""
    (message,) = read(body(WHOLE), False, {"model": "m", "input": "Hi."}).messages
    assert (message.role, message.parts) == ("user", [Part(type="text", text="Hi.")])
    Response.model_validate(WHOLE)
    (only,) = read(body(WHOLE), False).choices
    assert only.finish == "completed"
    assert only.message.parts == [
        Part(type="reasoning", text="Think."),
        Part(type="unknown", data=SEARCH),
        Part(type="text", text="Calling."),
        Part(type="tool_call", id="call_1", name="look", arguments='{"at": "sky"}'),
        Part(type="tool_call", id="call_2", name="shell", arguments="ls -l"),
    ]
    facts = agreed("responses", body(REQUEST), body(WHOLE), False)
    assert (facts.model, facts.model_served, facts.response_id) == ("gpt-x", "gpt-x-1", "resp_1")
    counted = Usage(input_tokens=30, output_tokens=12, cached_tokens=16, cache_write_tokens=2, reasoning_tokens=4)
    assert facts.usage == counted.model_copy(update={"billed": {"calls": {"web_search": 1}}})
    assert (facts.tool_calls, facts.choices) == (2, 1)


REFUSED: Json = {**SAID, "content": [{"type": "refusal", "refusal": "I will not."}]}


@pytest.mark.parametrize(
    "plain",
    [
        WHOLE,
        answer(REFUSED),
        answer(SAID, status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        answer(status="failed", error={"code": "server_error", "message": "Broken."}),
    ],
)
def test_a_stream_reads_as_the_plain_answer(plain: Json) -> None:
    Response.model_validate(plain)
    for event in told(plain):
        EVENT.validate_python(event)
    wire = sse(*told(plain), named=True)
    same(read(wire, True), read(body(plain), False))
    streamed, whole = (agreed("responses", body(REQUEST), *it) for it in ((wire, True), (body(plain), False)))
    assert replace(streamed, failed=None) == replace(whole, failed=None)
    assert (streamed.failed, whole.failed) in ((None, None), ("stream_error", "error_body"))
    assert RESPONSES.reply_fingerprint(wire, True) == RESPONSES.reply_fingerprint(body(plain), False)


def test_a_last_event_without_items_is_filled_in() -> None:
    events = told(WHOLE)
    events[-1] = {**events[-1], "response": {**WHOLE, "output": []}}
    wire = sse(*events, named=True)
    assert read(wire, True).choices == read(body(WHOLE), False).choices
    assert agreed("responses", body(REQUEST), wire, True).tool_calls == 2


@pytest.mark.parametrize("item", [REASONING, SAID, CALL, CUSTOM, REFUSED])
def test_a_stream_that_ends_early_gives_what_there_is(item: Json) -> None:
    wire = sse(*told(answer(item))[:-2], named=True)
    turn = read(wire, True)
    assert turn.problems == ["response: the stream ended early"]
    assert turn.choices[0].message == read(body(answer(item)), False).choices[0].message
    facts = agreed("responses", body(REQUEST), wire, True)
    assert (facts.response_id, facts.finish) == ("resp_1", None)


@pytest.mark.parametrize(
    "failure",
    [
        {"type": "error", "code": "server_error", "message": "Broken.", "param": None, "sequence_number": 9},
        {"type": "error", "error": {"message": "Broken."}},
        {"type": "response.failed", "response": answer(status="failed", error={"code": "x", "message": "Broken."})},
    ],
)
def test_an_error_within_a_stream(failure: Json) -> None:
    turn = read(sse(*told(answer(SAID))[:-2], failure, named=True), True)
    assert (turn.error, turn.problems) == ("Broken.", [])
    assert turn.choices[0].message.parts[0].text == "Calling."


def test_an_answer_sent_back_is_known_again() -> None:
    back = [
        {"role": "assistant", "content": "Calling."},
        {"arguments": '{"at":"sky"}', "name": "look", "call_id": "call_1", "type": "function_call"},
        {**CUSTOM, "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
    ]
    asked = {"instructions": "Be brief.", "input": [{"role": "user", "content": "Look."}, *back]}
    sources = RESPONSES.message_fingerprints(body(asked))
    assert len(sources) == 4
    assert (
        sources[2]
        == RESPONSES.reply_fingerprint(body(WHOLE), False)
        == RESPONSES.reply_fingerprint(sse(*told(WHOLE)), True)
    )
    assert sources[:2] == RESPONSES.message_fingerprints(body({"instructions": "Be brief.", "input": "Look."}))


def test_what_cannot_be_read_is_a_problem() -> None:
    turn = RESPONSES.read(b'{"input":[7,{"type":"message","content":"a"}]}', b"[]", False)
    assert turn.problems == ["response: not a readable JSON object", "request: input[0] is not an object"]
    assert turn.messages[0].parts[0].text == "a"
