"""Answers: what the agent is told of what the engine says, whole or event by event, however the stream is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fakes import vllm_wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.demo.model import DemoAnswer, DemoToolCall, pieces
from penstock.gateway.model.turn import Turn
from penstock.gateway.traffic.proxy.translation.framing import (
    AnswerConverter,
    AnswerPiece,
    StreamTranslationFraming,
    TranslationError,
)
from penstock.gateway.traffic.proxy.translation.framing import ChatAnswer as Read
from penstock.gateway.traffic.proxy.translation.framing import tool_calls as read_calls
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.messages import MessagesConverter
from penstock.gateway.traffic.proxy.translation.responses import ResponsesConverter
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj
from penstock.gateway.wire.dialects.sse import events
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

TELLINGS = {"messages": MessagesConverter, "responses": ResponsesConverter}
CAPTURED: Json = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
ASKED: Json = {"model": "policy", "stream": True, "messages": [], **CAPTURED}
BOTH = pytest.mark.parametrize("dialect", TELLINGS)
ABOUT: Json = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "policy"}


@dataclass
class Reads:
    """The slice of a link that a stream looks at."""

    pieces: list[bytes] = field(default_factory=list[bytes])
    done: bool = False
    chunked: bool = False
    length_known: bool = False


def converter_of(litellm: LiteLlmApi, dialect: str) -> AnswerConverter:
    return TELLINGS[dialect](litellm, {"model": "policy", "temperature": 0.5, "input": "hi"})


def told(litellm: LiteLlmApi, dialect: str, stream: bytes, cuts: list[int] | None = None) -> bytes:
    """What the agent gets of a stream that arrives in these pieces."""
    way, connection = StreamTranslationFraming(converter_of(litellm, dialect), http10=True), Reads()
    ends = [*sorted(set(cuts or ())), len(stream)]
    out = b""
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        connection.pieces, connection.done = [stream[start:end]], end == len(stream)
        out += way.go_on(cast(UpstreamConnection, connection), b"")
    assert b"".join(way.sent) == out
    return out


def streamed(answer: DemoAnswer) -> bytes:
    return b"".join(vllm_wire.chat_events(ASKED, answer))


def chunks(*deltas: Json, finish: str | None = "stop", **more: Any) -> bytes:
    """A stream of these deltas."""
    said = [ABOUT | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last: Json = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": None, **more}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    ends: list[Json] = [] if finish is None else [ABOUT | {"choices": [last]}, ABOUT | {"choices": [], "usage": usage}]
    return b"".join(vllm_wire.sse(one) for one in [*said, *ends]) + b"data: [DONE]\n\n"


def whole(litellm: LiteLlmApi, dialect: str, answer: Json) -> Json:
    read = Read()
    return converter_of(litellm, dialect).whole(read, read.plain(json.dumps(answer).encode()))


def kinds(stream: bytes) -> list[str]:
    return [loads(event.data)["type"] for event in events(stream)]


def last(stream: bytes) -> Json:
    return loads(list(events(stream))[-1].data)


def read(dialect: str, body: bytes, stream: bool) -> Turn:
    turn = by_name(dialect).read(b"{}", body, stream)
    assert [one for one in turn.problems if not one.startswith("request")] == []
    return turn


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3).map(json.dumps)
CALLS = st.lists(ARGUMENTS, max_size=3).map(
    lambda made: tuple(DemoToolCall(f"functions.get:{at}", "get", one) for at, one in enumerate(made))
)
WORDS = st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: "".join(pieces(text)))
ANSWERS = st.builds(DemoAnswer, WORDS, CALLS)
CUTS = st.lists(st.integers(0, 3000), max_size=8)
UNCACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@BOTH
@MANY
@given(answer=ANSWERS, cuts=CUTS)
def test_a_stream_says_the_same_however_it_is_cut(
    litellm: LiteLlmApi, dialect: str, answer: DemoAnswer, cuts: list[int]
) -> None:
    stream = streamed(answer)
    at_once = told(litellm, dialect, stream)
    assert told(litellm, dialect, stream, [cut for cut in cuts if cut < len(stream)]) == at_once
    assert by_name(dialect).is_complete(at_once)


def test_a_message_says_what_was_cached_as_anthropic_does(litellm: LiteLlmApi) -> None:
    chat = vllm_wire.chat(ASKED, DemoAnswer("hi"))
    assert whole(litellm, "messages", chat)["usage"].items() >= UNCACHED.items()
    chat["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
    assert whole(litellm, "messages", chat)["usage"].items() >= (UNCACHED | {"cache_read_input_tokens": 2}).items()


@BOTH
@MANY
@given(answer=ANSWERS)
def test_a_stream_and_a_plain_answer_say_the_same(litellm: LiteLlmApi, dialect: str, answer: DemoAnswer) -> None:
    plain = read(dialect, json.dumps(whole(litellm, dialect, vllm_wire.chat(ASKED, answer))).encode(), False)
    stream = read(dialect, told(litellm, dialect, streamed(answer)), True)
    assert stream.choices == plain.choices
    assert (stream.response_id, stream.model_served) == (plain.response_id, plain.model_served)
    assert stream.usage is not None
    assert plain.usage is not None
    assert stream.usage.input_tokens == plain.usage.input_tokens
    # The fake engine's streams end with a token of their own.
    assert stream.usage.output_tokens == (plain.usage.output_tokens or 0) + 1
    said = [part for part in plain.choices[0].message.parts if part.type == "tool_call"] if plain.choices else []
    assert [part.id for part in said] == [call.id for call in answer.calls]
    assert [loads(part.arguments or "") for part in said] == [loads(call.arguments) for call in answer.calls]


@BOTH
def test_chunks_that_say_nothing_and_chunks_that_say_much(litellm: LiteLlmApi, dialect: str) -> None:
    heads = [{"index": at, "id": f"c{at}", "function": {"name": "get", "arguments": f'{{"x":{at}}}'}} for at in (0, 1)]
    stream = chunks(
        {"role": "assistant", "content": ""}, {}, {"content": "a"}, {}, {"content": None, "tool_calls": heads}
    )
    apart = chunks({"content": "a"}, {"tool_calls": heads[:1]}, {}, {}, {"tool_calls": heads[1:]})
    assert told(litellm, dialect, stream) == told(litellm, dialect, apart)


@BOTH
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning(litellm: LiteLlmApi, dialect: str, name: str) -> None:
    out = told(litellm, dialect, chunks({name: "hm "}, {name: "so"}, {"content": "4"}))
    parts = read(dialect, out, True).choices[0].message.parts
    assert [(part.type, part.text) for part in parts] == [("reasoning", "hm so"), ("text", "4")]


def test_the_events_of_a_message(litellm: LiteLlmApi) -> None:
    made = kinds(told(litellm, "messages", streamed(DemoAnswer("Hi", (DemoToolCall("c1", "get", "{}"),)))))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert made == ["message_start", *block, *block, "message_delta", "message_stop"]


def test_the_events_of_a_response_end_each_item_before_the_next(litellm: LiteLlmApi) -> None:
    out = told(
        litellm,
        "responses",
        chunks({"reasoning": "hm"}, {"content": "Hi"}, *called("c1", "{}"), *called("c2", "[1", 1)),
    )
    made = [loads(event.data) for event in events(out)]
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    items = [
        (event["type"].rpartition(".")[2], event["output_index"]) for event in made if "output_item" in event["type"]
    ]
    assert items == [(kind, at) for at in range(4) for kind in ("added", "done")]
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert made[-1]["response"]["output"] == done
    assert [item["id"] for item in done] == ["rs_chatcmpl-1", "msg_chatcmpl-1", "fc_c1", "fc_c2"]
    assert done[3]["arguments"] == "[1"
    assert made[-1]["response"]["id"] == made[0]["response"]["id"] == "chatcmpl-1"


def called(known_as: str, arguments: str, index: int = 0) -> list[Json]:
    head = {"index": index, "id": known_as, "type": "function", "function": {"name": "get"}}
    return [{"tool_calls": [head]}, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("finish", "stop", "made"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 17, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_why_a_message_ended(litellm: LiteLlmApi, finish: str, stop: Any, made: tuple[str, str | None]) -> None:
    out = told(litellm, "messages", chunks({"content": "a"}, finish=finish, stop_reason=stop))
    delta = next(found for event in events(out) if (found := loads(event.data))["type"] == "message_delta")["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == made
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
        "finish_reason": finish,
        "stop_reason": stop,
    }
    plain = whole(litellm, "messages", ABOUT | {"choices": [choice]})
    assert (plain["stop_reason"], plain["stop_sequence"]) == made


def test_a_prescribed_tool_ends_a_message_as_any_other(litellm: LiteLlmApi) -> None:
    out = told(litellm, "messages", chunks(*called("c1", "{}"), finish="stop"))
    assert b'"stop_reason":"tool_use"' in out


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [("stop", "completed", None), ("length", "incomplete", "max_output_tokens"), ("tool_calls", "completed", None)],
)
def test_why_a_response_ended(litellm: LiteLlmApi, finish: str, status: str, reason: str | None) -> None:
    end = last(told(litellm, "responses", chunks({"content": "a"}, finish=finish)))
    assert end["type"] == f"response.{status}"
    response, details = end["response"], obj(end["response"]["incomplete_details"])
    assert (response["status"], details.get("reason")) == (status, reason)
    assert response["output"][0]["status"] == status
    assert response["usage"] == {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8, "cost": None} | {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def test_arguments_that_are_no_object_are_told_as_they_are(litellm: LiteLlmApi) -> None:
    answer = vllm_wire.chat(
        ASKED,
        DemoAnswer(
            "", (DemoToolCall("c1", "get", '{"x": 1'), DemoToolCall("c2", "get", "[1]"), DemoToolCall("c3", "get", ""))
        ),
    )
    blocks = whole(litellm, "messages", answer)["content"]
    assert [block["input"] for block in blocks] == [{"INVALID_JSON": '{"x": 1'}, {"INVALID_JSON": "[1]"}, {}]
    assert [item["arguments"] for item in whole(litellm, "responses", answer)["output"]] == ['{"x": 1', "[1]", ""]


@pytest.mark.parametrize(
    ("pieces", "made"),
    [
        (["[1", "]"], ['{"INVALID_JSON":"[1]"}']),
        ([" ", "tr", "ue"], ['{"INVALID_JSON":" true"}']),
        (["\n", ' {"x"', ":1}"], ['\n {"x"', ":1}"]),
        ([" "], []),
        (['{"x', '": }'], ['{"x', '": }']),
    ],
)
def test_arguments_of_a_stream_begin_as_an_object_does(litellm: LiteLlmApi, pieces: list[str], made: list[str]) -> None:
    head, *_ = called("c1", "")
    parts = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    for after in ([], [{"content": "so"}], called("c2", "{}", 1)):
        out = told(litellm, "messages", chunks(head, *parts, *after))
        deltas = [
            found["delta"]
            for event in events(out)
            if (found := loads(event.data)).get("index") == 0 and "delta" in found
        ]
        assert [delta["partial_json"] for delta in deltas] == made


ODD: list[list[Any]] = [
    [(0, "a", "f", '{"x":1}'), (0, "b", "g", "{}")],
    [(None, "a", "f", '{"x":'), (None, None, None, "1}"), (None, "b", "g", "{}")],
    [(0, "a", "f", '{"x"'), (0, "a", "f", ":1}"), (1, "b", "g", "{}")],
    [(0, "", "f", {"x": 1}), (1, "", "g", {})],
    [(0, "a", "f", '{"x":1}'), (0, "a", None, '{"x":1}'), (0, "b", "g", "{}")],
]


@pytest.mark.parametrize("deltas", ODD, ids=["one index", "no index", "names again", "objects, no ids", "whole again"])
def test_calls_of_odd_engines(deltas: list[Any]) -> None:
    answer, found = Read(), list[AnswerPiece]()
    for index, id, name, arguments in deltas:
        call = {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}
        found += answer.chunk(json.dumps({"id": "c", "choices": [{"delta": {"tool_calls": [call]}}]}))
    calls = read_calls(found)
    assert [(call.name, loads(arguments)) for call, arguments in calls] == [("f", {"x": 1}), ("g", {})]
    assert len({call.text for call, _ in calls} - {""}) == 2


def test_an_answer_that_says_nothing(litellm: LiteLlmApi) -> None:
    assert kinds(told(litellm, "messages", chunks())) == ["message_start", "message_delta", "message_stop"]
    assert last(told(litellm, "responses", chunks()))["response"]["output"] == []


BROKEN: list[tuple[bytes, str]] = [
    (chunks({"content": "a"}, finish=None), "the engine's answer ended early"),
    (chunks({"content": "a"}, finish="abort"), "the engine ended its answer with finish_reason 'abort'"),
    (vllm_wire.sse({"error": {"message": "out of memory", "code": 500}}), "out of memory"),
    (b"data: {\n\n", "the engine's answer is not readable JSON"),
    (
        chunks(*called("c1", "{}"), *called("c2", "{}", 1), called("c1", "{}")[1]),
        "the engine's tool calls come out of order",
    ),
]


@BOTH
@pytest.mark.parametrize(("stream", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_an_answer_that_cannot_be_told_ends_in_an_error(
    litellm: LiteLlmApi, dialect: str, stream: bytes, message: str
) -> None:
    end = last(told(litellm, dialect, chunks({"content": "a"}, finish=None)[: -len(b"data: [DONE]\n\n")] + stream))
    if dialect == "messages":
        assert (end["type"], end["error"]["type"]) == ("error", "api_error")
        assert end["error"]["message"].startswith(message)
    else:
        assert (end["type"], end["response"]["status"]) == ("response.failed", "failed")
        assert end["response"]["error"]["message"].startswith(message)


@BOTH
def test_an_error_before_anything_else(litellm: LiteLlmApi, dialect: str) -> None:
    end = last(told(litellm, dialect, BROKEN[2][0]))
    assert end["type"] == "error"
    assert "out of memory" in json.dumps(end)


NONE: list[Json] = [{}, {"choices": []}, {"error": {"message": "no"}}, {"choices": [{"message": {}}]}]


@pytest.mark.parametrize("answer", NONE)
def test_a_plain_answer_that_is_none(answer: Json) -> None:
    with pytest.raises(TranslationError):
        Read().plain(json.dumps(answer).encode())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_call_of_a_namespace_has_its_agents_names(litellm: LiteLlmApi, stream: bool) -> None:
    space: Json = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "get"}]}
    made = ResponsesConverter(
        litellm, {"model": "m", "input": "hi", "tools": [space, {"type": "function", "name": "get"}]}
    )
    answer, pieces = Read("c", "m", finish="tool_calls"), [AnswerPiece("call", "c1", "agents__get")]
    pieces.append(AnswerPiece("call", "c2", "get"))
    if stream:
        _ = made.begin(answer)
        items = [event["item"] for piece in pieces for event in made.feed(piece) if "item" in event]
    else:
        items = made.whole(answer, pieces)["output"]
    named = {(item["call_id"], item["name"], item.get("namespace")) for item in items}
    assert named == {("c1", "get", "agents"), ("c2", "get", None)}
