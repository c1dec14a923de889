"""What a rule looks for is not in what is kept, in whatever form a provider sends it; or all of the body is gone."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fakes import event_stream

from penstock.gateway.dialects.event_stream import frames
from penstock.gateway.masking.masker import Compiled, Masker, Tally
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.attributes import MASKING_FAILED
from penstock.gateway.model.known_secrets import About

CARD = "4111 1111 1111 1111"
CARDS = MaskingRule(name="cards", pattern=r"\b(?:\d[ -]?){13,16}\b")
MAIL = MaskingRule(name="mail", paths=["**.email"])
JSON, ANSWER = About("application/json"), About("application/json", answer=True)
STREAM = About("text/event-stream", answer=True)
AWS = About("application/vnd.amazon.eventstream", answer=True)
LINES = About("application/x-ndjson", answer=True)


def made(*rules: MaskingRule) -> Masker:
    return Masker((), Compiled(rules), Tally(quiet=True)).noting()


def called(arguments: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}]}


def sent(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)


BROKEN = {
    "a comma too much": '{"email":"bob@x",}',
    "a literal of Python": "{'ok': True, 'email': 'bob@x'}",
    "escaped": '{"\\u0065mail":"bob@x",}',
    "in a string": json.dumps({"a": '{"email":"bob@x"}'}) + ", oops",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_json_in_a_string_is_not_kept_where_a_path_may_lead_into_it(case: str) -> None:
    for body, about in ((json.dumps(called(BROKEN[case])).encode(), ANSWER), (sent(called(BROKEN[case])), STREAM)):
        one = made(MAIL)
        assert set(one.body(body, about)) == {ord("*")}
        assert one.noted[MASKING_FAILED].startswith("failed: mail: JSON in a string cannot be read: it is ")
        other = body.replace(b"mail", b"main")
        assert made(MAIL).body(other, about) is other


def test_what_is_nested_deep_in_a_string_is_looked_into_as_far_as_it_goes() -> None:
    said = called('{"email":"bob@x","a":' + "[" * 250 + '"bob@x"' + "]" * 250 + "}")
    for body, about in ((json.dumps(said).encode(), ANSWER), (sent(said), STREAM)):
        kept = made(MAIL).body(body, about)
        assert b"bob" not in kept
        assert len(kept) == len(body)
        assert json.loads(kept.removeprefix(b"data: "))


def test_what_stands_before_json() -> None:
    """Prose that begins like it is kept where no path leads; white space does not hide it."""
    rule = MaskingRule(name="mail", paths=["user.email"])
    body = b'{"messages":[{"content":"[INST] answer with \\"email\\""}]}'
    assert made(rule).body(body, JSON) is body
    assert set(made(MAIL).body(body, JSON)) == {ord("*")}
    kept = made(MAIL).body(json.dumps(called("\n" * 70 + '{"email":"bob@x"}')).encode(), ANSWER)
    assert b"bob" not in kept
    assert json.loads(kept)["choices"]


@pytest.mark.parametrize("cut", range(1, 29))
def test_a_piece_of_json_is_not_broken_json(cut: int) -> None:
    said = '{"n": "a", "email": "bob@x"}'
    body = sent(called(said[:cut]), called(said[cut:]))
    kept = made(MAIL).body(body, STREAM)
    assert kept == body.replace(b"bob@x", b"*****") or (cut in range(22, 26) and kept.count(b"*") == 5)
    broken = sent(called(said[:cut]), called(said[cut:-1] + ",}"))
    assert set(made(MAIL).body(broken, STREAM)) == {ord("*")}


def parts(*every: dict[str, Any]) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": list(every)}}]}


THOUGHT = {"text": "Let me answer", "thought": True}
FIRST, LAST = "4111 1111 ", "1111 1111"
APART: dict[str, list[dict[str, Any]]] = {
    "a thought at the same place": [parts(THOUGHT), parts({"text": FIRST}), parts({"text": LAST + " ok"})],
    "a thought that ends": [parts(THOUGHT, {"text": FIRST}), parts({"text": LAST + " ok"})],
    "events with types": [
        {"type": "reasoning-delta", "id": "r", "delta": "Say"},
        {"type": "text-delta", "id": "t", "delta": FIRST},
        {"type": "text-delta", "id": "t", "delta": LAST},
    ],
    "a type in the first one alone": [
        {"index": 0, "content": {"type": "text", "text": FIRST}},
        {"index": 0, "content": {"text": LAST}},
    ],
    "a place that is null in the first one alone": [{"item_id": None, "delta": FIRST}, {"delta": LAST}],
    "a place that is no index": [{"index": {"of": 1}, "delta": FIRST}, {"index": {"of": 2}, "delta": LAST}],
    "an element whose index is none": [
        {"choices": [{"index": False, "delta": FIRST}]},
        {"choices": [{"delta": LAST}]},
    ],
    "a type that is none": [
        {"type": {"n": 1}, "delta": FIRST},
        {"type": "note", "delta": "x"},
        {"type": {"n": 2}, "delta": LAST},
    ],
}


@pytest.mark.parametrize("case", APART)
def test_kinds_of_text_and_places_in_a_list_do_not_hide_what_is_cut_apart(case: str) -> None:
    events = APART[case]
    for body, about in (
        (sent(*events), STREAM),
        (json.dumps(events).encode(), ANSWER),
        (b"\n".join(json.dumps(one).encode() for one in events), LINES),
    ):
        kept = made(CARDS).body(body, about)
        assert (len(kept), b"111" in kept) == (len(body), False)


def test_documents_need_no_line_ends_between_them() -> None:
    body = b'{"d":"4111 1111 "}{"d":"1111 1111"}'
    for written in (body, body.replace(b"{", b"\x1e{").replace(b"}", b"}\n")):
        assert not set(b"41") & set(made(CARDS).body(written, About("application/json-seq", answer=True)))


def test_lists_and_fields_of_events_are_looked_into() -> None:
    body = json.dumps([parts({"text": "bob"}), parts({"text": "ann"})]).encode()
    rule = MaskingRule(name="all", paths=["candidates[*].content.parts[*].text"])
    assert made(rule).body(body, ANSWER) == body.replace(b"bob", b"***").replace(b"ann", b"***")
    body = f'id: {CARD}\nevent: {{"email":"bob"}}\ndata: {{"id":"email"}}\n\n'.encode()
    assert made(CARDS, MAIL).body(body, STREAM) == body.replace(CARD.encode(), b"*" * 19).replace(b"bob", b"***")
    # A text that only begins like events is searched in one piece.
    block = MaskingRule(name="block", pattern=r"(?s)BEGIN.*?END")
    body = b"id: 1\nBEGIN\nsecret\nEND\n"
    assert made(block).body(body, About("text/plain")) == b"id: 1\n" + b"*" * 16 + b"\n"


OUTSIDE: dict[str, tuple[bytes, About]] = {
    "lines of one message": (b'data: {"type":"x",\n "email": "bob@x"}\n\n', STREAM),
    "the same, other ends": (b'data: {"type":"x",\r "email": "bob@x"}\n\n', STREAM),
    "a comment": (b': {"email": "bob@x"}\n\ndata: {"a":1}\n\n', STREAM),
    "only begins like events": (b"id: 1\nemail: bob@x\n", About("text/plain")),
    "UTF-16": ('{"email":"bob@x"}'.encode("utf-16-le"), JSON),
    "UTF-7": (b'{"x":1}', About("application/json; charset=utf-7")),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_no_rule_can_read_is_not_kept(case: str) -> None:
    body, about = OUTSIDE[case]
    assert set(made(MAIL).body(body, about)) == {ord("*")}


def test_headers_and_envelopes_of_frames_are_looked_into() -> None:
    inner = base64.b64encode(json.dumps({"a": CARD}).encode()).decode()
    payload = f'{{"bytes":"e30=","bytes":"{inner}","note":"{CARD}","email":"bob"}}'.encode()
    body = event_stream.frame({":message-type": "error", ":error-message": f"bad {CARD}"}, payload)
    kept = made(CARDS, MAIL).body(body, AWS)
    (frame,) = frames(kept, [])
    assert (len(kept), frame.headers[":error-message"]) == (len(body), "bad " + "*" * 19)
    said = json.loads(frame.payload)
    assert (said["note"], said["email"]) == ("*" * 19, "***")
    assert json.loads(base64.b64decode(said["bytes"])) == {"a": "*" * 19}


@pytest.mark.parametrize("body", [b'{"a":1}' + b"\n" * 1_000_000 + b"x", b"} " * 500_000 + b"\n" * 500_000])
def test_white_space_costs_no_time(body: bytes) -> None:
    """Were it not so, this would not end."""
    assert made(CARDS).body(body, ANSWER) == body
