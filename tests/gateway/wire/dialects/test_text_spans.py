"""The offsets of system texts and tool descriptions are exact, whatever the JSON looks like."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from fakes.odd_json import joined, written
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects import DIALECTS, by_name
from penstock.gateway.wire.dialects.loose_json import arr, obj, peek
from penstock.gateway.wire.dialects.request_body import TextLocation, decoded, encoded, spans, spliced

TEXTS = st.text(st.sampled_from('ab"\\\n\t /é漢😀\x00{}[],:\ud800') | st.characters(), max_size=8)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "s"])
Objects = st.SearchStrategy[Any]


def objects(needed: dict[str, Any], **optional: Any) -> Objects:
    return st.fixed_dictionaries(needed, optional=optional)


BLOCK = objects({"type": st.sampled_from(["text", "input_text", "image"])}, text=TEXTS)
CONTENT: Objects = TEXTS | st.none() | st.lists(BLOCK, max_size=3)
MESSAGES: Objects = st.lists(objects({"role": ROLES, "content": CONTENT}, name=TEXTS), max_size=4)
MANY: Objects = st.lists(objects({"role": ROLES, "content": TEXTS}), min_size=9, max_size=12)
NAMES = st.sampled_from(["find", "find_2", "été"])
TOOL = objects({"name": NAMES}, description=TEXTS, parameters=st.just({"type": "x"}))
TOOLS = st.lists(TOOL, max_size=3)
PART = objects({}, text=TEXTS, inlineData=st.just(dict[str, Any]()))
GEMINI = objects({}, parts=st.lists(PART, max_size=3) | PART, role=TEXTS)
DECLARED = st.lists(objects({"functionDeclarations": st.lists(TOOL, max_size=2)}), max_size=2)
REQUESTS: dict[str, Objects] = {
    "chat": objects(
        {"model": TEXTS, "messages": MESSAGES | MANY}, tools=st.lists(objects({"function": TOOL}) | TOOL, max_size=3)
    ),
    "responses": objects({"input": TEXTS | MESSAGES}, instructions=TEXTS, tools=TOOLS),
    "messages": objects({"messages": MESSAGES}, system=CONTENT, tools=TOOLS),
    "gemini": objects(
        {"contents": st.lists(GEMINI, max_size=3)}, systemInstruction=GEMINI, system_instruction=GEMINI, tools=DECLARED
    ),
}


def plain_texts(name: str, asked: Any) -> list[tuple[str, str]]:
    """(role, text) of the system texts of a request, read in the plainest way."""
    if name == "gemini":
        contents = [asked.get(key, {}).get("parts", []) for key in ("systemInstruction", "system_instruction")]
        parts = [obj(part) for it in contents for part in (arr(it) or [it])]
        return [("system", part["text"]) for part in parts if part.get("text")]
    found = [("system", it) for key in ("instructions", "system") for it in strings(asked.get(key))]
    for turn in arr(asked["input" if name == "responses" else "messages"]):
        if turn["role"] in ("system", "developer"):
            found += [(turn["role"], it) for it in strings(turn["content"])]
    return found


def strings(content: Any) -> list[str]:
    """The texts of a content."""
    if isinstance(content, str):
        return [content] if content else []
    blocks = cast(list[Any], content or [])
    return [it["text"] for it in blocks if it["type"] in ("text", "input_text") and it.get("text")]


def descriptions(name: str, asked: Any) -> list[tuple[str, str]]:
    """(name, description) of the tools."""
    if name == "gemini":
        asked = {"tools": [it for tool in asked.get("tools", []) for it in tool["functionDeclarations"]]}
    tools: list[Any] = [it.get("function", {}) if name == "chat" else it for it in asked.get("tools", [])]
    return [(it["name"], it["description"]) for it in tools if it.get("description")]


def holds(body: bytes, places: list[TextLocation]) -> None:
    """Each place is a literal that says its text, and a new text there is all that changes."""
    assert [place.index for place in places] == list(range(len(places)))
    for place, (start, end) in zip(places, spans(body, places), strict=True):
        assert body[start:end] == place.literal
        assert json.loads(place.literal) == place.text
    assert spliced(body, []) == body
    marks = [replace(place, literal=encoded(f"<{place.index}>")) for place in places]
    marked = spliced(body, [(place, mark.literal) for place, mark in zip(places, marks, strict=True)])
    assert json.loads(marked) == swapped(json.loads(body), places, json.loads(marked))
    assert spliced(marked, [(mark, place.literal) for mark, place in zip(marks, places, strict=True)]) == body


def swapped(old: Any, places: list[TextLocation], new: Any) -> Any:
    """The old document with every mark of the new one in the place where it stands, if it stood for the right text."""
    marks = {f"<{place.index}>": place.text for place in places}
    if isinstance(new, str) and new in marks and old == marks[new]:
        return new
    if isinstance(old, dict):
        return {key: swapped(value, places, obj(new).get(key)) for key, value in obj(old).items()}
    if isinstance(old, list):
        return [swapped(one, places, other) for one, other in zip(arr(old), arr(new), strict=True)]
    return old


@pytest.mark.parametrize("name", REQUESTS)
@given(data=st.data(), seed=st.integers(0, 9999))
def test_texts_stand_where_they_are_said_to(name: str, data: st.DataObject, seed: int) -> None:
    body = written(data.draw(REQUESTS[name]), Random(seed)).encode()
    asked, dialect = json.loads(body), by_name(name)
    (system, seen, unread), tools = dialect.system_texts(body), dialect.tool_texts(body)
    assert unread is None
    assert seen in (None, peek(body) if dialect.peeks else None)  # The body is not read again for what a head needs.
    assert seen is not None or name == "gemini" or b"\\ud" in body
    assert [(it.role, it.text) for it in system] == plain_texts(name, asked)
    assert [(it.name, it.text) for it in tools] == descriptions(name, asked)
    holds(body, system)
    holds(body, tools)


@given(TEXTS)
def test_a_text_comes_back_from_its_literal(text: str) -> None:
    assert decoded(encoded(text)) == json.loads(encoded(text)) == joined(text)


def test_a_literal_has_no_more_escapes_than_it_needs() -> None:
    assert encoded('é漢😀/\x7f "\\\n\x01') == '"é漢😀/\x7f \\"\\\\\\n\\u0001"'.encode()
    assert encoded("\ud83d!\ude00") == b'"\\ud83d!\\ude00"'


def texts(name: str, body: str) -> list[str]:
    """What a dialect's system texts say."""
    return [place.text for place in by_name(name).system_texts(body.encode()).places]


