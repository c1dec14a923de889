"""What is added to a request and taken out of its answer, and what leaves both alone."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, cast

import pytest
from fakes import vllm_wire
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.model.facts import CAPTURED
from penstock.gateway.wire.capture import CaptureRequest, accept_identity, add_capture_fields, original
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE
from penstock.gateway.wire.rewriting import CaptureCleaner, EventStreamRewriter

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
WORDS = ["model", "messages", "logprobs", "return_token_ids", "top_logprobs", "echo", "n"]
KEYS = st.sampled_from(WORDS) | st.text(max_size=4)
BOTH: dict[str, Any] = {"return_token_ids": True, "logprobs": True}


@given(st.dictionaries(KEYS, JSON, max_size=6), st.sampled_from(["chat", "completions"]), st.sampled_from(["", " \n"]))
def test_what_is_added_is_new_and_everything_else_stays(asked: dict[str, Any], dialect: str, space: str) -> None:
    body = (space + json.dumps(asked, indent=1 if space else None) + space).encode()
    made = add_capture_fields(by_name(dialect), body)
    if made is None:
        own: set[str] = asked.keys() | ({"logprobs"} if "top_logprobs" in asked else set())
        assert asked.get("echo") or {"return_token_ids", "logprobs"} <= own
        return
    sent = json.loads(made.body)
    assert not asked.keys() & set(made.added)
    assert {key: sent[key] for key in asked} == asked
    assert sent.keys() - asked.keys() == set(made.added)
    at = made.body.index(b'"' + made.added[0].encode())
    assert made.body[:at] + made.body[at + len(made.body) - len(body) :] == body
    assert original(by_name(dialect), made.body, {CAPTURED: list(made.added)}) == body


@pytest.mark.parametrize(
    ("dialect", "asked", "added", "fillers"),
    [
        ("chat", {"model": "m"}, BOTH, True),
        ("chat", {}, BOTH, True),
        ("chat", {"logprobs": True, "top_logprobs": 3}, {"return_token_ids": True}, False),
        ("chat", {"logprobs": False}, {"return_token_ids": True}, True),
        ("chat", {"logprobs": None}, {"return_token_ids": True}, True),
        ("chat", {"return_token_ids": True}, {"logprobs": True}, False),
        ("chat", {"return_token_ids": False}, {"logprobs": True}, True),
        ("chat", {"top_logprobs": 3}, {"return_token_ids": True}, True),
        ("chat", {"logprob_token_ids": [1]}, {"return_token_ids": True}, True),
        ("chat", {"echo": False}, BOTH, True),
        ("completions", {"prompt": "a"}, {"return_token_ids": True, "logprobs": 0}, False),
        ("completions", {"prompt": "a", "logprobs": 2}, {"return_token_ids": True}, False),
    ],
)
def test_a_field_that_is_there_is_the_clients(
    dialect: str, asked: dict[str, Any], added: dict[str, Any], fillers: bool
) -> None:
    made = add_capture_fields(by_name(dialect), json.dumps(asked).encode())
    assert made is not None
    assert json.loads(made.body) == added | asked
    assert (made.added, made.fillers) == (tuple(added), fillers)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", b'{"return_token_ids":true,"logprobs":true}'),
        ("completions", b'{"prompt":"a","echo":true}'),
        ("messages", b'{"model":"m"}'),
        ("embeddings", b'{"model":"m"}'),
        ("chat", b"[]"),
        ("chat", b""),
        ("chat", b"{"),
        ("chat", b'{"a":1} {"b":2}'),
        ("chat", b"\x1f\x8b\x08\x00"),
    ],
)
def test_what_cannot_be_asked_for_more_stays(dialect: str, body: bytes) -> None:
    assert add_capture_fields(by_name(dialect), body) is None


@pytest.mark.parametrize("attributes", [None, {}, {CAPTURED: []}, {CAPTURED: ["logprobs"]}, {CAPTURED: ["other"]}])
def test_a_request_that_was_not_asked_for_more_is_the_clients_own(attributes: dict[str, Any] | None) -> None:
    for body in (b"", b"{}", b'{"return_token_ids":true,"logprobs":true}'):
        assert original(by_name("chat"), body, attributes) == body


def test_half_a_surrogate_pair_does_not_matter_and_an_answer_without_encoding_is_asked_for() -> None:
    made = add_capture_fields(by_name("chat"), rb'{"messages":"\ud83d"}')
    assert made is not None
    assert made.body == rb'{"return_token_ids":true,"logprobs":true,"messages":"\ud83d"}'
    gzip = (b"accept-encoding", b"Accept-Encoding", b"gzip, br")
    plain = (b"accept-encoding", b"Accept-Encoding", b"identity")
    other = (b"x-a", b"X-A", b"1")
    assert accept_identity([gzip, other]) == [plain, other]
    assert accept_identity([other]) == [other, plain]


# -- what is taken out of an answer: what was added, whatever the pieces it comes in -----------------------------------


Json = dict[str, Any]
LIMIT = 1 << 20
TOOLS = DemoAnswer("Let me look.", (DemoToolCall("c1", "get", '{"x": "é 1"}'), DemoToolCall("c2", "put", "{}")))
OWN: list[Json] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}]
REQUESTS: list[Json] = [{"model": "m", "messages": []} | own | more for own in OWN for more in ({}, {"n": 3})]


def asked_of(request: Json, dialect: str = "chat") -> CaptureRequest:
    made = add_capture_fields(by_name(dialect), json.dumps(request).encode())
    assert made is not None
    return made


def through(asked: CaptureRequest, pieces: list[bytes], limit: int = LIMIT) -> bytes:
    events = EventStreamRewriter(CaptureCleaner(asked), limit)
    return b"".join([*map(events.feed, pieces), events.flush()])


def cut(body: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(place % (len(body) + 1) for place in at)})
    return [body[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_plain_answer_is_what_it_would_have_been(request_: Json) -> None:
    asked = asked_of(request_)
    for format, dialect in ((vllm_wire.chat, "chat"), (vllm_wire.completion, "completions")):
        asked = asked_of(request_, dialect)
        given_ = json.dumps(format(json.loads(asked.body), TOOLS)).encode()
        cleaner = CaptureCleaner(asked)
        assert cleaner.document(given_) == json.dumps(format(request_, TOOLS)).encode()
        assert cleaner.ids


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=repr)
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_stream_is_what_it_would_have_been(request_: Json, end: bytes) -> None:
    asked = asked_of(request_)
    unasked, given_ = (
        b"".join(vllm_wire.chat_events(one, TOOLS)).replace(b"\n", end) for one in (request_, json.loads(asked.body))
    )
    assert given_ != unasked
    for size in (len(given_), 1, 7, 64):
        assert through(asked, [given_[at : at + size] for at in range(0, len(given_), size)]) == unasked
    prompt: Json = {"model": "m", "prompt": "a", "n": 2}
    asked = asked_of(prompt, "completions")
    given_ = b"".join(vllm_wire.completion_events(json.loads(asked.body), DemoAnswer("To be or not.")))
    assert through(asked, [given_]) == b"".join(vllm_wire.completion_events(prompt, DemoAnswer("To be or not.")))


LINES = st.sampled_from([
    b"", b"", b": comment", b"event: x", b"id: 7", b"retry: 10", b"data", b"data:", b"data: [DONE]", b"data: {",
    b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}', b'data: {"error":{"message":"no"}}', b"\xff",
])  # fmt: skip
OURS = b'data: {"choices":[{"delta":%b,"token_ids":[1],"finish_reason":%b,"logprobs":{"content":[]}}]}'
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), CUTS)
def test_what_needs_no_change_passes_byte_for_byte(lines: list[tuple[bytes, bytes]], at: list[int]) -> None:
    body = b"".join(line + end for line, end in lines)
    assert through(asked_of({}), cut(body, at)) == body
    assert through(asked_of({}), cut(body, at), limit=20) == body


@given(st.lists(st.tuples(st.booleans(), ENDS), min_size=1, max_size=6), ENDS, CUTS)
def test_events_are_changed_or_left_out_wherever_they_are_cut(
    story: list[tuple[bool, bytes]], end: bytes, at: list[int]
) -> None:
    said, nulled = b'{"content":"a"}', OURS.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")
    body = b": hi" + end + b"".join(OURS % (said if says else b"{}", b"null") + one + one for says, one in story)
    clean = b": hi" + end + b"".join(nulled % (said, b"null") + one + one for says, one in story if says)
    if not story[0][0]:  # its comment stays
        clean = clean[: 4 + len(end)] + story[0][1] + clean[4 + len(end) :]
    assert through(asked_of({}), cut(body, at)) == clean


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        events, one = (
            EventStreamRewriter(CaptureCleaner(asked_of({})), LIMIT),
            OURS % (b'{"content":"a"}', b"null") + end + end,
        )
        whole = len(one) - (end == b"\r\n")  # a CR ends its line, and the LF after it comes late
        assert [bool(events.feed(one[at : at + 1])) for at in range(whole)] == [False] * (whole - 1) + [True]


@pytest.mark.parametrize(
    ("delta", "finish", "stays"),
    [(b"{}", b"null", False), (b"{}", b'"stop"', True), (b'{"content":""}', b"null", True), (b"null", b"null", True)],
)
def test_only_events_that_say_and_end_nothing_are_left_out(delta: bytes, finish: bytes, stays: bool) -> None:
    event = OURS % (delta, finish) + b"\n\n"
    assert bool(through(asked_of({}), [event])) is stays
    assert through(asked_of({"logprobs": True}), [event]) == event.replace(b"[1]", b"null")
    assert through(asked_of({}), [event.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")])


def test_data_in_several_lines_stays_in_several_lines() -> None:
    begun = b'id: 1\ndata: {"choices":[{"delta":\r\ndata:{"content":"a"},'
    ours = b'\ndata: "token_ids":[1,\ndata: 2]}]}\nevent: x\n\n'
    nulled = b'\r\ndata: "token_ids":null}]}\r\nevent: x\n\n'
    assert through(asked_of({}), [begun + ours]) == begun + nulled


def test_a_stream_that_ends_within_an_event_is_still_cleaned() -> None:
    event = OURS % (b'{"content":"a"}', b"null")
    for end in (b"", b"\n", b"\r"):
        nulled = event.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")
        assert through(asked_of({}), cut(event + end, [30, 60])) == nulled + end


def test_an_event_without_end_is_not_held_for_ever() -> None:
    events = EventStreamRewriter(CaptureCleaner(asked_of({})), 1000)
    body = b'data: {"choices":[{"token_ids":[' + b"1," * 2000
    out = [events.feed(body[at : at + 100]) for at in range(0, len(body), 100)]
    assert b"".join(out) == body
    assert out[10:] == [body[:1100], *(body[at : at + 100] for at in range(1100, len(body), 100))]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"choices":[{"token_ids":[1]}]',
        b'[{"choices":[{"token_ids":[1]}]}]',
        b'{"choices":"x","token_ids":[1],"logprobs":1}',
        b'{"error":{"message":"no","choices":[{"token_ids":[1]}]}}',
        b'{"choices":[{"message":{"content":"\\"token_ids\\":[1]","token_ids":[1]},"token_ids":null}]}',
        b'{"choices":[{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"token_ids":[1]}]}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_not_understood_or_not_ours_stays(body: bytes) -> None:
    cleaner = CaptureCleaner(asked_of({}))
    assert cleaner.document(body) is body
    assert not cleaner.ids


# -- the scanner of JSON bytes: it finds what a parser finds, and changes nothing else ---------------------------------


TREE: KeyTree = {"ids": LEAF, "choices": {"ids": LEAF, "logprobs": LEAF}}
Pairs = list[tuple[str, Any]]

NAMES = st.sampled_from(["ids", "choices", "logprobs", 'i"ds', "\\", "id", ""]) | st.text(max_size=4)
TEXTS = st.text(max_size=8) | st.sampled_from(['"ids":[1]', "{", "]", "\\", "é\u2028\U0001f4a7", "\ud800", "null"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


class Object(Pairs):
    """An object as the pairs that were written, with those that have the same key."""


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(NAMES, inner), max_size=4).map(Object),
    max_leaves=24,
)
BODIES = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(Object)
SPACES = st.sampled_from(["", " ", "\n", "\r\n\t "])


def written(value: Any, space: str, ascii_only: bool) -> str:
    """JSON text with this white space wherever it may stand."""
    match value:
        case Object():
            pairs = (f"{written(k, space, ascii_only)}{space}:{written(v, space, ascii_only)}" for k, v in value)
            made = "{" + space + f",{space}".join(pairs) + "}"
        case list():
            items = cast(list[Any], value)
            made = "[" + space + f",{space}".join(written(item, space, ascii_only) for item in items) + "]"
        case _:
            made = json.dumps(value, ensure_ascii=ascii_only)
    return space + made + space


def parsed(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"), object_pairs_hook=Object)


def nulled(value: Any, tree: KeyTree) -> Any:
    """The same of what was parsed."""
    if tree is LEAF:
        return None
    if isinstance(value, Object):
        return Object((key, nulled(inner, tree[key]) if key in tree else inner) for key, inner in value)
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [nulled(item, tree) if isinstance(item, Object) else item for item in items]
    return value


@given(BODIES, SPACES, st.booleans())
def test_what_is_found_is_what_a_parser_finds(value: Object, space: str, ascii_only: bool) -> None:
    body = written(value, space, ascii_only).encode("utf-8", "surrogatepass")
    ranges = find(body, TREE)
    assert parsed(splice(body, ranges, b"null")) == nulled(parsed(body), TREE)
    for one in ranges:
        assert json.loads(body[one.start : one.end].decode("latin-1")) == one.value
        assert body[one.start : one.end].strip() == body[one.start : one.end]


@given(BODIES, SPACES)
def test_every_other_byte_stays(value: Object, space: str) -> None:
    body = written(value, space, False).encode("utf-8", "surrogatepass")
    ranges = find(body, TREE)
    starts = [one.start for one in ranges]
    assert starts == sorted(starts)
    assert splice(body, ranges, b"#") == _by_hand(body, [(one.start, one.end) for one in ranges])
    assert splice(body, [], b"#") == body


def _by_hand(body: bytes, ranges: list[tuple[int, int]]) -> bytes:
    for start, end in reversed(ranges):
        body = body[:start] + b"#" + body[end:]
    return body


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\0 idsnul', max_size=40).map(str.encode))
def test_bytes_that_are_no_object_are_refused_as_a_parser_refuses_them(body: bytes) -> None:
    try:
        value = json.loads(body.decode("latin-1"))
    except ValueError:
        value = None
    if isinstance(value, dict):
        find(body, TREE)
    else:
        with pytest.raises(UNREADABLE):
            find(body, TREE)


def test_keys_may_be_escaped_and_stand_twice() -> None:
    body = rb'{"\u0069ds":1,"ids":[2],"choices":{"logprobs":3},"choices":[[{"ids":4}],{"ids":{"ids":5}},"ids"]}'
    expected = rb'{"\u0069ds":#,"ids":#,"choices":{"logprobs":#},"choices":[[{"ids":4}],{"ids":#},"ids"]}'
    assert splice(body, find(body, TREE), b"#") == expected


@pytest.mark.parametrize("odd", [b"9" * 100_000, b"[" * 10_000 + b"]" * 10_000, rb'"\ud83d"', b'"caf\xe9"', b"1e999"])
def test_offsets_hold_past_what_decoders_refuse(odd: bytes) -> None:
    body = b'\xef\xbb\xbf{"x":%b,"ids":%b}' % (odd, odd)
    assert splice(body, find(body, TREE), b"#") == b'\xef\xbb\xbf{"x":%b,"ids":#}' % odd


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"choices":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"ids":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001,
        b'{"ids":1}{"ids":1}',
        b'{"ids":1,}',
        b'{"ids":"\x00"}',
        b'{"ids":1',
        b'{"ids"',
        b'{"',
        b'{"' + b'\\"' * 500_000,
        b'{"a"' + b" " * 1_000_000,
        b"{",
        b" ",
        b"[{}]",
        b"null",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_hostile_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        find(body, TREE)


def test_size_alone_is_no_reason_and_takes_linear_time() -> None:
    """Were it not linear, this would not end."""
    body = b'{"x":"' + b"a\\n" * 2_000_000 + b'","ids":[' + b"1," * 500_000 + b'2],"y":' + b"[0]" + b"}"
    (found,) = find(body, TREE)
    assert body[: found.start].endswith(b'"ids":')
    assert body[found.end :] == b',"y":[0]}'

    assert find(b" " * 1_000_000 + b"{}" + b" " * 1_000_000, TREE) == []
    assert len(find(b"{" + b",".join([b'"ids" : 1 '] * 50_000) + b"}", TREE)) == 50_000
