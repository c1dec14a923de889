"""What an answer's bytes hold and its reading does not: known shapes are silent, and what is new is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import formats, vllm_wire
from fakes.event_stream import event
from hypothesis import example, given
from hypothesis import strategies as st

from examples.demo import model
from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects import unread_content as module
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.sse import distinct_events
from penstock.gateway.wire.dialects.unread_content import SHAPES, Gaps, find_unread

Json = dict[str, Any]
ASKED: Json = {"model": "m", "messages": [{"role": "user", "content": "what?"}], "tools": [{"function": {"name": "f"}}]}
COUNTS = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
SAID = "a text that nobody reads"


def gaps(dialect: str, body: bytes, stream: bool, asked: Json = ASKED) -> Gaps:
    one, request = by_name(dialect), json.dumps(asked).encode()
    brief = distinct_events(body).body if stream and one.streaming_content_type == EVENT_STREAM else body
    return find_unread(one, request, body, stream, one.facts(request, brief, stream), brief)


def sse(*events: Json) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]} | more


def called(index: int, id: str, arguments: Any) -> Json:
    return {"tool_calls": [{"index": index, "id": id, "function": {"name": "f", "arguments": arguments}}]}


END, USED = chunk(finish="stop"), Json(choices=[], usage=COUNTS)
HELLO = chunk({"role": "assistant", "content": "hello there"})
THOUGHT = {"type": "reasoning.text", "text": SAID, "format": "x", "index": 0}


# --- what is known is silent ---


def known() -> Iterator[tuple[str, bytes, bool]]:
    """Every answer that the fakes of providers give, in every format."""
    calls = (DemoToolCall("call_1", "f", '{"city": "Paris"}'), DemoToolCall("call_2", "f", '{"city": "Rome"}'))
    answers = [
        DemoAnswer("Say what?"),
        DemoAnswer("word " * 40, thinking="Let me see. " * 9),
        DemoAnswer("", calls=calls[:1]),
    ]
    for answer in [*answers, DemoAnswer('Two: "quoted" \\ and {more}', calls=calls)]:
        asked = ASKED | {"stream_options": {"include_usage": True}, "return_token_ids": True, "logprobs": True}
        for request in (ASKED, asked, asked | {"n": 2}):
            yield "chat", json.dumps(vllm_wire.chat(request, answer)).encode(), False
            yield "chat", b"".join(vllm_wire.chat_events(request, answer)), True
        text = {"model": "m", "prompt": "what?", "stream_options": {"include_usage": True}}
        yield "chat", json.dumps(model.chat(ASKED, answer)).encode(), False
        yield "chat", b"".join(model.chat_events(asked, answer)), True
        yield "messages", json.dumps(model.message(ASKED, answer)).encode(), False
        yield "messages", b"".join(model.message_events(ASKED, answer)), True
        yield "responses", json.dumps(formats.response(ASKED, answer)).encode(), False
        yield "responses", b"".join(formats.response_events(ASKED, answer)), True
        yield "completions", json.dumps(formats.completion(text, answer)).encode(), False
        yield "completions", b"".join(formats.completion_events(text, answer)), True


def test_of_every_answer_that_is_known_all_is_read() -> None:
    found = [(dialect, stream, gaps(dialect, body, stream)) for dialect, body, stream in known()]
    assert [one for one in found if one[2]] == []
    assert len(found) > 40


@pytest.mark.parametrize(
    "events",
    [
        [HELLO, END, USED],
        [HELLO | {"provider": "Deep Infra", "system_fingerprint": "fp_1", "obfuscation": "xyzabc"}, END],
        [chunk({"content": "hello", "annotations": [{"url_citation": {"title": SAID}}]}), END],
        [chunk({"content": "hello", "phase": "final_answer", "novel_id": "msg 1 2 3"}), END],
        [chunk({"reasoning": SAID, "reasoning_details": [THOUGHT]}), HELLO, END],
        [chunk({"reasoning_details": [{"type": "reasoning.encrypted", "data": "QUJD" * 20}]}), HELLO, END],
        [chunk(called(0, "a", '{"x":1}')), chunk(called(1, "b", '{"y":2}')), chunk(finish="tool_calls"), USED],
        [chunk(called(0, "a", "")), chunk({"tool_calls": [{"id": "b", "function": {"arguments": "{}"}}]}), END],
        [HELLO, END | {"usage": COUNTS, "x_groq": {"id": "r", "usage": COUNTS}}],
        [chunk({"content": "hello", "padding": "abc def"}), chunk({"executed_tools": [{"output": SAID}]}), END],
        [HELLO, END | {"web_search": [{"content": SAID, "title": "a"}]}],
        [HELLO, END | {"timings": {"predicted_n": 4}, "metadata": {"text": SAID}, "latency_checkpoint": {"a": 1.5}}],
    ],
)
def test_what_says_nothing_new_is_no_problem(events: list[Json]) -> None:
    assert gaps("chat", sse(*events), True) == {}
    assert gaps("chat", sse(*[HELLO] * 30, *events), True) == {}, "however long the stream is"


def test_a_message_between_agents_names_who_speaks() -> None:
    """Of the Responses API with `multi_agent`: the names are no output of the model."""
    said = {
        "id": "am_1", "type": "agent_message", "author": "/root/alpha of the team", "recipient": "/root",
        "content": [{"type": "text", "text": SAID}], "agent": {"agent_name": "/root/alpha of the team"},
    }  # fmt: skip
    assert gaps("responses", json.dumps({"id": "resp_1", "object": "response", "output": [said]}).encode(), False) == {}


def test_a_message_that_grows_beside_its_deltas_is_read() -> None:
    """As Perplexity sends it."""
    said = ["one", " two", " three", ""]
    events = [chunk({"content": piece}) for piece in said]
    for at, one in enumerate(events):
        one["choices"][0]["message"] = {"role": "assistant", "content": "".join(said[: at + 1])}
    assert gaps("chat", sse(*events, END), True) == {}
    events[2]["choices"][0]["message"]["content"] = SAID
    assert gaps("chat", sse(*events[:3], END), True) == {"choices[].message.content": "text"}


# --- what is new is told ---

NOVEL_CALL = {"novel_call": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([chunk({"novel_text": SAID}), HELLO, END], {"choices[].delta.novel_text": "text"}),
        ([HELLO, END | {"novel": {"answer": SAID}}], {"novel.answer": "text"}),
        ([chunk({"parts": [{"say": SAID}]}), END], {"choices[].delta.parts[].say": "text"}),
        ([chunk(NOVEL_CALL), END], {"choices[].delta.novel_call.arguments": "tool_calls"}),
        ([HELLO, END | {"novel": {"usage": COUNTS}}], {"novel.usage": "usage"}),
        ([HELLO, END, Json(choices=[], usage={"tokens_in": 3})], {"usage": "usage"}),
        ([HELLO, END | {"novel": {"output_ids": [1, 2, 3]}}], {"novel.output_ids[]": "token_ids"}),
    ],
)
def test_what_is_new_is_told_with_its_path(events: list[Json], expected: Gaps) -> None:
    assert gaps("chat", sse(*events), True) == expected
    assert gaps("chat", sse(*[HELLO] * 20, *events), True) == expected, "also behind many events that are alike"


BEGUN: Json = {"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 1}}
MESSAGE: Json = {"type": "message_start", "message": BEGUN}
STOPPED: Json = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}
DONE: Json = {"id": "r", "status": "completed", "output": [], "usage": {"input_tokens": 1, "output_tokens": 2}}
PART: Json = {"content": {"parts": [{"text": "hi"}], "novelText": SAID}, "finishReason": "STOP"}
NOVEL = event("novelDelta", {"delta": {"text": SAID}, "contentBlockIndex": 0})
FRAMES = [event("messageStart", {"role": "assistant"}), NOVEL, event("messageStop", {"stopReason": "end_turn"})]
DELTA: list[Json] = [{"type": "response.novel.delta", "delta": SAID}, {"type": "response.completed", "response": DONE}]


@pytest.mark.parametrize(
    ("dialect", "events", "expected"),
    [
        ("messages", [MESSAGE, {"type": "novel_delta", "delta": {"text": SAID}}, STOPPED], "(novel_delta).delta.text"),
        ("messages", [MESSAGE | {"message": BEGUN | {"novel_text": SAID}}, STOPPED], "message.novel_text"),
        ("responses", DELTA, "(response.novel.delta).delta"),
        ("responses", DONE | {"novel_output": [{"text": SAID}]}, "novel_output[].text"),
        ("completions", {"choices": [{"text": "hi", "novel_text": SAID}]}, "choices[].novel_text"),
        ("gemini", [{"candidates": [PART]}], "candidates[].content.novelText"),
        ("converse", FRAMES, "novelDelta.delta.text"),
    ],
)
def test_each_format_has_its_net(dialect: str, events: Any, expected: str) -> None:
    stream = not isinstance(events, dict)
    body = json.dumps(events).encode() if not stream else b"".join(events) if dialect == "converse" else sse(*events)
    found = gaps(dialect, body, stream)
    assert found.get(expected) == "text", found
    assert gaps("opaque", body, stream) == {}


def test_ids_and_log_probabilities_that_cannot_be_are_told() -> None:
    answer = {"content": [{"token": "a", "logprob": 0.7}]}
    choice = {"index": 0, "token_ids": [7], "logprobs": answer, "message": {"content": "a"}, "finish_reason": "stop"}
    body = {"prompt_token_ids": [1, 2], "choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 9}}
    told = gaps("chat", json.dumps(body).encode(), False)
    assert told == {"choices[].token_ids": "token_counts", "choices[].logprobs": "logprobs"}


@given(st.dictionaries(st.text(max_size=60), st.text(max_size=5) | st.integers() | st.lists(st.text()), max_size=4))
@example({"A.": 1})
def test_users_words_are_in_no_path_and_nothing_raises(novel: Json) -> None:
    plain = json.dumps({"choices": [novel]}).encode()
    for body, stream in ((sse(chunk({"content": novel}), END), True), (plain, False)):
        for path in gaps("chat", body, stream):
            assert len(path) <= module.LONGEST
            assert all(ord(letter) < 128 and letter not in " '\"" for letter in path)


@given(st.binary(max_size=300), st.booleans(), st.sampled_from(sorted(SHAPES)))
def test_odd_bytes_never_raise(body: bytes, stream: bool, dialect: str) -> None:
    gaps(dialect, b"data: " + body + b"\n\n" if stream else body, stream)


def test_the_ordinary_answer_is_not_read_as_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would cost many times what the rest of the recording does."""

    def read(*_: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(type(by_name("chat")), "read", read)
    for count in (1, 20, 500):
        assert gaps("chat", sse(*[HELLO] * count, END, USED), True) == {}
