"""Token counts, wherever providers put them: the summary says what the turn does; and guesses, kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import vllm_wire
from fakes.local import locally
from fakes.process import upstream
from fakes.provider import Provider
from fakes.tape import Tape
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.model import DemoAnswer
from penstock.console.views import rollouts
from penstock.gateway.client.tables import row
from penstock.gateway.model.rollout import Totals, sum_totals
from penstock.gateway.model.span import Estimate, Span, Usage
from penstock.gateway.tape.store import codec
from penstock.gateway.tape.store.records import USAGE
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import ANSWER_TEXT, DELTA_TEXT
from penstock.gateway.wire.dialects.tokens import estimate_usage, lacks_token_counts, quantity, usage_from_token_ids

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


def used(
    read: int | None = 10,
    made: int | None = 4,
    cached: Any = None,
    written: Any = None,
    thought: Any = None,
    **billed: Any,
) -> tuple[Any, ...]:
    """What is counted, and how it is billed."""
    return (read, made, cached, written, thought, billed or None)


IO = {"input_tokens": 10, "output_tokens": 4}
SPLIT = {"prompt_cache_hit_tokens": 8, "prompt_cache_miss_tokens": 2, "completion_tokens": 4}
THOUGHT = COUNTED | {"completion_tokens_details": {"reasoning_tokens": 3}}
BESIDE_INPUT = {"cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "total_tokens": 21}
HEARD = {"prompt_tokens_details": {"audio_tokens": 6}, "completion_tokens_details": {"audio_tokens": 3}}
OWN_KEY = {"cost": 0.01, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.2}}
LASTING: Json = {"cached_tokens": 2, "cache_write_tokens": 5} | {
    "cache_write_tokens_details": {"ttl_30m_tokens": 2, "ttl_12h_tokens": 3}
}
SEARCHED = {"tool_usage": {"web_search": {"num_requests": 2}}, "service_tier": "priority"}
TOOLS: list[Json] = [
    {"type": "web_search_call", "action": {"type": "search"}},
    {"type": "web_search_call", "action": {"type": "open_page"}},
    {"type": "file_search_call"},
]
FAST: Json = (
    {"cache_creation": {"ephemeral_1h_input_tokens": 5}, "cache_read_input_tokens": 2, "speed": "fast"}
    | {"server_tool_use": {"web_search_requests": 3}, "inference_geo": "us", "service_tier": "standard"}
    | {"output_tokens_details": {"thinking_tokens": 1}}
)


def iterations(*each: tuple[str, int, int | None], **more: Any) -> Json:
    """A message's usage with those of its parts: kind, input, output."""
    told = [{"type": kind, "input_tokens": read, "output_tokens": made} | more for kind, read, made in each]
    return IO | {"iterations": [{name: it for name, it in one.items() if it is not None} for one in told]}


