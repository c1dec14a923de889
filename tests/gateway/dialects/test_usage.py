"""Token counts, wherever providers put them: the summary says what the turn does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.usage import quantity
from penstock.gateway.model.span import Usage
from penstock.gateway.store import codec
from penstock.gateway.store.records import USAGE

Json = dict[str, Any]
ASKED = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}'
HI = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
COUNTED = {"prompt_tokens": 10, "completion_tokens": 4}


def chat(usage: Any, **more: Any) -> Json:
    return {"id": "c", "model": "m", "choices": [HI], "usage": usage} | more


def responses(usage: Any, **more: Any) -> Json:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    return {"id": "r", "model": "m", "status": "completed", "output": [said], "usage": usage} | more


def messages(usage: Any) -> Json:
    said = {"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}
    return {"id": "m", "model": "m", "usage": usage} | said


def gemini(usage: Any, **candidate: Any) -> Json:
    said = {"content": {"role": "model", "parts": [{"text": "hi"}]}, "finishReason": "STOP"} | candidate
    return {"modelVersion": "m", "candidates": [said], "usageMetadata": usage}


def converse(usage: Any, **more: Any) -> Json:
    said = {"message": {"role": "assistant", "content": [{"text": "hi"}]}}
    return {"output": said, "stopReason": "end_turn", "usage": usage} | more


def read(dialect: str, body: bytes, stream: bool = False) -> Usage | None:
    """What the summary and the turn both say; it comes back from the tape as it is."""
    known = by_name(dialect)
    usage = known.facts(ASKED, body, stream).usage
    assert usage == known.read(ASKED, body, stream).usage
    if usage is not None:
        stored = codec.decode(codec.encode([codec.usage_values(usage)], [None]))[0]
        assert Usage(**dict(zip(USAGE, stored, strict=False))) == usage
    return usage


def counts(usage: Usage | None) -> tuple[Any, ...]:
    assert usage is not None
    told = (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cache_write_tokens)
    return (*told, usage.reasoning_tokens, usage.billed)


CASES: list[tuple[str, str, Json, tuple[Any, ...]]] = [
    ("plain", "chat", chat(COUNTED), (10, 4, None, None, None, None)),
    ("names of responses", "chat", chat({"input_tokens": 10, "output_tokens": 4}), (10, 4, None, None, None, None)),
    (
        "sources of a live search", "chat", chat(COUNTED | {"num_sources_used": 3}),
        (10, 4, None, None, None, {"calls": {"live_search": 3}}),
    ),
    ("names of chat", "responses", responses(COUNTED), (10, 4, None, None, None, None)),
    (
        "a point, a string", "chat", chat({"prompt_tokens": 10.0, "completion_tokens": "4"}),
        (10, 4, None, None, None, None),
    ),
    ("Kimi", "chat", {"model": "m", "choices": [HI, HI | {"usage": COUNTED}]}, (10, 4, None, None, None, None)),
    ("Groq", "chat", {"model": "m", "choices": [HI], "x_groq": {"usage": COUNTED}}, (10, 4, None, None, None, None)),
    ("cached beside", "chat", chat(COUNTED | {"cached_tokens": 8}), (10, 4, 8, None, None, None)),
    ("DeepSeek", "chat", chat(COUNTED | {"prompt_cache_hit_tokens": 8}), (10, 4, 8, None, None, None)),
    (
        "DeepSeek without a sum", "chat",
        chat({"prompt_cache_hit_tokens": 8, "prompt_cache_miss_tokens": 2, "completion_tokens": 4}),
        (10, 4, 8, None, None, None),
    ),
    (
        "xAI: reasoning beside", "chat",
        chat(COUNTED | {"completion_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 17}),
        (10, 7, None, None, 3, None),
    ),
    (
        "reasoning within", "chat",
        chat(COUNTED | {"completion_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 14}),
        (10, 4, None, None, 3, None),
    ),
    ("more reasoning than output", "chat", chat(COUNTED | {"reasoning_tokens": 30}), (10, 34, None, None, 30, None)),
    (
        "cache beside the input", "chat",
        chat(COUNTED | {"cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "total_tokens": 21}),
        (17, 4, 5, 2, None, None),
    ),
    (
        "audio, a tier", "chat",
        chat(
            COUNTED | {"prompt_tokens_details": {"audio_tokens": 6}, "completion_tokens_details": {"audio_tokens": 3}},
            service_tier="flex",
        ),
        (10, 4, None, None, None, {"tier": "flex", "input_audio": 6, "output_audio": 3}),
    ),
    ("the usual tier", "chat", chat(COUNTED, service_tier="default"), (10, 4, None, None, None, None)),
    ("OpenRouter", "chat", chat(COUNTED | {"cost": 0}), (10, 4, None, None, None, {"cost": 0.0})),
    (
        "a key of one's own at OpenRouter's provider", "chat",
        chat(COUNTED | {"cost": 0.01, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.2}}),
        (10, 4, None, None, None, {"cost": pytest.approx(0.21)}),
    ),
    ("Perplexity", "chat", chat(COUNTED | {"cost": {"total_cost": 0.5}}), (10, 4, None, None, None, {"cost": 0.5})),
    ("xAI's ticks", "chat", chat(COUNTED | {"cost_in_usd_ticks": 5e9}), (10, 4, None, None, None, {"cost": 0.5})),
    ("a cost that is none", "chat", chat(COUNTED | {"cost": -1}), (10, 4, None, None, None, None)),
    (
        "12 hours, tools", "responses",
        responses(
            {
                "input_tokens": 10, "output_tokens": 4,
                "input_tokens_details": {
                    "cached_tokens": 2, "cache_write_tokens": 5,
                    "cache_write_tokens_details": {"ttl_30m_tokens": 2, "ttl_12h_tokens": 3},
                },
            },
            tool_usage={"web_search": {"num_requests": 2}}, service_tier="priority",
        ),
        (10, 4, 2, 5, None, {"tier": "priority", "cache_write_long": 3, "calls": {"web_search": 2}}),
    ),
    (
        "tools by items", "responses",
        responses(
            COUNTED,
            output=[
                {"type": "web_search_call", "action": {"type": "search"}},
                {"type": "web_search_call", "action": {"type": "open_page"}}, {"type": "file_search_call"},
            ],
        ),
        (10, 4, None, None, None, {"calls": {"web_search": 1, "file_search": 1}}),
    ),
    (
        "1 hour, tools, speed, place", "messages",
        messages(
            {
                "input_tokens": 10, "output_tokens": 4, "cache_creation": {"ephemeral_1h_input_tokens": 5},
                "cache_read_input_tokens": 2, "server_tool_use": {"web_search_requests": 3}, "speed": "fast",
                "inference_geo": "us", "service_tier": "standard", "output_tokens_details": {"thinking_tokens": 1},
            }
        ),
        (17, 4, 2, 5, 1, {"speed": "fast", "geo": "us", "cache_write_long": 5, "calls": {"web_search": 3}}),
    ),
    (
        "compaction is added", "messages",
        messages(
            {
                "input_tokens": 10, "output_tokens": 4,
                "iterations": [
                    {"type": "compaction", "input_tokens": 100, "output_tokens": 40},
                    {"type": "message", "input_tokens": 10, "output_tokens": 4},
                ],
            }
        ),
        (110, 44, None, None, None, {"parts": [[None, 100, 40, None, None, None], [None, 10, 4, None, None, None]]}),
    ),
    (
        "a fallback has its own model", "messages",
        messages(
            {
                "input_tokens": 10, "output_tokens": 4,
                "iterations": [
                    {"type": "message", "input_tokens": 8, "output_tokens": 0},
                    {"type": "fallback_message", "model": "f", "input_tokens": 10, "output_tokens": 4},
                ],
            }
        ),
        (18, 4, None, None, None, {"parts": [[None, 8, 0, None, None, None], ["f", 10, 4, None, None, None]]}),
    ),
    (
        "one message as ever", "messages",
        messages({"input_tokens": 9, "output_tokens": 4, "iterations": [{"type": "message", "input_tokens": 9}]}),
        (9, 4, None, None, None, None),
    ),
    (
        "modalities, a tier, a search", "gemini",
        gemini(
            {
                "promptTokenCount": 10, "candidatesTokenCount": 4, "thoughtsTokenCount": 3,
                "trafficType": "ON_DEMAND_FLEX",
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 4}, {"modality": "AUDIO", "tokenCount": 6}],
                "candidatesTokensDetails": [{"modality": "IMAGE", "tokenCount": 2}],
            },
            groundingMetadata={"webSearchQueries": ["a", "b"]},
        ),
        (
            10, 7, None, None, 3,
            {"tier": "flex", "input_audio": 6, "output_image": 2, "calls": {"grounding": 1, "web_search": 2}},
        ),
    ),
    (
        "Converse", "converse",
        converse(
            {"inputTokens": 10, "outputTokens": 4, "cacheDetails": [{"ttl": "1h", "inputTokens": 5}]},
            serviceTier={"type": "priority"},
        ),
        (15, 4, None, 5, None, {"tier": "priority", "cache_write_long": 5}),
    ),
    ("a total", "embeddings", {"data": [], "usage": {"total_tokens": 7}}, (7, None, None, None, None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_counts_are_read_where_they_stand(dialect: str, body: Json, told: tuple[Any, ...]) -> None:
    assert counts(read(dialect, json.dumps(body).encode())) == told


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_quantity_is_a_count_or_nothing(value: Any) -> None:
    found = quantity(value)
    assert found is None or found >= 0
    assert type(value) is not int or not 0 <= value < 2**53 or found == value


COUNT = st.one_of(st.integers(0, 300), st.floats(0, 300), st.integers(0, 300).map(str), st.none())
NAMES = [
    "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens",
    "total_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "prompt_cache_hit_tokens", "cost",
    "promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "inputTokens", "outputTokens",
]  # fmt: skip
DETAILS = st.dictionaries(st.sampled_from(["cached_tokens", "reasoning_tokens", "audio_tokens"]), COUNT, max_size=3)
BESIDE: list[Json] = [{}, {"server_tool_use": {"web_search_requests": 2}}, {"service_tier": "batch"}]


@st.composite
def usages(draw: st.DrawFn) -> Any:
    """Counts of any of the APIs, or none."""
    own = draw(st.none() | st.dictionaries(st.sampled_from(NAMES), COUNT, max_size=6))
    details = {"prompt_tokens_details": draw(DETAILS), "output_tokens_details": draw(DETAILS)}
    return None if own is None else own | details | draw(st.sampled_from(BESIDE))


KINDS = st.sampled_from(["usage", "x_groq", "choice", "tier", "text"])
PLACES: st.SearchStrategy[list[tuple[str, Any]]] = st.lists(st.tuples(KINDS, usages()), max_size=9)


def _chunks(places: list[tuple[str, Any]]) -> list[Json]:
    def chunk(place: str, usage: Any) -> Json:
        choice: Json = {"index": 0, "delta": {"content": 'a "usage": {'}}
        beside: Json = {"usage": {"usage": usage}, "x_groq": {"x_groq": {"usage": usage}}}.get(place, {})
        beside |= {"service_tier": "flex"} if place == "tier" else {}
        return {"id": "c", "model": "m", "choices": [choice | ({"usage": usage} if place == "choice" else {})]} | beside

    return [*(chunk(*it) for it in places), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


def _message_events(places: list[tuple[str, Any]]) -> list[Json]:
    start = {"type": "message_start", "message": {"id": "m", "model": "m", "usage": next((u for _, u in places), None)}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": '"usage"'}}
    deltas = [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage} for _, usage in places[1:]
    ]
    pings = [{"type": "ping"}] * (len(places) % 4)
    return [start, block, {"type": "content_block_stop", "index": 0}, *deltas, *pings, {"type": "message_stop"}]


def _response_events(places: list[tuple[str, Any]]) -> list[Json]:
    events = [
        {"type": "response.created", "response": responses(usage) | {"status": "in_progress"}}
        if place == "choice"
        else {"type": "response.output_text.delta", "delta": "hi"} | ({"usage": usage} if place == "usage" else {})
        for place, usage in places[1:]
    ]
    return [*events, {"type": "response.completed", "response": responses(next((u for _, u in places), None))}]


def _gemini_events(places: list[tuple[str, Any]]) -> list[Json]:
    events = [gemini(usage) | ({} if place == "text" else {"x": 1}) for place, usage in places]
    return [{k: v for k, v in it.items() if v is not None} for it in events] + [gemini(None)]


SHAPES = {"chat": _chunks, "messages": _message_events, "responses": _response_events, "gemini": _gemini_events}


@given(st.sampled_from(sorted(SHAPES)), PLACES)
def test_a_summary_says_of_a_stream_what_the_turn_says(dialect: str, places: list[tuple[str, Any]]) -> None:
    events = SHAPES[dialect](places)
    compact = "".join(f"data: {json.dumps(it, separators=(',', ':'))}\n\n" for it in events)
    for body in (compact, "".join(f"data: {json.dumps(it)}\n\n" for it in events)):
        read(dialect, body.encode(), stream=True)


@given(st.sampled_from(["chat", "completions", "responses", "messages", "gemini", "converse", "embeddings"]), usages())
def test_a_summary_says_of_an_answer_what_the_turn_says(dialect: str, usage: Any) -> None:
    made = {"responses": responses, "messages": messages, "gemini": gemini, "converse": converse}.get(dialect, chat)
    read(dialect, json.dumps(made(usage)).encode())


def test_the_last_usage_of_a_stream_counts_wherever_it_stands() -> None:
    text = [("text", None)] * 8
    for place in ("usage", "x_groq", "choice"):
        events = _chunks([(place, COUNTED | {"prompt_tokens": 1}), (place, COUNTED), *text])
        body = "".join(f"data: {json.dumps(it)}\n\n" for it in events)
        assert counts(read("chat", body.encode(), stream=True))[:2] == (10, 4)
