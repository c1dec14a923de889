"""However a text is written and cut apart, what a rule looks for is not in what is kept, and all else is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from fakes import event_stream
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.dialects.event_stream import frames
from penstock.gateway.dialects.sse import events
from penstock.gateway.masking.masker import Compiled, Masker, Tally
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.known_secrets import About

NEEDLE = "4111 1111-1111 1111"
RULES = [MaskingRule(name="cards", pattern=r"\b\d{4}[ -]\d{4}[ -]\d{4}[ -]\d{4}\b")]
BEFORE, AFTER = 'my "card"\n is ', ", café \\ 😀 /thanks"
SAID = BEFORE + NEEDLE + AFTER
MASKED = BEFORE + "*" * len(NEEDLE) + AFTER
Text = Callable[[str], str]


def masker() -> Masker:
    return Masker((), Compiled(RULES), Tally())


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """What is said, cut anywhere."""
    cuts = sorted(draw(st.sets(st.integers(1, len(SAID) - 1), max_size=8)))
    return [SAID[a:b] for a, b in zip([0, *cuts], [*cuts, len(SAID)], strict=True)]


@st.composite
def literals(draw: st.DrawFn) -> Callable[[str], str]:
    """How a writer of JSON writes a string: any of its characters may be escaped."""
    choices = draw(st.lists(st.integers(0, 3), min_size=7, max_size=7))

    def write(text: str) -> str:
        out = [_character(one, choices[(at + ord(one)) % 7]) for at, one in enumerate(text)]
        return '"' + "".join(out) + '"'

    return write


def _character(one: str, how: int) -> str:
    units = one.encode("utf-16-be")
    if how == 0:
        return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
    if how == 1:
        return json.dumps(one)[1:-1].replace("/", "\\/")
    return json.dumps(one, ensure_ascii=False)[1:-1]


FORMATS = {
    "chat": '{"id":"c-1","choices":[{"delta":{"content":%s},"index":0}]}',
    "arguments": '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"function":{"arguments":%s}}]}}]}',
    "messages": '{"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":%s}}',
    "responses": '{"type":"response.output_text.delta","output_index":0,"content_index":0,"delta":%s}',
    "gemini": '{"candidates":[{"content":{"parts":[{"text":%s}],"role":"model"},"index":0}]}',
}


def texts(value: Any) -> str:
    """All that a JSON value says, except names of its kind."""
    if isinstance(value, dict):
        found = cast(dict[str, Any], value).items()
        return "".join(texts(one) for key, one in found if key not in ("type", "role", "id"))
    if isinstance(value, list):
        return "".join(map(texts, cast(list[Any], value)))
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize("name", FORMATS)
@given(parts=pieces(), write=literals(), end=st.sampled_from(["\n", "\r\n", "\r"]), other=st.booleans())
def test_a_stream_of_events_does_not_defeat_a_rule(
    name: str, parts: list[str], write: Text, end: str, other: bool
) -> None:
    between = f'data: {{"choices":[{{"delta":{{"content":"9"}},"index":7}}]}}{end}{end}' if other else ""
    body = between.join(f"event: x{end}data: {FORMATS[name] % write(part)}{end}{end}" for part in parts).encode()
    kept = masker().body(body, About("text/event-stream", answer=True))
    assert len(kept) == len(body)
    datas = [json.loads(event.data) for event in events(kept)]
    said = "".join(texts(one) for one in datas if texts(one) != "9")
    assert _squeezed(said) == _squeezed(MASKED)
    assert_only_stars(body, kept)


@given(parts=pieces(), write=literals())
def test_nor_do_frames_of_aws(parts: list[str], write: Text) -> None:
    payloads = [f'{{"contentBlockIndex":0,"delta":{{"text":{write(part)}}},"p":"abc"}}' for part in parts]
    body = b"".join(event_stream.frame({":event-type": "contentBlockDelta"}, one.encode()) for one in payloads)
    kept = masker().body(body, About("application/vnd.amazon.eventstream", answer=True))
    said = "".join(json.loads(frame.payload)["delta"]["text"] for frame in frames(kept, []))
    assert (len(kept), _squeezed(said)) == (len(body), _squeezed(MASKED))
    assert_only_stars(body, kept)


@given(parts=pieces(), write=literals())
def test_nor_do_envelopes_in_base64(parts: list[str], write: Text) -> None:
    inner = [(FORMATS["messages"] % write(part)).encode() for part in parts]
    envelopes = [{"bytes": base64.b64encode(one).decode(), "p": "ab"} for one in inner]
    body = b"".join(event_stream.event("chunk", one) for one in envelopes)
    kept = masker().body(body, About("application/vnd.amazon.eventstream", answer=True))
    said = [json.loads(base64.b64decode(json.loads(one.payload)["bytes"])) for one in frames(kept, [])]
    assert (len(kept), _squeezed("".join(map(texts, said)))) == (len(body), _squeezed(MASKED))


@given(parts=pieces(), write=literals())
def test_nor_does_a_list_that_comes_piece_by_piece(parts: list[str], write: Text) -> None:
    body = ("[" + "\n,".join(FORMATS["gemini"] % write(part) for part in parts) + "]").encode()
    kept = masker().body(body, About("application/json", answer=True))
    assert (len(kept), _squeezed(texts(json.loads(kept)))) == (len(body), _squeezed(MASKED))
    assert_only_stars(body, kept)


@given(write=literals(), inner=literals(), depth=st.integers(0, 3))
def test_json_in_a_string_of_json_is_looked_into(write: Text, inner: Text, depth: int) -> None:
    text = f'{{"q":{inner(SAID)},"n":1}}'
    for _ in range(depth):
        text = f'{{"arguments":{write(text)}}}'
    kept = masker().body(text.encode(), About("application/json"))
    value = json.loads(kept)
    for _ in range(depth):
        value = json.loads(value["arguments"])
    assert (len(kept), value["n"], _squeezed(value["q"])) == (len(text.encode()), 1, _squeezed(MASKED))
    assert_only_stars(text.encode(), kept)


def test_texts_of_other_blocks_are_not_joined() -> None:
    def event(index: int, text: str) -> str:
        return f'data: {{"index":{index},"delta":{{"text":"{text}"}}}}\n\n'

    apart = "".join([event(0, "4111 1111-"), event(1, "1111 1111")]).encode()
    together = "".join([event(0, "4111 1111-"), event(1, "x"), event(0, "1111 1111")]).encode()
    assert masker().body(apart, About(answer=True)) == apart
    assert masker().body(together, About(answer=True)).count(b"*") == len(NEEDLE)


def _squeezed(text: str) -> str:
    """Runs of asterisks as one: an escape becomes several."""
    return "*".join(filter(None, text.split("*")))


def assert_only_stars(body: bytes, kept: bytes) -> None:
    changed = {new for old, new in zip(body, kept, strict=True) if old != new}
    assert changed == {ord("*")}
