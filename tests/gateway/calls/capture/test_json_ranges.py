"""The scanner of JSON bytes: it finds what a parser finds, changes nothing else, and stands hostile bytes."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.capture.json_ranges import LEAF, Tree, find, spliced
from penstock.gateway.dialects.loose_json import UNREADABLE

TREE: Tree = {"ids": LEAF, "choices": {"ids": LEAF, "logprobs": LEAF}}
Pairs = list[tuple[str, Any]]

KEYS = st.sampled_from(["ids", "choices", "logprobs", 'i"ds', "\\", "id", ""]) | st.text(max_size=4)
TEXTS = st.text(max_size=8) | st.sampled_from(['"ids":[1]', "{", "]", "\\", "é\u2028\U0001f4a7", "\ud800", "null"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


class Object(Pairs):
    """An object as the pairs that were written, with those that have the same key."""


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=4).map(Object),
    max_leaves=24,
)
BODIES = st.lists(st.tuples(KEYS, VALUES), max_size=5).map(Object)
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


def nulled(value: Any, tree: Tree) -> Any:
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
    assert parsed(spliced(body, ranges, b"null")) == nulled(parsed(body), TREE)
    for one in ranges:
        assert json.loads(body[one.start : one.end].decode("latin-1")) == one.value
        assert body[one.start : one.end].strip() == body[one.start : one.end]


@given(BODIES, SPACES)
def test_every_other_byte_stays(value: Object, space: str) -> None:
    body = written(value, space, False).encode("utf-8", "surrogatepass")
    ranges = find(body, TREE)
    starts = [one.start for one in ranges]
    assert starts == sorted(starts)
    assert spliced(body, ranges, b"#") == _by_hand(body, [(one.start, one.end) for one in ranges])
    assert spliced(body, [], b"#") == body


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
    assert spliced(body, find(body, TREE), b"#") == expected


@pytest.mark.parametrize("odd", [b"9" * 100_000, b"[" * 10_000 + b"]" * 10_000, rb'"\ud83d"', b'"caf\xe9"', b"1e999"])
def test_offsets_hold_past_what_decoders_refuse(odd: bytes) -> None:
    body = b'\xef\xbb\xbf{"x":%b,"ids":%b}' % (odd, odd)
    assert spliced(body, find(body, TREE), b"#") == b'\xef\xbb\xbf{"x":%b,"ids":#}' % odd


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


def test_size_alone_is_no_reason() -> None:
    body = b'{"x":"' + b"a\\n" * 2_000_000 + b'","ids":[' + b"1," * 500_000 + b'2],"y":' + b"[0]" + b"}"
    (found,) = find(body, TREE)
    assert body[: found.start].endswith(b'"ids":')
    assert body[found.end :] == b',"y":[0]}'


def test_white_space_and_keys_without_end_take_linear_time() -> None:
    """Were it not linear, these would not end."""
    assert find(b" " * 1_000_000 + b"{}" + b" " * 1_000_000, TREE) == []
    assert len(find(b"{" + b",".join([b'"ids" : 1 '] * 50_000) + b"}", TREE)) == 50_000