FALLBACK = iterations(("message", 8, 0), ("fallback_message", 10, 4))
FALLBACK["iterations"][1]["model"] = "f"
ONE = iterations(("message", 9, None)) | {"input_tokens": 9}
SEEN: Json = (
    {"promptTokenCount": 10, "candidatesTokenCount": 4, "thoughtsTokenCount": 3, "trafficType": "ON_DEMAND_FLEX"}
    | {"promptTokensDetails": [{"modality": "TEXT", "tokenCount": 4}, {"modality": "AUDIO", "tokenCount": 6}]}
    | {"candidatesTokensDetails": [{"modality": "IMAGE", "tokenCount": 2}]}
)
QUERIES = {"webSearchQueries": ["a", "b"]}
KEPT = {"inputTokens": 10, "outputTokens": 4, "cacheDetails": [{"ttl": "1h", "inputTokens": 5}]}
PRIORITY: Json = {"serviceTier": {"type": "priority"}}
CASES: list[tuple[str, str, Json, tuple[Any, ...]]] = [
    ("plain", "chat", chat(COUNTED), used()),
    ("names of responses", "chat", chat(IO), used()),
    ("sources of a live search", "chat", chat(COUNTED | {"num_sources_used": 3}), used(calls={"live_search": 3})),
    ("names of chat", "responses", responses(COUNTED), used()),
    ("a point, a string", "chat", chat({"prompt_tokens": 10.0, "completion_tokens": "4"}), used()),
    ("Kimi", "chat", {"model": "m", "choices": [HI, HI | {"usage": COUNTED}]}, used()),
    ("Groq", "chat", {"model": "m", "choices": [HI], "x_groq": {"usage": COUNTED}}, used()),
    ("cached beside", "chat", chat(COUNTED | {"cached_tokens": 8}), used(cached=8)),
    ("DeepSeek", "chat", chat(COUNTED | {"prompt_cache_hit_tokens": 8}), used(cached=8)),
    ("DeepSeek without a sum", "chat", chat(SPLIT), used(cached=8)),
    ("xAI: reasoning beside", "chat", chat(THOUGHT | {"total_tokens": 17}), used(made=7, thought=3)),
    ("reasoning within", "chat", chat(THOUGHT | {"total_tokens": 14}), used(thought=3)),
    ("more reasoning than output", "chat", chat(COUNTED | {"reasoning_tokens": 30}), used(made=34, thought=30)),
    ("cache beside the input", "chat", chat(COUNTED | BESIDE_INPUT), used(17, cached=5, written=2)),
    (
        "audio, a tier",
        "chat",
        chat(COUNTED | HEARD, service_tier="flex"),
        used(tier="flex", input_audio=6, output_audio=3),
    ),
    ("the usual tier", "chat", chat(COUNTED, service_tier="default"), used()),
    ("OpenRouter", "chat", chat(COUNTED | {"cost": 0}), used(cost=0.0)),
    ("a key of one's own at its provider", "chat", chat(COUNTED | OWN_KEY), used(cost=pytest.approx(0.21))),
    ("Perplexity", "chat", chat(COUNTED | {"cost": {"total_cost": 0.5}}), used(cost=0.5)),
    ("xAI's ticks", "chat", chat(COUNTED | {"cost_in_usd_ticks": 5e9}), used(cost=0.5)),
    ("a cost that is none", "chat", chat(COUNTED | {"cost": -1}), used()),
    (
        "12 hours, tools",
        "responses",
        responses(IO | {"input_tokens_details": LASTING}, **SEARCHED),
        used(cached=2, written=5, tier="priority", cache_write_long=3, calls={"web_search": 2}),
    ),
    (
        "tools by items",
        "responses",
        responses(COUNTED, output=TOOLS),
        used(calls={"web_search": 1, "file_search": 1}),
    ),
    (
        "1 hour, tools, speed, place",
        "messages",
        messages(IO | FAST),
        used(17, 4, 2, 5, 1, speed="fast", geo="us", cache_write_long=5, calls={"web_search": 3}),
    ),
    (
        "compaction is added",
        "messages",
        messages(iterations(("compaction", 100, 40), ("message", 10, 4))),
        used(110, 44, parts=[[None, 100, 40, None, None, None], [None, 10, 4, None, None, None]]),
    ),
    (
        "a fallback has its own model",
        "messages",
        messages(FALLBACK),
        used(18, 4, parts=[[None, 8, 0, None, None, None], ["f", 10, 4, None, None, None]]),
    ),
    ("one message as ever", "messages", messages(ONE), used(9)),
    (
        "modalities, a tier, a search",
        "gemini",
        gemini(SEEN, groundingMetadata=QUERIES),
        used(10, 7, thought=3, tier="flex", input_audio=6, output_image=2, calls={"grounding": 1, "web_search": 2}),
    ),
    (
        "Converse",
        "converse",
        converse(KEPT, **PRIORITY),
        used(15, 4, written=5, tier="priority", cache_write_long=5),
    ),
    ("a total", "embeddings", {"data": [], "usage": {"total_tokens": 7}}, used(7, None)),
]


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


