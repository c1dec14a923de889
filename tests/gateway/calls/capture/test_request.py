"""What is added to a request, and what leaves it alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.capture.request import ask, identity, original
from penstock.gateway.dialects import by_name
from penstock.gateway.model.attributes import CAPTURED

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["model", "messages", "logprobs", "return_token_ids", "top_logprobs", "echo", "n"]) | st.text(
    max_size=4
)
BOTH: dict[str, Any] = {"return_token_ids": True, "logprobs": True}


@given(st.dictionaries(KEYS, JSON, max_size=6), st.sampled_from(["chat", "completions"]), st.sampled_from(["", " \n"]))
def test_what_is_added_is_new_and_everything_else_stays(asked: dict[str, Any], dialect: str, space: str) -> None:
    body = (space + json.dumps(asked, indent=1 if space else None) + space).encode()
    made = ask(by_name(dialect), body)
    if made is None:
        assert asked.get("echo") or {"return_token_ids", "logprobs"} <= asked.keys() | (
            {"logprobs"} if "top_logprobs" in asked else set()
        )
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
    made = ask(by_name(dialect), json.dumps(asked).encode())
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
    assert ask(by_name(dialect), body) is None


@pytest.mark.parametrize("attributes", [None, {}, {CAPTURED: []}, {CAPTURED: ["logprobs"]}, {CAPTURED: ["other"]}])
def test_a_request_that_was_not_asked_for_more_is_the_clients_own(attributes: dict[str, Any] | None) -> None:
    for body in (b"", b"{}", b'{"return_token_ids":true,"logprobs":true}'):
        assert original(by_name("chat"), body, attributes) == body


def test_half_a_surrogate_pair_does_not_matter() -> None:
    made = ask(by_name("chat"), rb'{"messages":"\ud83d"}')
    assert made is not None
    assert made.body == rb'{"return_token_ids":true,"logprobs":true,"messages":"\ud83d"}'


def test_an_answer_without_encoding_is_asked_for() -> None:
    gzip = (b"accept-encoding", b"Accept-Encoding", b"gzip, br")
    plain = (b"accept-encoding", b"Accept-Encoding", b"identity")
    other = (b"x-a", b"X-A", b"1")
    assert identity([gzip, other]) == [plain, other]
    assert identity([other]) == [other, plain]
