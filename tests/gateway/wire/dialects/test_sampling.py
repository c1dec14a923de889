"""How an answer was sampled and what forced it, in the words of every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Sampling, Turn
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.parts import distribution_changes, forcing_field, sampling_parameters

Json = dict[str, Any]


def read(dialect: str, asked: Json, answer: Json | None = None) -> Turn:
    return by_name(dialect).read(json.dumps(asked).encode(), json.dumps(answer or {}).encode(), False)


CHAT: Json = {"temperature": 0, "top_p": 0.5, "top_k": 20, "max_tokens": 9, "seed": 7, "n": 2, "stop": "x"}
GEMINI: Json = {"topP": 0.1, "maxOutputTokens": 2, "candidateCount": 3, "stopSequences": ["z"]}


@pytest.mark.parametrize(
    ("dialect", "asked", "answer", "expected"),
    [
        ("chat", {}, {}, Sampling()),
        ("chat", CHAT, {}, Sampling(temperature=0, top_p=0.5, top_k=20, max_tokens=9, seed=7, n=2, stop=["x"])),
        ("chat", {"max_tokens": 9, "max_completion_tokens": 8}, {}, Sampling(max_tokens=8)),
        ("completions", {"max_tokens": 9, "stop": ["a", "b"]}, {}, Sampling(max_tokens=9, stop=["a", "b"])),
        ("responses", {"max_output_tokens": 3}, {"temperature": 1.0}, Sampling(max_tokens=3, temperature=1)),
        ("responses", {"temperature": 0.5}, {"temperature": None}, Sampling(temperature=0.5)),
        ("messages", {"max_tokens": 4, "stop_sequences": ["x"]}, {}, Sampling(max_tokens=4, stop=["x"])),
        ("gemini", {"generationConfig": GEMINI}, {}, Sampling(top_p=0.1, max_tokens=2, n=3, stop=["z"])),
    ],
)  # fmt: skip
def test_what_is_known_of_the_sampling(dialect: str, asked: Json, answer: Json, expected: Sampling) -> None:
    assert read(dialect, asked, answer).effective == expected


@pytest.mark.parametrize(
    ("dialect", "asked", "what"),
    [
        ("chat", {"tool_choice": "required"}, "tool_choice required"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice function"),
        ("chat", {"tool_choice": {"type": "allowed_tools", "mode": "required"}}, "tool_choice allowed_tools"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format json_schema"),
        ("chat", {"response_format": {"type": "structural_tag"}}, "response_format structural_tag"),
        ("chat", {"structured_outputs": {"json": None, "choice": ["a"]}}, "structured_outputs.choice"),
        ("completions", {"guided_choice": ["a"]}, "guided_choice"),
        ("completions", {"ebnf": "x"}, "ebnf"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "a strict tool"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text json_schema"),
        ("responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice function"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice any"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config json_schema"),
    ],
)  # fmt: skip
def test_what_forces_tokens(dialect: str, asked: Json, what: str) -> None:
    assert read(dialect, asked).forced == what


FREE: list[Json] = [
    {},
    {"tool_choice": "auto"},
    {"tool_choice": "none", "tools": [{"function": {"name": "f", "strict": True}}]},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
    {"response_format": {"type": "text"}, "text": {"format": {"type": "text"}}},
    {"structured_outputs": {"json": None, "disable_any_whitespace": True}},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}, {"name": "g"}]},
    {"regex": None, "text": "words"},
]


def test_what_leaves_the_model_free() -> None:
    assert [asked for asked in FREE if forcing_field(asked) is not None] == []


def test_what_makes_it_another_distribution() -> None:
    assert (
        distribution_changes({"temperature": 1.0, "top_p": 1, "top_k": 0, "logit_bias": {}, "min_p": None, "seed": 3})
        == []
    )
    asked = {"temperature": 0, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {"5": 1}}
    assert distribution_changes(asked) == ["temperature 0", "top_p 0.9", "repetition_penalty 1.1", "logit_bias"]
    # At another temperature than 1, that one is what is expected.
    assert distribution_changes({"temperature": 0.7}, 0.7) == distribution_changes({}) == []
    assert distribution_changes({"top_p": 0.9}, 0.7) == ["temperature 1", "top_p 0.9"]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
NAMES = st.sampled_from([
    "temperature", "top_p", "top_k", "max_tokens", "seed", "n", "stop", "tool_choice", "response_format", "text",
    "tools", "structured_outputs", "output_config", "regex", "logit_bias",
])  # fmt: skip


@given(st.dictionaries(NAMES, ODD | st.lists(st.fixed_dictionaries({"function": ODD}), max_size=1)))
def test_odd_values_raise_nothing(asked: Json) -> None:
    Sampling.model_validate(sampling_parameters(asked, asked).model_dump())
    forcing_field(asked)
    distribution_changes(asked)
