"""Messages that two readers could understand in two ways are not understood at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.policy.pointer import Unreadable, changed, found, parsed
from penstock.gateway.policy.reading import CALL, tool_calls, written

GOOD = {"jsonrpc": "2.0", "id": 1, "method": CALL, "params": {"name": "write", "arguments": {"Name": 1, "name": 2}}}


def test_a_call_and_what_is_none() -> None:
    one, other = tool_calls(json.dumps([GOOD, {"jsonrpc": "2.0", "id": 2, "method": "ping"}]).encode())
    assert one is not None
    assert (one.tool, one.arguments, one.message, one.as_task) == ("write", {"Name": 1, "name": 2}, GOOD, False)
    assert other is None


def test_arguments_may_be_left_out() -> None:
    for text in (
        '{"method":"tools/call","params":{"name":"x"}}',
        '{"method":"tools/call","params":{"name":"x","arguments":null}}',
    ):
        (one,) = tool_calls(text.encode())
        assert one is not None
        assert one.arguments == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"method":"ping","method":"tools/call","params":{"name":"x"}}', "the key 'method' stands twice"),
        (b'{"method":"ping","m\\u0065thod":"tools/call"}', "the key 'method' stands twice"),
        (b'{"method":"tools/call","params":{"name":"a","name":"b"}}', "the key 'name' stands twice"),
        (b'{"method":"tools/call","params":{"name":"a","arguments":{"p":1,"p":2}}}', "the key 'p' stands twice"),
        (b'{"Method":"tools/call","params":{"name":"a"}}', "'Method', which some servers read as 'method'"),
        (b'{"method":"ping","METHOD":"tools/call"}', "'METHOD', which some servers read as 'method'"),
        ('{"method":"tools/call","param\u017f":{"name":"a"},"params":{"name":"b"}}'.encode(), "read as 'params'"),
        (b'{"method":"tools/call","params":{"name":"a","Arguments":{}}}', "'Arguments', which some servers read"),
        (b'{"method":"tools/call","params":{"name":7}}', "its params.name is not text"),
        (b'{"method":"tools/call","params":[]}', "it has no params"),
        (b'{"method":"tools/call","params":{"name":"a","arguments":{"n":NaN}}}', "NaN is no JSON"),
        (b"\xef\xbb\xbf{}", "it is not JSON"),
        ('{"method":"tools/call"}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"method":"tools/call","params":{"name":"\xff"}}', "it is not UTF-8"),
        (b'{"method":"tools/call"} {}', "it is not JSON"),
        (b'"tools/call"', "it is no object"),
        (b'[{"method":"ping"}, 7]', "it is no object"),
        (b"[" * 100_000 + b"]" * 100_000, "it is nested too deep"),
        (b"", "it is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(body: bytes, said: str) -> None:
    with pytest.raises(Unreadable) as caught:
        _ = tool_calls(body)
    assert said in str(caught.value)


def test_what_is_written_again_says_the_same() -> None:
    value = {"a": 1.0, "b": 12345678901234567890123, "c": "\ud800 \u20ac", "d": [True, None, 1e-7]}
    assert json.loads(written([value], several=False)) == value
    assert json.loads(written([value, 1], several=True)) == [value, 1]
    with pytest.raises(Unreadable, match="too large"):
        _ = written([json.loads("1e999")], several=False)


def test_pointers() -> None:
    value: Any = {"a": [{"b": 1}, {"b": 2}], "x/y": {"~": 3}, "": 4}
    assert found(value, parsed("/a/*/b")) == [1, 2]
    assert found(value, parsed("/a/1/b")) == [2]
    assert found(value, parsed("/x~1y/~0")) == [3]
    assert found(value, parsed("/")) == [4]
    assert found(value, parsed("")) == [value]
    assert found(value, parsed("/a/b/c")) == []
    assert found(value, parsed("/a/-1")) == []
    with pytest.raises(Unreadable, match="more than"):
        _ = found([0] * 20_000, parsed("/*"))


def test_only_what_is_changed_is_copied() -> None:
    value: Any = {"a": [{"b": 1}, {"b": 2}], "c": {}}
    made = changed(value, parsed("/a/*/b"), lambda one: 9 if one == 2 else one)
    assert made == {"a": [{"b": 1}, {"b": 9}], "c": {}}
    assert value == {"a": [{"b": 1}, {"b": 2}], "c": {}}
    assert made["a"][0] is value["a"][0]
    assert changed(value, parsed("/a/*/b"), lambda one: one) is value
    assert changed(value, parsed("/z"), lambda one: 9) is value
