"""However a text is written and cut apart, what a rule looks for is not in what is kept, and all else is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import event_stream
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.facts import MASKING_FAILED
from penstock.gateway.model.known_secrets import NO_SECRETS, BodyContext
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.trials.sender import OutboundRequest, Reply, complete
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.bedrock import frames
from penstock.gateway.wire.dialects.sse import events
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.masking.masker import CompiledRules, Masker, MaskingCounts, MaskingRule

NEEDLE = "4111 1111-1111 1111"
NEEDLES = MaskingRule(name="needles", pattern=r"\b\d{4}[ -]\d{4}[ -]\d{4}[ -]\d{4}\b")
BEFORE, AFTER = 'my "card"\n is ', ", café \\ 😀 /thanks"
SAID = BEFORE + NEEDLE + AFTER
MASKED = BEFORE + "*" * len(NEEDLE) + AFTER
Text = Callable[[str], str]


CARD = "4111 1111 1111 1111"
CARDS = MaskingRule(name="cards", pattern=r"\b(?:\d[ -]?){13,16}\b")
MAIL = MaskingRule(name="mail", paths=["**.email"])
JSON, ANSWER = BodyContext("application/json"), BodyContext("application/json", answer=True)
STREAM = BodyContext("text/event-stream", answer=True)
AWS = BodyContext("application/vnd.amazon.eventstream", answer=True)
LINES = BodyContext("application/x-ndjson", answer=True)


def made(*rules: MaskingRule) -> Masker:
    return Masker((), CompiledRules(rules), MaskingCounts(quiet=True)).for_call()


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
    kept = made(NEEDLES).body(body, STREAM)
    assert len(kept) == len(body)
    datas = [json.loads(event.data) for event in events(kept)]
    said = "".join(texts(one) for one in datas if texts(one) != "9")
    assert _squeezed(said) == _squeezed(MASKED)
    assert_only_stars(body, kept)


@given(parts=pieces(), write=literals())
def test_nor_do_frames_of_aws(parts: list[str], write: Text) -> None:
    payloads = [f'{{"contentBlockIndex":0,"delta":{{"text":{write(part)}}},"p":"abc"}}' for part in parts]
    body = b"".join(event_stream.frame({":event-type": "contentBlockDelta"}, one.encode()) for one in payloads)
    kept = made(NEEDLES).body(body, AWS)
    said = "".join(json.loads(frame.payload)["delta"]["text"] for frame in frames(kept, []))
    assert (len(kept), _squeezed(said)) == (len(body), _squeezed(MASKED))
    assert_only_stars(body, kept)


@given(parts=pieces(), write=literals())
def test_nor_do_envelopes_in_base64(parts: list[str], write: Text) -> None:
    inner = [(FORMATS["messages"] % write(part)).encode() for part in parts]
    envelopes = [{"bytes": base64.b64encode(one).decode(), "p": "ab"} for one in inner]
    body = b"".join(event_stream.event("chunk", one) for one in envelopes)
    kept = made(NEEDLES).body(body, AWS)
    said = [json.loads(base64.b64decode(json.loads(one.payload)["bytes"])) for one in frames(kept, [])]
    assert (len(kept), _squeezed("".join(map(texts, said)))) == (len(body), _squeezed(MASKED))


@given(parts=pieces(), write=literals())
def test_nor_does_a_list_that_comes_piece_by_piece(parts: list[str], write: Text) -> None:
    body = ("[" + "\n,".join(FORMATS["gemini"] % write(part) for part in parts) + "]").encode()
    kept = made(NEEDLES).body(body, ANSWER)
    assert (len(kept), _squeezed(texts(json.loads(kept)))) == (len(body), _squeezed(MASKED))
    assert_only_stars(body, kept)


@given(write=literals(), inner=literals(), depth=st.integers(0, 3))
def test_json_in_a_string_of_json_is_looked_into(write: Text, inner: Text, depth: int) -> None:
    text = f'{{"q":{inner(SAID)},"n":1}}'
    for _ in range(depth):
        text = f'{{"arguments":{write(text)}}}'
    kept = made(NEEDLES).body(text.encode(), JSON)
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
    assert made(NEEDLES).body(apart, BodyContext(answer=True)) == apart
    assert made(NEEDLES).body(together, BodyContext(answer=True)).count(b"*") == len(NEEDLE)


def _squeezed(text: str) -> str:
    """Runs of asterisks as one: an escape becomes several."""
    return "*".join(filter(None, text.split("*")))


def assert_only_stars(body: bytes, kept: bytes) -> None:
    changed = {new for old, new in zip(body, kept, strict=True) if old != new}
    assert changed == {ord("*")}


# -- whatever form a provider sends it in, or all of the body is gone --------------------------------------------------


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
        assert one.span_attributes[MASKING_FAILED].startswith("failed: mail: JSON in a string ")
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
        assert not set(b"41") & set(made(CARDS).body(written, BodyContext("application/json-seq", answer=True)))


def test_lists_and_fields_of_events_are_looked_into() -> None:
    body = json.dumps([parts({"text": "bob"}), parts({"text": "ann"})]).encode()
    rule = MaskingRule(name="all", paths=["candidates[*].content.parts[*].text"])
    assert made(rule).body(body, ANSWER) == body.replace(b"bob", b"***").replace(b"ann", b"***")
    body = f'id: {CARD}\nevent: {{"email":"bob"}}\ndata: {{"id":"email"}}\n\n'.encode()
    assert made(CARDS, MAIL).body(body, STREAM) == body.replace(CARD.encode(), b"*" * 19).replace(b"bob", b"***")
    # A text that only begins like events is searched in one piece.
    block = MaskingRule(name="block", pattern=r"(?s)BEGIN.*?END")
    body = b"id: 1\nBEGIN\nsecret\nEND\n"
    assert made(block).body(body, BodyContext("text/plain")) == b"id: 1\n" + b"*" * 16 + b"\n"


OUTSIDE: dict[str, tuple[bytes, BodyContext]] = {
    "lines of one message": (b'data: {"type":"x",\n "email": "bob@x"}\n\n', STREAM),
    "the same, other ends": (b'data: {"type":"x",\r "email": "bob@x"}\n\n', STREAM),
    "a comment": (b': {"email": "bob@x"}\n\ndata: {"a":1}\n\n', STREAM),
    "only begins like events": (b"id: 1\nemail: bob@x\n", BodyContext("text/plain")),
    "UTF-16": ('{"email":"bob@x"}'.encode("utf-16-le"), JSON),
    "UTF-7": (b'{"x":1}', BodyContext("application/json; charset=utf-7")),
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


# -- no body of the call says it once more by its tokens ---------------------------------------------------------------


def without(body: bytes, about: BodyContext = ANSWER) -> bytes:
    return made(CARDS).without_tokens(body, about)


ENGINES: dict[str, Any] = {
    "Ollama": {"context": [10, 2234, 30]},
    "SGLang": {"meta_info": {"output_top_logprobs": [[[-1, 2234, "4111"]]], "input_top_logprobs": [[[-1, 2234, ""]]]}},
    "TGI": {"details": {"prefill": [{"id": 2234}], "top_tokens": [[{"id": 2234, "text": "4111"}]]}},
    "Fireworks": {"raw_output": {"completion_token_ids": [2234, 2], "prompt_fragments": ["4111"]}},
    "TRL": {"prompt_ids": [[1, 2234]], "completion_ids": [[2234]]},
    "vLLM": {"token_strs": ["4111", " 1111"], "logprobs": [{"2234": -1}]},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_names_for_them(engine: str) -> None:
    kept = without(json.dumps(ENGINES[engine]).encode())
    assert not any(one in kept for one in (b"4111", b"2234"))
    _ = json.loads(kept)


def test_other_members_stay() -> None:
    """And many lists take no time: it would not end."""
    assert b'"input": [1]' not in without(json.dumps({"c": CARD, "a": [{"input": [1]}] * 20_000}).encode())
    other = {"context": "x", "file_ids": ["a"], "prompt": [["a"]], "token": "a", "id": 7, "input": [], "tool_ids": []}
    body = json.dumps(other).encode()
    assert without(body) is body
    # The id of the token of an event becomes zeros.
    event = b'data: {"token":{"id":2234,"text":"ok"}}\n\n'
    assert without(event, STREAM) == event.replace(b"2234", b"1000")


def test_they_are_taken_out_of_what_was_cut_off_or_cannot_be_read() -> None:
    answer = json.dumps({"text": CARD, "logprobs": {"tokens": ["4111", " 1111"] * 30}, "x": "y" * 400}).encode()
    cut, one = ANSWER._replace(cut=True), made(CARDS)
    kept = one.without_tokens(one.body(answer[:-3], cut), cut)
    assert (len(kept), b"111" in kept, kept[:9]) == (len(answer) - 3, False, b'{"text": ')
    within = answer[:300]
    assert b"111" not in one.without_tokens(one.body(within, cut), cut)
    assert set(without(answer + b"oops")) == {ord("*")}
    assert without(b'{"a": 1} oops') == b'{"a": 1} oops'


def test_a_request_may_give_its_text_by_them() -> None:
    for name in ("prompt", "input_ids", "token_ids", "prompt_token_ids", "tokens", "prompt_ids"):
        body = json.dumps({"model": "m", name: [[101, 2023]]}).encode()
        assert json.loads(made(CARDS).body(body, JSON)) == {"model": "m", name: None}


def test_replays_have_none_and_count_what_was_used() -> None:
    answer = {
        "id": "x", "object": "chat.completion", "model": "m", "usage": {"prompt_tokens": 12, "completion_tokens": 3},
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": CARD}, "finish_reason": "stop",
            "token_ids": [1, 2234], "logprobs": {"content": [{"token": "4111", "logprob": -1, "bytes": [52]}]},
        }],
    }  # fmt: skip
    reply, entry = Reply([], 200, [(b"Content-Type", b"application/json")]), SpanEntry("r", "a")
    reply.receive(json.dumps(answer).encode(), 0.1)
    asked = {"model": "m", "messages": [{"role": "user", "content": CARD}]}
    question = SimpleNamespace(
        request=SimpleNamespace(headers=[]), path="/v1/chat/completions", body=json.dumps(asked).encode(),
        dialect=by_name("chat"), pool=SimpleNamespace(url="http://u".__add__),
    )  # fmt: skip
    turn, _ = complete(cast(OutboundRequest, question), reply, entry, Redactor(NO_SECRETS, made(CARDS)))
    assert turn is not None
    assert entry.usage is not None
    assert (entry.usage.input_tokens, entry.usage.output_tokens, entry.choices) == (12, 3, 1)
    assert entry.body is not None
    assert not any(one in entry.body.response for one in (b"4111", b"2234"))
