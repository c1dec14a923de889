"""One reading: whatever a client writes that parsers take, all who read a request see the same, and offsets hold."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.capture.json_ranges import LEAF, find
from penstock.gateway.calls.capture.request import ask
from penstock.gateway.calls.model_name import replace_model
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.items import LARGE
from penstock.gateway.dialects.json_scan import BOM, DEEPEST, MOST_LEVELS, members, readable, shallow
from penstock.gateway.dialects.loose_json import count, document, is_readable, loads, obj, peek, text
from penstock.gateway.dialects.text_spans import decoded
from penstock.gateway.masking.json_walk import walk

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


@given(bodies(), st.sampled_from(["new", 'a"b', "policy"]))
def test_only_what_must_change_changes(body: bytes, name: str) -> None:
    changed, named = replace_model(body, name), CHAT.model(body)
    if not named:
        return
    assert peek(changed).model == loads(changed)["model"] == name
    start, end = [(start, end) for key, start, end in members(body) if key == "model"][-1]
    assert changed in (body, body[:start] + json.dumps(name).encode() + body[end:])
    asked = ask(CHAT, body)
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
    assert CHAT.source(odd) == CHAT.source(odd.replace(b"\\ud83d", b"\\ufffd")) != b""


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
