"""The model's name is the only thing that `replace_model` changes, whatever the body looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects.request_body import replace_model

KEYS = st.sampled_from(["model", "messages", "x", 'mo"del', "\\"]) | st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"model":"a"', "policy", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(min_size=1, max_size=12) | st.sampled_from(['a"b', "\\", "Qwen/Qwen3-8B", "é"])


@given(
    before=st.lists(st.tuples(KEYS, VALUES), max_size=3),
    model=NAMES,
    after=st.lists(st.tuples(KEYS, VALUES), max_size=3),
    name=NAMES,
    ascii_only=st.booleans(),
    space=st.sampled_from(["", " ", "\n\t"]),
)
def test_only_the_name_changes(
    before: list[tuple[str, Any]],
    model: str,
    after: list[tuple[str, Any]],
    name: str,
    ascii_only: bool,
    space: str,
) -> None:
    def written(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    def pairs(some: list[tuple[str, Any]]) -> list[str]:
        return [f"{written(key)}{space}:{space}{written(value)}" for key, value in some if key != "model"]

    def body(value: str) -> bytes:
        named = f'"model"{space}:{space}{value}'
        return ("{" + f"{space},".join([*pairs(before), named, *pairs(after)]) + space + "}").encode()

    new = json.dumps(name, ensure_ascii=False)
    changed = replace_model(body(written(model)), name)
    assert json.loads(changed)["model"] == name
    assert changed in (body(new), body(written(name)))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"not json", b"\xff\xfe", b'{"x":{"model":"a"}}', b'{"model":7}', b'{"model":"new"}',
        b'{"model":null,"x":{"model":"a"}}', b'{"model":"a"} trailing', b'"\\"model\\":\\"a\\""',
    ],
)  # fmt: skip
def test_what_names_no_other_model_stays(body: bytes) -> None:
    assert replace_model(body, "new") == body


def test_of_two_names_the_one_that_counts_changes() -> None:
    assert replace_model(b'{"model":"a","model":"b"}', "new") == b'{"model":"a","model":"new"}'


def test_a_name_like_the_new_one_deeper_down_is_left_alone() -> None:
    assert replace_model(b'{"m":{"model":"new"},"model":"a"}', "new") == b'{"m":{"model":"new"},"model":"new"}'
