"""Conversations cut into raw items: the same as what is read of them, by either way of cutting."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.dialects import by_name, items
from penstock.gateway.dialects.items import skim

CHAT = by_name("chat")
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"', "]}", "{["]),
    lambda it: st.lists(it, max_size=4) | st.dictionaries(st.text(max_size=4), it, max_size=4),
    max_leaves=20,
)
SPACED = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", " :\r\n ")])

SAID: dict[str, dict[str, Any]] = json.loads(r"""{
"chat": {"n": 2, "messages": [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Look at \"it\" \\ and back."}]},
    {"role": "assistant", "content": null, "reasoning": "Hm.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"door\"}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "A door."},
    {"role": "assistant", "content": "A door."}, {"role": "user", "content": "Ünd nöw?"}]},
"messages": {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "messages": [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "door"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "A door."}]}]},
"gemini": {"systemInstruction": {"parts": [{"text": "Be brief."}]}, "contents": [
    {"role": "user", "parts": [{"text": "Look."}]},
    {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": "door"}}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"seen": "a door"}}}]}]},
"responses": {"instructions": "Be brief.", "input": [
    {"role": "user", "content": "Look."}, {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "A door."}]}}""")


def body(value: Any, **how: Any) -> bytes:
    return json.dumps({"model": "m", "tools": [{"type": "function"}], **value}, **how).encode()


def sources(name: str, request: bytes) -> list[bytes]:
    """What counts of a conversation."""
    dialect = by_name(name)
    return [said for item in dialect.items(request).raw if (said := dialect.source(bytes(item)))]


@pytest.mark.parametrize("name", SAID)
def test_items_say_what_the_messages_say(name: str) -> None:
    assert sources(name, body(SAID[name])) == by_name(name).conversation(body(SAID[name]))


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
def test_a_large_request_is_cut_like_a_small_one(
    name: str, separators: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = body(SAID[name], separators=separators, ensure_ascii=False)
    dialect = by_name(name)
    small = dialect.items(request)
    monkeypatch.setattr(items, "LARGE", 0)
    large = dialect.items(request)
    assert [json.loads(bytes(it)) for it in large.raw] == [json.loads(bytes(it)) for it in small.raw] != []
    assert small.asked is not None
    assert large.asked is not None
    assert (large.asked.model, large.asked.n) == (small.asked.model, small.asked.n)
    assert json.loads(bytes(large.asked.tools)) == json.loads(bytes(small.asked.tools))


def some(needed: dict[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with these fields, and some of those."""
    return st.fixed_dictionaries(needed, optional=optional)


TYPES = st.sampled_from(["text", "refusal", "image_url", 1])
BLOCK = some({"type": TYPES}, text=JSON, refusal=JSON, cache_control=JSON)
FUNCTION, CUSTOM = some({"name": JSON}, arguments=JSON), some({"name": JSON}, input=JSON)
CALLED = some({"id": JSON}, function=JSON | FUNCTION, custom=JSON | CUSTOM)
ANY_MESSAGE = some(
    {},
    role=st.sampled_from(["system", "user", "assistant", "tool", "function", None, 7]),
    content=JSON | st.lists(BLOCK),
    tool_calls=JSON | st.lists(CALLED),
    function_call=JSON | st.just({"name": "look", "arguments": '{"b": 1, "a": 2}'}),
    tool_call_id=JSON,
    reasoning=JSON,
)


@given(ANY_MESSAGE)
def test_a_message_of_chat_is_known_without_making_one(message: dict[str, Any]) -> None:
    assert sources("chat", body({"messages": [message]})) == CHAT.conversation(body({"messages": [message]}))


def test_markers_and_formatting_do_not_count() -> None:
    marked = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    one = {"system": "Be brief.", "messages": [{"role": "user", "content": [marked]}]}
    other = {"system": SAID["messages"]["system"], "messages": [{"content": "Look.", "role": "user"}]}
    assert sources("messages", body(one)) == sources("messages", body(other, indent=1))


def test_one_text_and_one_content_are_lists_of_it() -> None:
    plain = sources("responses", body({"input": "Look.", "instructions": None}))
    for asked in ("Look.", [{"role": "user", "content": "Look."}]):
        assert sources("responses", body({"input": asked})) == plain
    one = {"role": "user", "parts": [{"text": "Look."}]}
    assert sources("gemini", body({"contents": one})) == sources("gemini", body({"contents": [one]})) != []


def test_a_response_that_is_gone_on_from_is_named_by_the_id_in_its_first_event() -> None:
    dialect = by_name("responses")
    for said, previous in (("resp_1", "resp_1"), (7, None), (None, None)):
        assert dialect.items(body({"input": "x", "previous_response_id": said})).previous == previous
    assert dialect.items(body({"input": "x"})).previous is None
    begun = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    assert dialect.response_id(begun + b"data: {...", True) == "resp_1"
    assert dialect.response_id(b'{"id":"resp_2","output":[]}', False) == "resp_2"
    assert dialect.response_id(b"data: [DONE]\n\n", True) is None


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=5), SPACED, st.booleans(), st.text(" \n", max_size=3))
def test_skimming_finds_what_parsing_finds(value: Any, spaced: tuple[str, str], ascii_: bool, around: str) -> None:
    wanted = frozenset(list(value)[::2])
    text = around + json.dumps(value, separators=spaced, ensure_ascii=ascii_) + around
    found = skim(text.encode(), wanted)
    told = {name: [json.loads(bytes(it)) for it in at] if isinstance(at, list) else json.loads(bytes(at))
            for name, at in found.items()}  # fmt: skip
    assert told == {name: value[name] for name in wanted}


@given(st.text(max_size=30).map(str.encode) | st.sampled_from([b'{"messages":[', b'{"a":"\\"}', b'{"a":[1 2]}', b"[]"]))
def test_what_is_no_object_is_refused_or_skimmed_in_vain(text: bytes) -> None:
    with suppress(ValueError):
        skim(text, frozenset(["messages"]))


@pytest.mark.parametrize("text", ["x" * 300_000, 'say "hi" ' * 50_000, "\\" * 200_001, "ü" * 90_000])
def test_long_strings_are_skimmed_in_steps(text: str) -> None:
    value = {"messages": [{"role": "user", "content": text}, {"role": "user", "content": [{"text": text}]}], "n": 1}
    found = skim(json.dumps(value).encode(), frozenset(["messages", "n"]))
    messages = found["messages"]
    assert isinstance(messages, list)
    assert [json.loads(bytes(it)) for it in messages] == value["messages"]
    assert bytes(found["n"]) == b"1" if not isinstance(found["n"], list) else False
