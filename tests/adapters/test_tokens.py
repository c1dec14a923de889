"""Token ids and log-probabilities out of recorded bytes, in every shape that engines give them."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from fakes.odd_json import written
from fakes.tokens import answer, streamed
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.episode import strip_tokens
from penstock.adapters.tokens import LARGEST, CompletionOutput, read_outputs
from penstock.gateway.wire.dialects import by_name

IDS = st.lists(st.integers(0, LARGEST), min_size=1, max_size=6)


def read(body: bytes, stream: bool = False) -> list[CompletionOutput]:
    """Of a body that can be read."""
    found = read_outputs(body, stream)
    assert found is not None
    return [*found]


def chat(**about: Any) -> bytes:
    """One choice."""
    return json.dumps({"prompt_token_ids": [1], "choices": [{"index": 0, "token_ids": [2, 3], **about}]}).encode()


def logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": "x", "logprob": value, "top_logprobs": []} for value in values]}}


@given(IDS, st.lists(IDS, min_size=1, max_size=3))
def test_a_stream_says_what_a_plain_answer_says(prompt: list[int], answers: list[list[int]]) -> None:
    given_answer = answer(prompt, answers)
    plain, pieces = read(json.dumps(given_answer).encode()), read(streamed(given_answer), stream=True)
    for one, other, ids in zip(plain, pieces, answers, strict=True):
        assert one.prompt.tolist() == other.prompt.tolist() == prompt
        assert one.ids.tolist() == other.ids.tolist() == ids
        assert (one.logprobs == other.logprobs).all()
        assert (one.choice, one.finish, one.scored, one.given) == (
            other.choice,
            other.finish,
            other.scored,
            other.given,
        )
        assert one.logprobs.dtype == np.float32
        assert one.scored


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (logprobs(-0.5, -0.25), [-0.5, -0.25]),
        ({"logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]}}, [-0.5, -0.25]),
        # One that is missing, and one that no engine can mean.
        (logprobs(-0.5, None), [-0.5, math.nan]),
        ({"logprobs": {"token_logprobs": [None, -0.25]}}, [math.nan, -0.25]),
        # Nobody knows whose they are.
        (logprobs(-0.5), [math.nan, math.nan]),
        (logprobs(-0.5, -0.5, -0.5), [math.nan, math.nan]),
        ({"logprobs": None}, [math.nan, math.nan]),
        ({}, [math.nan, math.nan]),
    ],
)
def test_every_token_has_its_log_probability_or_none_has(about: dict[str, Any], expected: list[float]) -> None:
    (found,) = read(chat(**about))
    assert np.array_equal(found.logprobs, np.array(expected, np.float32), equal_nan=True)
    assert found.scored == (not any(map(math.isnan, expected)))


def test_a_prompt_may_stand_in_its_choice() -> None:
    """As in completions, whose request may hold several prompts."""
    made = {"choices": [{"index": at, "prompt_token_ids": [at], "token_ids": [9]} for at in (1, 2)]}
    found = read(json.dumps(made).encode())
    assert [(one.choice, one.prompt.tolist(), one.given) for one in found] == [(1, [1], True), (2, [2], True)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", ()),
        (b'{"choices": null}', ()),
        (b'{"content": [{"type": "text"}]}', ()),
        (b"", None),
        (b"[]", None),
        (b'{"choices": [{"index": "0"}]}', None),
        (chat(token_ids=[-1]), None),
        (chat(token_ids=[LARGEST + 1]), None),
        (chat(token_ids=["2"]), None),
        (b"[" * 100_000, None),
    ],
)
def test_what_is_no_answer_of_an_engine(body: bytes, expected: object) -> None:
    assert read_outputs(body, stream=False) == expected


@given(st.binary(max_size=200), st.booleans())
def test_nothing_raises(body: bytes, stream: bool) -> None:
    found = read_outputs(b"data: " + body + b"\n\n" if stream else body, stream)
    assert found is None or isinstance(found, tuple)


def test_a_stream_that_broke_off_has_what_came() -> None:
    whole = streamed(answer([1], [(2, 3, 4)]))
    cut = whole[: whole.index(b'"token_ids": [4]')]
    (found,) = read(cut, stream=True)
    assert found.ids.tolist() == [2, 3]


# -- what is said without tokens ---------------------------------------------------------------------------------------

ANY: st.SearchStrategy[Any] = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
MESSAGE: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(max_size=8) | ANY, "token_ids": ANY},
    optional={"tool_calls": st.just([{"id": "c", "function": {"name": "f", "arguments": '{"logprobs": 1}'}}])},
)
CHOICE: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"message": MESSAGE}, optional={"index": ANY, "logprobs": ANY, "token_ids": ANY, "finish_reason": ANY}
)
ANSWER: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {}, optional={"id": ANY, "choices": st.lists(CHOICE, max_size=3) | ANY, "prompt_token_ids": ANY, "usage": ANY}
)


@given(ANSWER | ANY, st.integers(0, 9999))
def test_an_answer_without_its_tokens_says_the_same(value: Any, seed: int) -> None:
    body, chat = written(value, Random(seed)).encode(), by_name("chat")
    assert chat.read(b"{}", strip_tokens(body), False) == chat.read(b"{}", body, False)


def test_what_says_nothing_of_tokens_or_cannot_be_read_stays() -> None:
    lean = json.loads(strip_tokens(json.dumps(answer([1, 2], [[3], [4]])).encode()))
    assert not {"prompt_token_ids", "token_ids", "logprobs"} & {*lean, *(key for it in lean["choices"] for key in it)}
    for body in (b"", b"[1]", b"{", b'{"choices": 1}', b'{"choices": [1]}', b"data: {}\n\n", b"\xff"):
        assert strip_tokens(body) == body
