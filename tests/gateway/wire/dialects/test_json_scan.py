"""One reading: whatever a client writes that parsers take, all who read a request see the same, and offsets hold."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.wire.capture import add_capture_fields
from penstock.gateway.wire.dialects import by_name, json_scan, request_body
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, find, locate, members, walk
from penstock.gateway.wire.dialects.loose_json import (
    BOM,
    DEEPEST,
    MOST_LEVELS,
    count,
    document,
    is_readable,
    loads,
    obj,
    peek,
    readable,
    shallow,
    text,
)  # fmt: skip
from penstock.gateway.wire.dialects.request_body import LARGE, decoded, replace_model, skim

CHAT = by_name("chat")
NAMES = ["model", "n", "max_tokens", "stream", "messages", "tools", "x", "m\u00f6del", "\ud83d"]
WORDS = ["policy-7b", "other", "NaN", "Infinity", '"model":"a"', "}{", ""]
HALVES = ["\\", "\\ud83d", "\ud83d", "\ude00\ud83d", "\U0001f600", "é"]
TEXTS = st.sampled_from(WORDS + HALVES) | st.text(max_size=6)
NUMBERS = [float("nan"), float("inf"), -float("inf"), 10**30, 10**500, -(10**400), 1.5, 7]
SCALARS = st.none() | st.booleans() | TEXTS | st.sampled_from(NUMBERS) | st.integers(-(2**70), 2**70)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda it: st.lists(it, max_size=3) | st.lists(st.tuples(st.sampled_from(NAMES), it), max_size=3).map(tuple),
    max_leaves=8,
)


def written(value: Any, ascii_only: bool, space: str) -> str:
    """As JSON; a tuple of pairs is an object, in which a name may stand twice."""
    if isinstance(value, tuple):
        said = cast("tuple[tuple[str, Any], ...]", value)
        pairs = [f"{written(key, ascii_only, '')}{space}:{space}{written(it, ascii_only, space)}" for key, it in said]
        return "{" + f"{space},{space}".join(pairs) + space + "}"
    if isinstance(value, list):
        return "[" + f",{space}".join(written(it, ascii_only, space) for it in cast("list[Any]", value)) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def nested(levels: int, kind: str) -> str:
    return ("[" if kind == "[" else '{"a":') * levels + "1" + ("]" if kind == "[" else "}") * levels


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Requests as clients write them that are not strict."""
    pairs = draw(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=6))
    pairs.append(("model", draw(TEXTS)))
    said = (*draw(st.permutations(pairs)), *([("model", draw(TEXTS))] if draw(st.booleans()) else []))
    body_text = written(said, draw(st.booleans()), draw(st.sampled_from(["", " ", "\r\n\t"])))
    if draw(st.booleans()):
        # A name may be written with escapes, too.
        body_text = body_text.replace('"model"', '"mod\\u0065l"', 1)
    if (levels := draw(st.sampled_from([0, 0, 0, 150, 1100, 10_000]))) > 0:
        deep, more = nested(levels, draw(st.sampled_from("[{"))), "," if len(body_text) > 2 else ""
        body_text = f'{{"deep":{deep}{more}{body_text[1:]}'
    body = body_text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        body = body.replace(b'"x"', b'"x\xff"')
    return draw(st.sampled_from([b"", BOM])) + body


def plain(value: Any) -> Any:
    """A value as readers without halves of characters and numbers without bounds see it."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def oracle(body: bytes) -> dict[str, Any] | None:
    """What Python's own reader takes of the top level, the last member of a name; None where it refuses the text."""
    try:
        found = json.loads(body.removeprefix(BOM).decode("utf-8", "surrogatepass"), parse_int=float)
    except (ValueError, RecursionError):
        return None
    return {plain(name): value for name, value in found.items()}


@example(b'{"model":"policy-7b","model":"x\xff"}')
@given(bodies())
def test_all_readers_agree(body: bytes) -> None:
    asked, read, expected = peek(body), loads(body), oracle(body)
    assert is_readable(body)
    assert read == obj(read) != {}
    named = text(read["model"])
    assert (text(asked.model), CHAT.model(body)) == (named, named)
    last = {name: body[start:end] for name, start, end in members(body)}
    assert {plain(name) for name in last} == read.keys()
    tops = {one.path[0]: one for one in find(body, dict.fromkeys(last, LEAF))}
    for name in ("model", "n", "max_tokens", "stream"):
        assert tops.get(name) is None or body[tops[name].start : tops[name].end].strip() == last[name].strip()
        if name in last and last[name][:1] not in b"[{":
            assert loads(last[name]) == read[name]
        if name in ("n", "max_tokens"):
            assert count(getattr(asked, name)) == count(read.get(name))
    top = [one for one in walk(body)[0] if one.path == ("model",) and one.kind == "text"]
    assert named is None or plain(decoded(b'"%b"' % body[top[-1].start : top[-1].end])) == named or not named
    cut = CHAT.items(body).asked
    assert cut is not None
    assert text(cut.model) == named
    if expected is not None:
        assert expected.keys() == read.keys()
        assert not named or plain(expected["model"]) == named
        assert (expected.get("stream") is True) == (read.get("stream") is True)