# -- tokens that nobody counted: exact where the engine gave ids, else a guess, never 0 --------------------------------


KNOWN = Usage(input_tokens=5, output_tokens=7)
HALF = Usage(input_tokens=5)
STREAMED: Any = {"model": "m", "messages": [{"role": "user", "content": "How much is 19 times 23?"}], "stream": True}


def span(**fields: Any) -> Span:
    about: dict[str, Any] = {"rollout": "r", "attempt": "a", "sequence": 1, "dialect": "chat", "upstream": "up"}
    return Span(**about | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"usage": None}, True),
        ({"usage": HALF}, True),
        ({"usage": KNOWN}, False),
        ({"usage": HALF, "dialect": "embeddings"}, False),
        ({"http_status": 429, "status": "error"}, False),
        ({"http_status": 200, "status": "error", "error": "error_body"}, False),
        ({"http_status": 200, "status": "error", "error": "ended_early"}, True),
        ({"status": "cancelled"}, True),
        ({"status": "interrupted"}, True),
        ({"status": "open"}, False),
        ({"upstream": None}, False),
        ({"dialect": "count_tokens"}, False),
        ({"dialect": "opaque"}, False),
        ({"kind": "tool"}, False),
    ],
    ids=str,
)
def test_what_counts_as_uncounted(fields: dict[str, Any], expected: bool) -> None:
    call = span(**fields)
    assert lacks_token_counts(call, by_name(call.dialect)) == expected