def test_the_last_of_two_keys_counts() -> None:
    twice = '{"messages":[{"role":"system","content":"a"}],"messages":[{"role":"system","content":"x","content":"b"}]}'
    [place] = by_name("chat").system_texts(twice.encode()).places
    [(start, _)] = spans(twice.encode(), [place])
    assert (place.text, start) == ("b", twice.index('"b"'))
    overruled = '{"messages":[{"role":"system","content":"a","role":"user"}]}'
    assert texts("chat", overruled) == []


def test_the_text_of_a_user_is_not_taken_for_the_system_text() -> None:
    body = json.dumps({"messages": [{"role": role, "content": "Be kind."} for role in ("user", "system", "user")]})
    [place] = by_name("chat").system_texts(body.encode()).places
    assert json.loads(spliced(body.encode(), [(place, b'"!"')]))["messages"][1] == {"role": "system", "content": "!"}
    assert spans(body.encode(), [place])[0][0] == body.index('"Be kind."', body.index('"system"'))


def test_a_prompt_of_several_blocks_or_messages_has_several_places() -> None:
    """Newer models take system messages in mid conversation."""
    marked = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}]
    body = json.dumps({"system": [{"type": "text", "text": "one"}, marked], "messages": turns})
    assert texts("messages", body) == texts("count_tokens", body) == ["one", "two", "Be brief."]


@pytest.mark.parametrize("name", ["messages", "chat", "responses"])
def test_a_block_whose_type_is_no_text_has_no_place(name: str) -> None:
    types: list[Any] = [{"text": 1}, ["text"], "text"]
    blocks = [{"type": kind, "text": text} for kind, text in zip(types, "abc", strict=True)]
    field = "input" if name == "responses" else "messages"
    body = {"model": "m", "system": blocks, field: [{"role": "system", "content": blocks}]}
    places = by_name(name).system_texts(json.dumps(body).encode()).places
    assert {place.text for place in places} == {"c"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"messages":[{"role":"system","content":"a"}',
        b'{"messages":[{"role":"system","content":"a"}]} x',
        b'{"messages":{"role":"system","content":"a"}}',
        b'{"messages":[7,{"role":"system","content":"a"}]}',
        b'{"messages":[{"role":"system","content":"a\n"}]}',
        b'{"messages":[{"role":"system","content":"\xff"}]}',
        b'{"messages":[{"role":"system","content":"a"}],"x":' + b"[" * 99_999 + b"]" * 99_999 + b"}",
        b'{"messages":[{"role":"user","content":"a"},{"role":"system","content":7}],"instructions":9,"system":{}}',
        b'{"messages":[],"instructions":"","system":"","input":[],"tools":[{"name":3,"description":"x"}]}',
    ],
)
def test_what_cannot_be_read_has_no_places(body: bytes) -> None:
    for dialect in DIALECTS:
        assert dialect.system_texts(body).places == []
        assert dialect.tool_texts(body) == []


def test_half_a_surrogate_pair_somewhere_does_not_hide_the_text() -> None:
    body = rb'{"messages":[{"role":"user","content":"\ud83d"},{"role":"system","content":"a\\ud800\udc00"}]}'
    [place] = by_name("chat").system_texts(body).places
    assert place.text == "a\\ud800\udc00"
    assert spliced(body, [(place, place.literal)]) == body


def test_only_tools_with_a_description_have_texts() -> None:
    function = {"name": "f", "description": "F.", "parameters": {"description": "no"}}
    tools: list[Any] = [{"type": "function", "function": function}, {"type": "function", "function": {}}]
    tools.insert(1, {"type": "custom", "custom": {"name": "c", "description": "C."}})
    found = by_name("chat").tool_texts(json.dumps({"tools": tools}).encode())
    assert [(it.role, it.name, it.text) for it in found] == [("tool", "f", "F."), ("tool", "c", "C.")]
    flat = [{"type": "function", "name": "f", "description": "F."}, {"type": "web_search"}]
    assert [it.name for it in by_name("responses").tool_texts(json.dumps({"tools": flat}).encode())] == ["f"]


@pytest.mark.parametrize("name", ["completions", "embeddings", "models", "opaque"])
def test_other_dialects_have_none(name: str) -> None:
    body = b'{"messages":[{"role":"system","content":"a"}],"tools":[{"function":{"name":"f","description":"d"}}]}'
    assert by_name(name).system_texts(body).places == by_name(name).tool_texts(body) == []