TREE: KeyTree = {"model": LEAF, "x": {"model": LEAF, 1: {"n": LEAF}, 0: LEAF}, "messages": {0: {2: LEAF, "x": LEAF}}}


@given(bodies())
def test_a_body_too_large_for_the_fast_walk_has_the_same_places(body: bytes) -> None:
    near = locate(body, TREE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "is_bulky", bool)
        assert locate(body, TREE) == near
    assert near == {one.path: one[1:3] for one in find(body, TREE)}
    assert near[("model",)] == [(start, end) for name, start, end in members(body) if name == "model"][-1]


@given(bodies(), st.sampled_from(["new", 'a"b', "policy"]))
def test_only_what_must_change_changes(body: bytes, name: str) -> None:
    changed, named = replace_model(body, name), CHAT.model(body)
    if not named:
        return
    assert peek(changed).model == loads(changed)["model"] == name
    start, end = [(start, end) for key, start, end in members(body) if key == "model"][-1]
    assert changed in (body, body[:start] + json.dumps(name).encode() + body[end:])
    asked = add_capture_fields(CHAT, body)
    assert asked is not None
    at = body.index(b"{") + 1
    assert (asked.body[:at], asked.body[-(len(body) - at) :]) == (body[:at], body[at:])
    assert (peek(asked.body).model, loads(asked.body)["return_token_ids"]) == (peek(body).model, True)


@given(bodies())
def test_a_copy_that_can_be_read_is_as_long(body: bytes) -> None:
    made = shallow(readable(body))
    assert len(made) == len(body)
    assert readable(made) is made
    assert [it[1:] for it in members(made)] == [it[1:] for it in members(body)]


def test_what_is_nested_deep_is_left_out_and_said() -> None:
    for levels in (DEEPEST, DEEPEST + 1, 5000, MOST_LEVELS - 1):
        problems: list[str] = []
        body = f'{{"model":"m","x":{nested(levels - 1, "[")}}}'.encode()
        assert document(body, "request", problems)["model"] == "m"
        assert bool(problems) == (levels > DEEPEST)
    too_deep = f'{{"model":"m","x":{nested(MOST_LEVELS + 1, "[")}}}'.encode()
    assert (is_readable(too_deep), peek(too_deep).model, loads(too_deep)) == (False, None, None)


@pytest.mark.parametrize("size", [10, LARGE])
def test_the_items_of_a_conversation_are_as_they_were_sent(size: int) -> None:
    odd = b'{"role":"user","content":"cut \\ud83d"}'
    body = b'{"model":"m","n":NaN,"messages":[%b,{"role":"user","content":"%b"}]}' % (odd, b"x" * size)
    asked, raw, _ = CHAT.items(body)
    assert asked is not None
    assert (asked.model, bytes(raw[0])) == ("m", odd)
    assert CHAT.item_fingerprint(odd) == CHAT.item_fingerprint(odd.replace(b"\\ud83d", b"\\ufffd")) != b""


@pytest.mark.parametrize(
    "body",
    [b"", b"model=m", b'{"model":"m"', b'{"model":"m"} x', b'{"a":NaNs}', b'{"a":"\xff}', b"[1]", b"\xff\xfe{\0}\0"],
)
def test_what_is_no_json_object_is_not_read(body: bytes) -> None:
    assert not is_readable(body)
    assert peek(body).model is None


def test_a_text_that_decoders_take_is_not_copied() -> None:
    body = orjson.dumps({"model": "m", "messages": [{"content": "\U0001f600 \\ud83d NaN"}]})
    assert readable(body.replace(b"NaN", b"nan")) is body.replace(b"NaN", b"nan") or readable(body) == body


# -- conversations cut into raw items: what is read of them, by either way of cutting ----------------------------------


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
    return [said for item in dialect.items(request).raw if (said := dialect.item_fingerprint(bytes(item)))]


@pytest.mark.parametrize("name", SAID)
def test_items_say_what_the_messages_say(name: str) -> None:
    assert sources(name, body(SAID[name])) == by_name(name).message_fingerprints(body(SAID[name]))


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
def test_a_large_request_is_cut_like_a_small_one(
    name: str, separators: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = body(SAID[name], separators=separators, ensure_ascii=False)
    dialect = by_name(name)
    small = dialect.items(request)
    monkeypatch.setattr(request_body, "LARGE", 0)
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
    assert sources("chat", body({"messages": [message]})) == CHAT.message_fingerprints(body({"messages": [message]}))


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
    assert dialect.continuation_names(begun + b"data: {...", True) == ["resp_1"]
    assert dialect.continuation_names(b'{"id":"resp_2","output":[]}', False) == ["resp_2"]
    assert dialect.continuation_names(b"data: [DONE]\n\n", True) == []


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
