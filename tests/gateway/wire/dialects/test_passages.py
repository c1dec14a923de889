"""What a call adds to its conversation, in each wire format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.wire_bodies import sse
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Passage
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.chat import ChatDialect
from penstock.gateway.wire.dialects.parts import message_passages

CALL = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"to": "Rome"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "To Rome"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "booked"},
]
BLOCKS = json.loads("""[
    {"role": "user", "content": "To Rome"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "book", "input": {"to": "Rome"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "booked"}]},
        {"type": "text", "text": "and back"}]}]""")
ITEMS = [
    {"role": "user", "content": "To Rome"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "book", "arguments": '{"to": "Rome"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "booked"},
]
CONTENTS = [
    {"role": "user", "parts": [{"text": "To Rome"}]},
    {"role": "model", "parts": [{"functionCall": {"name": "book", "args": {"to": "Rome"}}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "book", "response": {"done": True}}}]},
]
TURNS = [
    {"role": "user", "content": [{"text": "To Rome"}]},
    {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c1", "name": "book", "input": {"to": "Rome"}}}]},
    {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "booked"}]}}]},
]
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": CHAT},
    "messages": {"messages": BLOCKS, "system": "Be brief."},
    "responses": {"input": ITEMS, "instructions": "Be brief."},
    "gemini": {"contents": CONTENTS, "systemInstruction": {"parts": [{"text": "Be brief."}]}},
    "converse": {"messages": TURNS, "system": [{"text": "Be brief."}]},
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
ANSWERS: dict[str, Any] = {
    "chat": {"choices": [{"message": {"role": "assistant", "content": "Done.", "tool_calls": [CALL]}}]},
    "messages": {"type": "message", "role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
    "responses": {"output": [SAID]},
    "gemini": {"candidates": [{"content": {"role": "model", "parts": [{"text": "Done."}]}}]},
    "converse": {"output": {"message": {"role": "assistant", "content": [{"text": "Done."}]}}},
}
ROME, COMPACT = 'book({"to": "Rome"})', 'book({"to":"Rome"})'
Said = list[tuple[str, str, str]]
ADDED: dict[str, Said] = {
    "chat": [("tool", "tool_call_response", "booked")],
    "messages": [("user", "tool_call_response", "booked"), ("user", "text", "and back")],
    "responses": [("tool", "tool_call_response", "booked")],
    "gemini": [("user", "tool_call_response", '{"done":true}')],
    "converse": [("user", "tool_call_response", "booked")],
}
DONE = ("assistant", "text", "Done.")
ANSWERED: dict[str, Any] = {name: [DONE] for name in ASKED} | {
    "chat": [DONE, ("assistant", "tool_call", ROME)],
    "messages": [("assistant", "reasoning", "hm")],
}


def said(name: str, asked: Any, answer: Any, whole: bool = False, stream: bool = False) -> list[Passage]:
    request, response = (it if isinstance(it, bytes) else json.dumps(it).encode() for it in (asked, answer))
    return list(by_name(name).passages(request, response, stream, lambda: whole))


def shown(passages: list[Passage], answer: bool) -> Said:
    return [(it.role, it.kind, it.text) for it in passages if it.answer == answer]


def never() -> bool:
    raise AssertionError


@pytest.mark.parametrize("name", ASKED)
def test_a_call_adds_what_follows_the_last_answer_and_its_own(name: str) -> None:
    found = said(name, ASKED[name], ANSWERS[name])
    assert shown(found, False) == ADDED[name]
    assert shown(found, True) == ANSWERED[name]


@pytest.mark.parametrize("name", ASKED)
def test_the_first_call_of_an_attempt_adds_all_that_it_begins_with(name: str) -> None:
    """Whether it is the first is not asked where nobody has answered yet."""
    asked, added = ASKED[name], [text for _, _, text in ADDED[name]]
    texts = [text for _, _, text in shown(said(name, asked, ANSWERS[name], whole=True), False)]
    assert (texts[:2], texts[-len(added) :]) == (["Be brief.", "To Rome"], added)
    assert {ROME, COMPACT} & {*texts}
    (field,) = (key for key in asked if isinstance(asked[key], list) and key != "system")
    begun = json.dumps(asked | {field: asked[field][: 2 if name == "chat" else 1]}).encode()
    assert [it.text for it in by_name(name).passages(begun, b"{}", False, never)] == ["Be brief.", "To Rome"]


def test_a_stream_says_its_text_as_it_reads() -> None:
    pieces = [{"choices": [{"index": 0, "delta": {"content": it}}]} for it in ("Do", "ne.")]
    found = said("chat", {"messages": CHAT}, sse(*pieces, "[DONE]"), stream=True)
    assert shown(found, True) == [("assistant", "text", "Done.")]


def test_errors_are_said_and_images_are_not() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look"}, image]}]}
    found = said("chat", asked, {"error": {"message": "too many requests"}})
    assert [(it.kind, it.text) for it in found] == [("text", "Look"), ("error", "too many requests")]


RESOURCE = {"type": "resource", "resource": {"uri": "file:///a", "text": "in a resource"}}


def test_prompts_embedded_texts_and_tool_servers_are_read() -> None:
    upon = said("completions", {"prompt": "Once"}, {"choices": [{"text": " upon"}]})
    assert [it.text for it in upon] == ["Once", " upon"]
    assert [it.text for it in said("embeddings", {"input": ["a", "b"]}, {"data": []})] == ["a", "b"]
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "book", "arguments": {"to": "Rome"}}}
    booked = {"type": "text", "text": "booked"}
    for result, text in (
        ({"content": [booked]}, "booked"),
        ({"structuredContent": {"seats": 2}}, '{"seats":2}'),
        ({"content": [booked, RESOURCE]}, "booked\nin a resource"),
    ):
        found = said("mcp", call, {"jsonrpc": "2.0", "id": 1, "result": result})
        assert [(it.kind, it.text) for it in found] == [("tool_call", COMPACT), ("tool_call_response", text)]


def test_what_nobody_understands_is_text_or_nothing() -> None:
    assert [it.text for it in said("opaque", b"asked", b"\xff\x00")] == ["asked"]
    assert [(it.kind, it.text) for it in said("chat", b"{no JSON", {})] == [("body", "{no JSON")]


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_what_the_model_is_to_go_on_with_hides_nothing(name: str) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked += [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "{"}]
    assert [it.text for it in said(name, {"messages": asked}, {})] == ["the question", "{"]


DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "in it"}}
IMAGE = {"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo"}}
FOUND = {"type": "search_result", "source": "x", "title": "A hit", "content": [{"type": "text", "text": "its text"}]}


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [FOUND]}
SHELL = [
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py", "stderr": "warned"}]},
]
REFUSED = {"type": "mcp_approval_response", "approve": False, "reason": "too dear"}


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


@pytest.mark.parametrize(
    ("name", "asked", "texts"),
    [
        ("messages", user(DOCUMENT, IMAGE, FOUND), ["T\nin it", "A hit\nits text"]),
        ("messages", user(RESULT), ["A hit\nits text"]),
        ("responses", {"input": SHELL}, ["a.py\nwarned"]),
        ("responses", {"input": [REFUSED]}, [json.dumps(REFUSED, separators=(",", ":"))]),
        ("converse", user({"document": {"source": {"text": "in it"}}}), ["in it"]),
        ("completions", {"prompt": [1, 2, 3]}, []),
        ("embeddings", {"input": [[1, 2], [3]]}, []),
    ],
)
def test_documents_and_outputs_are_read_and_numbers_and_images_are_not(
    name: str, asked: dict[str, Any], texts: list[str]
) -> None:
    assert [it.text for it in said(name, asked, {})] == texts


texts = st.sampled_from(["", "To Rome", "straße"])
calls = st.lists(
    st.sampled_from([CALL, {"function": {"name": "x"}}, {"custom": {"name": "c", "input": "free"}}, {}, 7]), max_size=2
)
odd = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "function", 7, None]),
        "content": st.one_of(texts, st.none(), st.just(5), st.lists(st.just({"type": "text", "text": "part"}))),
        "name": st.sampled_from([None, "book", 3]),
        "tool_calls": st.one_of(calls, st.none(), st.just("x")),
        "tool_call_id": st.sampled_from([None, "c1", 9]),
        "refusal": texts,
        "reasoning_content": texts,
        "function_call": st.just({"name": "old", "arguments": "{}"}),
    },
)


@given(st.lists(odd, max_size=4), st.lists(odd, max_size=2))
def test_chat_says_without_messages_what_it_says_with_them(asked: list[Any], answers: list[Any]) -> None:
    chat = ChatDialect()
    request, answer = {"messages": asked}, {"choices": [{"message": it} for it in answers]}
    by_messages = [it for message in chat.messages(request, []) for it in message_passages(message, False)]
    by_messages += [it for choice in chat.choices(answer) for it in message_passages(choice.message, True)]
    assert [*chat.request_passages(request), *chat.answer_passages(answer)] == by_messages
