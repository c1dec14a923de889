"""What is made of the engine's tokens: requests to derender, and a chat answer as vLLM writes one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from fakes.toy_template import Json
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.proxy.exact.chat_answer import (
    ChatCompletionWriter,
    ChoiceDelta,
    ChoiceStream,
    GenerateEvent,
    PendingTokens,
    decode_event,
)

ASKED: Json = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "logprobs": True,
    "return_token_ids": True,
}
RENDERED: Json = {"request_id": "chatcmpl-1"}
END = 1


def words(**more: Any) -> ChatCompletionWriter:
    return ChatCompletionWriter(ASKED | more, RENDERED, [5, 6])


def logprob(token: str, *tops: str) -> Json:
    return {"token": token, "logprob": -0.5, "bytes": [65], "top_logprobs": [{"token": one} for one in tops]}


def step(text: str | None = None, **delta: Any) -> bytes:
    """What derender answers."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text, "reasoning": None} | delta}
    return json.dumps({"chunk": {"choices": [choice]}, "stream_state": {"told": text}}).encode()


def data(event: bytes) -> Json:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize(
    ("finish", "stop", "more", "heard"),
    [
        ("stop", None, {}, [7]),
        ("stop", END, {}, [7]),
        ("stop", END, {"include_stop_str_in_output": True}, [7, END]),
        ("stop", "x", {}, [7, END]),
        ("length", None, {}, [7, END]),
        (None, None, {}, [7, END]),
    ],
)
def test_the_token_that_ends_a_turn_is_not_read_out(finish: Any, stop: Any, more: Json, heard: list[int]) -> None:
    made = json.loads(words(**more).stream_request(0, PendingTokens([7, END], None, finish, stop), b"null"))
    assert made["generate_chunk"]["choices"] == [{"index": 0, "token_ids": heard, "finish_reason": finish}]
    whole = words(**more).plain_request([ChoiceDelta(0, finish, stop, [7, END])])
    assert whole is not None
    assert json.loads(whole)["generate_response"]["choices"][0]["token_ids"] == heard


def test_derender_gets_the_prompt_and_no_conversation() -> None:
    made = json.loads(words(tools=[{"a": 1}], stream_options={}).stream_request(0, PendingTokens([7]), b'{"s":1}'))
    assert made["prompt_token_ids"] == [5, 6]
    assert made["stream_state"] == {"s": 1}
    assert made["chat_request"] == {"model": "m", "messages": [], "tools": [{"a": 1}]}


def test_an_answer_of_nothing_is_not_derendered() -> None:
    made, told = words(), GenerateEvent([ChoiceDelta(0, "stop", None, [END])], {"total_tokens": 1})
    assert made.plain_request(told.choices) is None
    (choice,) = json.loads(made.plain_answer(told, None))["choices"]
    assert (choice["message"], choice["token_ids"]) == ({"role": "assistant", "content": ""}, [END])


@pytest.mark.parametrize(
    ("finish", "choice", "told"),
    [
        ("stop", "auto", "tool_calls"),
        ("stop", {"function": {"name": "f"}}, "stop"),
        ("stop", "required", "tool_calls"),
        ("length", "auto", "tool_calls"),
        ("length", "required", "length"),
    ],
)
def test_why_an_answer_with_tool_calls_ended(finish: str, choice: Any, told: str) -> None:
    """As vLLM's chat endpoint says it of plain answers."""
    said = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]}}
    body = json.dumps({"choices": [said]}).encode()
    for parallel, count in ((True, 2), (False, 1)):
        made = words(tool_choice=choice, parallel_tool_calls=parallel)
        (found,) = json.loads(made.plain_answer(GenerateEvent([ChoiceDelta(0, finish, None, [7, END])]), body))[
            "choices"
        ]
        assert found["finish_reason"] == told
        assert len(found["message"]["tool_calls"]) == count


def test_a_streamed_choice() -> None:
    made = words(top_logprobs=1)
    voice = ChoiceStream(made, 2)
    opening = data(made.opening(2))
    assert opening["prompt_token_ids"] == [5, 6]
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    first = PendingTokens()
    first.add(ChoiceDelta(2, None, None, [7], {"content": [logprob("A", "A", "B")]}), None)
    first.add(ChoiceDelta(2, None, None, [8], {"content": [logprob("B", "B")]}), {"total_tokens": 4})
    assert json.loads(voice.derender_request(first))["stream_state"] is None
    chunk = data(voice.event(first, step("AB")))
    assert (chunk["id"], chunk["usage"]) == ("chatcmpl-1", {"total_tokens": 4})
    (choice,) = chunk["choices"]
    assert (choice["index"], choice["delta"], choice["token_ids"]) == (2, {"content": "AB"}, [7, 8])
    assert [one["top_logprobs"] for one in choice["logprobs"]["content"]] == [[{"token": "A"}], [{"token": "B"}]]
    call = {"index": 0, "id": "c", "type": None, "function": {"name": "f", "arguments": None}}
    second = PendingTokens([9, END], None, "stop")
    assert json.loads(voice.derender_request(second))["stream_state"] == {"told": "AB"}
    (choice,) = data(voice.event(second, step(None, tool_calls=[call])))["choices"]
    assert choice["delta"] == {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}
    assert choice["finish_reason"] == "tool_calls"


def test_a_token_without_text_is_an_event_without_a_delta() -> None:
    (choice,) = data(ChoiceStream(words(), 0).event(PendingTokens([7]), step()))["choices"]
    assert (choice["delta"], choice["token_ids"]) == ({}, [7])


@given(
    st.text("abST", max_size=12),
    st.lists(st.integers(0, 12), max_size=5),
    st.sampled_from([["ST"], ["aSTb", "S"], ["STSTST"]]),
    st.booleans(),
)
def test_a_stop_is_never_shown_and_nothing_else_is_lost(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    """The engine ends with the token that completes a stop, and may have written more in that token."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    end, stop = min(found, default=(len(text), None))
    places = sorted({0, *(cut for cut in cuts if cut < end), len(text)})
    voice, got = ChoiceStream(words(stop=stops, include_stop_str_in_output=include), 0), ""
    for a, b in pairwise(places):
        last = b == len(text)
        piece = PendingTokens([7], None, "stop" if last else None, stop if last else None)
        delta = data(voice.event(piece, step(text[a:b])))["choices"][0]["delta"]
        got += delta.get("content", "")
        assert text.startswith(got)
    if len(places) > 1:
        cut = end - (0 if include or stop is None else len(stop))
        assert got == (text if stop is None else text[:cut])


def test_what_generate_may_say() -> None:
    assert decode_event(b'{"error":{"message":"x"}}').error == {"message": "x"}
    assert (
        decode_event(b'{"choices":[{"index":0,"routed_experts":null,"text":"a"}],"usage":null}').choices[0].token_ids
        is None
    )
    with pytest.raises(ValueError, match="Expected"):
        decode_event(b'{"choices":[{"index":"a"}]}')
