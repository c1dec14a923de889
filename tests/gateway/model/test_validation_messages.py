"""What is wrong is told in plain words, with the value and what would be right."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from pydantic_core.core_schema import ErrorType

from penstock.gateway.client import console
from penstock.gateway.client.console import CommandError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.base import Id
from penstock.gateway.model.times import NOTATION, UNITS, nanoseconds, seconds
from penstock.gateway.model.toml import sentence
from penstock.sidecar.run import settings


class Everything(BaseModel):
    """A field of each kind that the gateway's own models have."""

    id: Id = "x"
    whole: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    flag: bool = False
    text: Annotated[str, Field(min_length=2, max_length=4)] = "ab"
    code: Annotated[str, Field(pattern="^[0-9]+$")] = "1"
    mode: Literal["train", "val", "test"] = "train"
    some: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    about: Annotated[dict[str, int], Field(max_length=2)] = {}


SAID: list[tuple[dict[str, Any], str]] = [
    ({"id": "a b"}, "'a b' is not an id: up to 128 letters, digits and . _ -"),
    ({"id": ".."}, "it may not be . or ..: no path could name it (found '..')"),
    ({"whole": 0}, "0 is not 1 or more"),
    ({"whole": 10}, "10 is not 9 or less"),
    ({"whole": "many"}, "'many' is not a whole number"),
    ({"whole": 1.5}, "1.5 is not a whole number"),
    ({"whole": None}, "None is not a whole number"),
    ({"share": 0}, "0 is not more than 0"),
    ({"share": 1}, "1 is not less than 1"),
    ({"share": float("nan")}, "nan is not a finite number"),
    ({"share": "half"}, "'half' is not a number"),
    ({"flag": "perhaps"}, "'perhaps' is not true or false"),
    ({"text": "a"}, "'a' is not text of 2 characters or more"),
    ({"text": "abcde"}, "'abcde' is not text of 4 characters or less"),
    ({"text": {}}, "an object is not text"),
    ({"text": []}, "a list is not text"),
    ({"code": "x"}, "'x' is not as ^[0-9]+$ says"),
    ({"mode": "trial"}, "'trial' is not 'train', 'val' or 'test'"),
    ({"some": []}, "it has 0 items, not 1 or more"),
    ({"some": [1, 2, 3]}, "it has 3 items, not 2 or less"),
    ({"some": 1}, "1 is not a list"),
    ({"about": {"a": 1, "b": 2, "c": 3}}, "it has more than 2 items"),
    ({"about": "x" * 100}, f"'{'x' * 59}… is not an object"),
]


@pytest.mark.parametrize(("given", "said"), SAID)
def test_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Everything.model_validate(given)
    assert sentence(raised.value.errors()[0]) == said


def test_what_is_missing_and_what_is_no_json() -> None:
    class Needs(BaseModel):
        name: str

    with pytest.raises(ValidationError) as missing:
        Needs.model_validate({})
    assert sentence(missing.value.errors()[0]) == "it is missing"
    with pytest.raises(ValidationError) as odd:
        Needs.model_validate_json(b"{")
    assert sentence(odd.value.errors()[0]).startswith("it is not JSON: EOF while parsing")


def test_every_kind_of_finding_can_be_said() -> None:
    """Also those that no model of ours makes today."""
    bounds = dict.fromkeys(("gt", "ge", "lt", "le", "min_length", "max_length", "actual_length"), 7)
    context = bounds | {"expected": "'a' or 'b'", "pattern": "^a$", "error": "expected value"}
    kinds = get_args(ErrorType)
    assert len(kinds) > 50
    for kind in kinds:
        assert sentence({"type": kind, "ctx": context, "msg": "Input should be other", "input": 1}), kind


def patterns(schema: str) -> set[str]:
    """All that a JSON schema asks of texts."""
    found = set[str]()
    json.loads(schema, object_hook=lambda it: found.add(it["pattern"]) if isinstance(it.get("pattern"), str) else None)
    return found


def test_what_penstock_toml_asks_of_a_text_is_said_in_words() -> None:
    """Nobody who has mistyped a name must read a regular expression."""
    found = patterns(json.dumps(GatewayConfig.model_json_schema()))
    assert len(found) > 3
    for pattern in found:
        said = sentence({"type": "string_pattern_mismatch", "ctx": {"pattern": pattern}, "input": "?"})
        assert "^" not in said, said


# -- lengths of time have one notation, in filters and in every option -------------------------------------------------


@given(st.integers(0, 10**9 - 1), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_number_and_a_unit(whole: int, thousandths: int, unit: str) -> None:
    assert nanoseconds(f"{whole}{unit}") == pytest.approx(whole * UNITS[unit])
    assert nanoseconds(f"{whole}.{thousandths:03}{unit}") == pytest.approx((whole + thousandths / 1000) * UNITS[unit])


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1,5h", "1 s", "1S", "1w", ".5s", "1.s", "1m30s", "1e3s", "²s"])
def test_anything_else_is_none(text: str) -> None:
    assert nanoseconds(text) is None


@given(st.text(max_size=8) | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,2})?(us|ms|s|m|h|d)", fullmatch=True))
def test_every_option_takes_the_same(text: str) -> None:
    """`enqueue --timeout` and `run --timeout`, in particular."""
    told = {read(text) for read in (by_enqueue, by_run)}
    assert len(told) == 1
    assert told == {(nanoseconds(text) or 0) / 10**9 or f"--timeout: {text!r} is not a time: {NOTATION}"}


def by_enqueue(text: str) -> float | str:
    try:
        return console.seconds("--timeout", text)
    except CommandError as e:
        return str(e)


def by_run(text: str) -> float | str:
    try:
        return settings.seconds("--timeout", text)
    except settings.UsageError as e:
        return str(e)


def test_a_wrong_one_names_option_value_and_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"^--lease: '0s' is not a time: a number above 0 and us, ms, s, m, h or d, such"
    ):
        seconds("--lease", "0s")
