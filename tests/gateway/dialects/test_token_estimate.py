"""Tokens that nobody counted: exact where the engine gave ids, else a guess, kept apart; never 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import vllm_wire
from fakes.in_process import running_here
from fakes.process import upstream
from fakes.provider import Provider
from fakes.tape import Tape
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.client.tables import row
from penstock.gateway.demo.model import Answer
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.base import DELTA, SAID
from penstock.gateway.dialects.token_estimate import counted, estimated, uncounted
from penstock.gateway.display import rollouts
from penstock.gateway.model.rollout import Totals
from penstock.gateway.model.span import Estimate, Span, Usage
from penstock.gateway.model.summaries import add_totals

KNOWN = Usage(input_tokens=5, output_tokens=7)
HALF = Usage(input_tokens=5)
ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "How much is 19 times 23?"}], "stream": True}


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
    assert uncounted(call, by_name(call.dialect)) == expected


@given(st.text(max_size=400), st.text(max_size=400), st.booleans())
def test_an_estimate_goes_by_the_bytes_of_the_texts(asked: str, said: str, spaced: bool) -> None:
    separators = (", ", ": ") if spaced else (",", ":")

    def dump(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=separators).encode("utf-8", "surrogatepass")

    request = dump(
        {"messages": [{"content": [{"text": asked}, {"image_url": {"url": "data:image/png;base64," + "A" * 999}}]}]}
    )
    response = dump({"choices": [{"message": {"content": said}}]})
    found = estimated(None, request, response, SAID)
    for count, text in ((found.input_tokens, asked), (found.output_tokens, said)):
        size = len(dump(text)) - 2
        assert count is not None
        assert count * 4 - 3 <= size <= count * 4
    assert estimated(HALF, request, response, SAID).input_tokens is None
    plain = dump({"prompt": asked})
    assert estimated(None, plain, response, SAID).input_tokens == -(-len(plain) // 4)


def test_a_long_answer_is_estimated_by_its_beginning() -> None:
    event = b'data: {"choices":[{"delta":{"content":"0123456789ab"}}]}\n\n'
    found = estimated(HALF, b"{}", event * 10_000, SAID).output_tokens
    assert found is not None
    assert abs(found - 30_000) < 300


@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_any_bytes(request: bytes, response: bytes, deltas: bool) -> None:
    found = estimated(None, b'{"content":"' + request, b'{"delta":"' + response, DELTA if deltas else SAID)
    assert (found.input_tokens or 0) >= 0
    assert counted(None, b'"prompt_token_ids"' + response, deltas, True) is None


def test_streams_of_responses_are_not_counted_twice() -> None:
    body = b'data: {"delta":"12345678"}\n\ndata: {"text":"12345678"}\n\n'
    assert estimated(HALF, b"{}", body, by_name("responses").texts_said(True)).output_tokens == 2


def test_unknown_is_no_number_in_sums() -> None:
    one, other = Totals(calls=1, uncounted=1), Totals(calls=1, input_tokens=9, output_tokens=2)
    assert (one.input_tokens, one.output_tokens, other.input_tokens) == (None, None, 9)
    both = add_totals(one, other)
    assert (both.calls, both.input_tokens, both.output_tokens, both.uncounted) == (2, 9, 2, 1)
    assert [rollouts.sums(one), rollouts.sums(other), rollouts.sums(both)] == ["? → ?", "9 → 2", "≥9 → ≥2"]
    assert add_totals(Totals(), Totals()) == Totals()


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


# -- through a gateway -------------------------------------------------------------------------------------------------

TRAINED = '[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = true\n'


async def called(home: Path, provider: Provider, http: aiohttp.ClientSession, model: str) -> tuple[Span, list[Any]]:
    """A call of a model, and what else says how many tokens it took."""
    upstreams = upstream("up", provider.openai_url, "openai") + upstream("vllm", provider.openai_url, "openai")
    async with running_here(home, upstreams + TRAINED) as gateway:
        tape = Tape(gateway.url, http)
        async with http.post(f"{gateway.openai('r')}/chat/completions", json=ASKED | {"model": model}) as answer:
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
    provider.formats, provider.script = vllm_wire.FORMATS, [Answer("To be.")]
    found, (_, diagnosis, *_) = await called(tmp_path, provider, http, "policy")
    call = diagnosis["attempts"][0]["calls"][0]
    assert found.estimate is None
    assert found.usage == Usage(input_tokens=call["prompt_tokens"], output_tokens=call["output_tokens"])
    assert call["output_tokens"] > 0
