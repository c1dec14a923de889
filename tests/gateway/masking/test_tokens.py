"""Where something was masked, no body of the call says it once more by its tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.gateway.dialects import by_name
from penstock.gateway.http.redact import Redactor
from penstock.gateway.masking.masker import Compiled, Masker, Tally
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.known_secrets import NONE, About
from penstock.gateway.releases.replay.questions import Question
from penstock.gateway.releases.replay.replies import Reply, complete
from penstock.gateway.store.records import Entry

CARD = "4111 1111 1111 1111"
ANSWER = About("application/json", answer=True)
STREAM = About("text/event-stream", answer=True)


def made() -> Masker:
    return Masker((), Compiled([MaskingRule(name="cards", pattern=r"\b(?:\d[ -]?){13,16}\b")]), Tally()).noting()


def without(body: bytes, about: About = ANSWER) -> bytes:
    return made().without_tokens(body, about)


SAID: dict[str, Any] = {
    "Ollama": {"context": [10, 2234, 30]},
    "SGLang": {"meta_info": {"output_top_logprobs": [[[-1, 2234, "4111"]]], "input_top_logprobs": [[[-1, 2234, ""]]]}},
    "TGI": {"details": {"prefill": [{"id": 2234}], "top_tokens": [[{"id": 2234, "text": "4111"}]]}},
    "Fireworks": {"raw_output": {"completion_token_ids": [2234, 2], "prompt_fragments": ["4111"]}},
    "TRL": {"prompt_ids": [[1, 2234]], "completion_ids": [[2234]]},
    "vLLM": {"token_strs": ["4111", " 1111"], "logprobs": [{"2234": -1}]},
}


@pytest.mark.parametrize("engine", SAID)
def test_every_engine_has_names_for_them(engine: str) -> None:
    kept = without(json.dumps(SAID[engine]).encode())
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
    cut, one = ANSWER._replace(cut=True), made()
    kept = one.without_tokens(one.body(answer[:-3], cut), cut)
    assert (len(kept), b"111" in kept, kept[:9]) == (len(answer) - 3, False, b'{"text": ')
    within = answer[:300]
    assert b"111" not in one.without_tokens(one.body(within, cut), cut)
    assert set(without(answer + b"oops")) == {ord("*")}
    assert without(b'{"a": 1} oops') == b'{"a": 1} oops'


def test_a_request_may_give_its_text_by_them() -> None:
    for name in ("prompt", "input_ids", "token_ids", "prompt_token_ids", "tokens", "prompt_ids"):
        body = json.dumps({"model": "m", name: [[101, 2023]]}).encode()
        assert json.loads(made().body(body, About("application/json"))) == {"model": "m", name: None}


def test_replays_have_none_and_count_what_was_used() -> None:
    answer = {
        "id": "x", "object": "chat.completion", "model": "m", "usage": {"prompt_tokens": 12, "completion_tokens": 3},
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": CARD}, "finish_reason": "stop",
            "token_ids": [1, 2234], "logprobs": {"content": [{"token": "4111", "logprob": -1, "bytes": [52]}]},
        }],
    }  # fmt: skip
    reply, entry = Reply([], 200, [(b"Content-Type", b"application/json")]), Entry("r", "a")
    reply.arrived(json.dumps(answer).encode(), 0.1)
    asked = {"model": "m", "messages": [{"role": "user", "content": CARD}]}
    question = SimpleNamespace(
        request=SimpleNamespace(headers=[]), path="/v1/chat/completions", body=json.dumps(asked).encode(),
        dialect=by_name("chat"), pool=SimpleNamespace(url="http://u".__add__),
    )  # fmt: skip
    turn, _ = complete(cast(Question, question), reply, entry, Redactor(NONE, made()))
    assert turn is not None
    assert entry.usage is not None
    assert (entry.usage.input_tokens, entry.usage.output_tokens, entry.choices) == (12, 3, 1)
    assert entry.body is not None
    assert not any(one in entry.body.response for one in (b"4111", b"2234"))