@given(st.text(max_size=400), st.text(max_size=400), st.booleans())
def test_an_estimate_goes_by_the_bytes_of_the_texts(asked: str, said: str, spaced: bool) -> None:
    separators = (", ", ": ") if spaced else (",", ":")

    def dump(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=separators).encode("utf-8", "surrogatepass")

    request = dump(
        {"messages": [{"content": [{"text": asked}, {"image_url": {"url": "data:image/png;base64," + "A" * 999}}]}]}
    )
    response = dump({"choices": [{"message": {"content": said}}]})
    found = estimate_usage(None, request, response, ANSWER_TEXT)
    for count, text in ((found.input_tokens, asked), (found.output_tokens, said)):
        size = len(dump(text)) - 2
        assert count is not None
        assert count * 4 - 3 <= size <= count * 4
    assert estimate_usage(HALF, request, response, ANSWER_TEXT).input_tokens is None
    plain = dump({"prompt": asked})
    assert estimate_usage(None, plain, response, ANSWER_TEXT).input_tokens == -(-len(plain) // 4)


def test_a_long_answer_is_estimated_by_its_beginning() -> None:
    event = b'data: {"choices":[{"delta":{"content":"0123456789ab"}}]}\n\n'
    found = estimate_usage(HALF, b"{}", event * 10_000, ANSWER_TEXT).output_tokens
    assert found is not None
    assert abs(found - 30_000) < 300


@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_any_bytes(request: bytes, response: bytes, deltas: bool) -> None:
    found = estimate_usage(
        None, b'{"content":"' + request, b'{"delta":"' + response, DELTA_TEXT if deltas else ANSWER_TEXT
    )
    assert (found.input_tokens or 0) >= 0
    assert usage_from_token_ids(None, b'"prompt_token_ids"' + response, deltas, True) is None


def test_streams_of_responses_are_not_counted_twice() -> None:
    body = b'data: {"delta":"12345678"}\n\ndata: {"text":"12345678"}\n\n'
    assert estimate_usage(HALF, b"{}", body, by_name("responses").answer_text_pattern(True)).output_tokens == 2


def test_unknown_is_no_number_in_sums() -> None:
    one, other = Totals(calls=1, uncounted=1), Totals(calls=1, input_tokens=9, output_tokens=2)
    assert (one.input_tokens, one.output_tokens, other.input_tokens) == (None, None, 9)
    both = sum_totals((one, other))
    assert (both.calls, both.input_tokens, both.output_tokens, both.uncounted) == (2, 9, 2, 1)
    assert [rollouts.sums(one), rollouts.sums(other), rollouts.sums(both)] == ["? → ?", "9 → 2", "≥9 → ≥2"]
    assert sum_totals((Totals(), Totals())) == Totals()


def test_unknown_is_null_in_tables() -> None:
    guess = Estimate(output_tokens=80)
    found = row(span(usage=HALF, estimate=guess))
    assert (found["input_tokens"], found["output_tokens"]) == (5, None)
    assert (found["estimated_input_tokens"], found["estimated_output_tokens"]) == (None, 80)
    found = row(span())
    assert (found["input_tokens"], found["estimated_input_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"usage": KNOWN}, "5 → 7"),
        ({"usage": HALF, "estimate": Estimate(output_tokens=1200)}, "5 → ~1,200"),
        ({"estimate": Estimate(input_tokens=3, output_tokens=0)}, "~3 → ~0"),
        ({"status": "interrupted"}, "? → ?"),
        ({"http_status": 500, "status": "error"}, ""),
        ({"dialect": "models"}, ""),
    ],
)
def test_a_line_tells_counts_from_guesses(fields: dict[str, Any], shown: str) -> None:
    line = rollouts.span_line(span(**fields)).plain
    assert (f"  {shown} tokens" in line) if shown else "tokens" not in line


# -- through a gateway ------------------------------------------------------------------------------------------------

TRAINED = '[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = true\n'


async def called(home: Path, provider: Provider, http: aiohttp.ClientSession, model: str) -> tuple[Span, list[Any]]:
    """A call of a model, and what else says how many tokens it took."""
    upstreams = upstream("up", provider.openai_url, "openai") + upstream("vllm", provider.openai_url, "openai")
    async with locally(home, upstreams + TRAINED) as gateway:
        tape = Tape(gateway.url, http)
        async with http.post(f"{gateway.openai('r')}/chat/completions", json=STREAMED | {"model": model}) as answer:
            await answer.read()
        (span,) = await tape.spans("r", 1)
        paths = ("rollouts/r/diagnosis", "rollouts/r/attempts", "stats", "spans?filter=rollout%3Dr+tokens%3E%3D0")
        return span, [(await tape.detail(span)).turn, *[await tape.get(f"/api/{path}") for path in paths]]


async def test_a_stream_without_usage_is_unknown_everywhere(
    tmp_path: Path, provider: Provider, http: aiohttp.ClientSession
) -> None:
    found, (turn, _, attempts, stats, spans) = await called(tmp_path, provider, http, "m")
    assert (found.status, found.usage) == ("ok", None)
    assert found.estimate == Estimate(input_tokens=26, output_tokens=9)
    assert turn.usage is None
    unknown = {"calls": 1, "input_tokens": None, "output_tokens": None, "uncounted": 1}
    assert unknown.items() <= attempts["attempts"][0]["totals"].items()
    assert (stats["by_model"]["m"]["input_tokens"], stats["by_model"]["m"]["uncounted"]) == (None, 1)
    assert spans["spans"] == []


async def test_ids_that_the_engine_gave_are_counted(
    tmp_path: Path, provider: Provider, http: aiohttp.ClientSession
) -> None:
    provider.formats, provider.script = vllm_wire.FORMATS, [DemoAnswer("To be.")]
    found, (_, diagnosis, *_) = await called(tmp_path, provider, http, "policy")
    call = diagnosis["attempts"][0]["calls"][0]
    assert found.estimate is None
    assert found.usage == Usage(input_tokens=call["prompt_tokens"], output_tokens=call["output_tokens"])
    assert call["output_tokens"] > 0
