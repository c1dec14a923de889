"""Capture in front of a real vLLM: a client sees what it sees of vLLM itself, and the tape has an id and a
log-probability for every token."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio
from fakes.process import Gateway, running, upstream
from fakes.tape import Tape

from penstock.gateway.model.span import SpanStatus
from penstock.gateway.wire.dialects.tokens import read_tokens

from .conftest import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]

Json = dict[str, Any]
CHAT, COMPLETIONS = "/chat/completions", "/completions"
TRAIN = '[[route]]\nmodel = "base"\nupstream = "vllm"\ntrain = true\n\n'
SAY: list[Json] = [{"role": "user", "content": "Where does the water go?"}]
TOOL: Json = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": "é1"}}\n</tool_call>'
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: list[tuple[str, Json]] = [
    (CHAT, {"messages": SAY}),
    (CHAT, {"messages": SAY, "n": 3, "temperature": 1.0, "seed": 5}),
    (CHAT, {"messages": SAY, "tools": [TOOL]}),
    (CHAT, {"messages": SAY, "tools": [TOOL], "structured_outputs": {"choice": [CALL]}}),
    (CHAT, {"messages": SAY, "tools": [TOOL], "structured_outputs": {"choice": [CALL]}} | USAGE),
    (CHAT, {"messages": SAY, "tools": [TOOL], "structured_outputs": {"choice": [CALL]}, "logprobs": True}),
    (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": SAY, "return_token_ids": True}),
    (CHAT, {"messages": SAY, "stop": ["e"]}),
    (COMPLETIONS, {"prompt": "the mill"}),
    (COMPLETIONS, {"prompt": ["the mill", "a river"], "n": 2, "temperature": 1.0, "seed": 5}),
    (COMPLETIONS, {"prompt": [259, 288], "logprobs": 2}),
    (COMPLETIONS, {"prompt": "the mill", "echo": True}),
]
VARIES: Json = {"id": "", "created": 0}
"""What differs between two answers to the same request."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def capturing(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    """A gateway that trains `base`."""
    config = TRAIN + upstream("vllm", vllm.url + "/v1", "openai")
    async with running(tmp_path_factory.mktemp("capturing"), config) as made:
        yield made


def request_of(more: Json, stream: bool) -> Json:
    asked = {"model": "base", "max_tokens": 90, "temperature": 0} | more | {"stream": stream}
    return asked if stream else {name: value for name, value in asked.items() if name != "stream_options"}


async def answer(http: aiohttp.ClientSession, url: str, asked: Json) -> list[Json]:
    """The answer as it was sent: one JSON object, or one for each event."""
    async with http.post(url, json=asked) as response:
        said = await response.read()
        assert response.status == 200, said
    if not asked["stream"]:
        return [json.loads(said)]
    events = said.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def same(answers: list[Json]) -> list[Json]:
    """Without what varies, tool call ids included."""
    made = [one | VARIES for one in answers]
    for call in (call for one in made for choice in one["choices"] for call in _calls(choice)):
        call["id"] = "" if call.get("id") else None
    return made


def _calls(choice: Json) -> list[Json]:
    said: Json = choice.get("message") or choice.get("delta") or {}
    return said.get("tool_calls") or []


def told(answers: list[Json]) -> Json:
    """A stream put together: how tokens are put into events depends on the engine's pace."""
    choices: dict[int, Json] = {}
    for choice in (choice for one in answers for choice in one["choices"]):
        whole = choices.setdefault(
            choice["index"], {"text": "", "calls": "", "finish": None, "ids": [], "logprobs": []}
        )
        said: Json = choice.get("delta") or {"content": choice.get("text")}
        whole["text"] += said.get("content") or ""
        whole["calls"] += "".join(json.dumps(call["function"].get("name")) for call in _calls(choice) if call["id"])
        whole["calls"] += "".join(call["function"].get("arguments") or "" for call in _calls(choice))
        whole["finish"] = whole["finish"] or choice["finish_reason"]
        whole["ids"] += choice.get("token_ids") or []
        logprobs: Json = choice["logprobs"] or {}
        content: list[Json] = logprobs.get("content") or []
        whole["logprobs"] += [one["token"] for one in content] or logprobs.get("tokens") or []
    return {"choices": choices, "usage": answers[-1].get("usage")}


def unasked(answers: list[Json], asked: Json) -> list[Any]:
    """Whatever there is that was not asked for."""
    choices = [choice for one in answers for choice in one["choices"]]
    found: list[Any] = []
    if not asked.get("return_token_ids"):
        found += [one.get(name) for one in (*answers, *choices) for name in ("prompt_token_ids", "token_ids")]
    if asked.get("logprobs") is None:
        found += [choice["logprobs"] for choice in choices]
    if not asked.get("return_token_ids") and not asked.get("logprobs"):
        found += [choice for choice in choices if choice.get("delta") == {} and choice["finish_reason"] is None]
    return [one for one in found if one is not None]


def ids_on(found: bytes, stream: bool) -> Iterator[tuple[list[int], int]]:
    tokens = read_tokens(found, stream)
    assert tokens.complete
    for output in tokens.outputs.values():
        yield list(array("i", output.ids)), output.logprobs


@pytest.mark.parametrize(("path", "more"), CASES, ids=str)
async def test_a_client_sees_what_it_sees_of_vllm_itself(
    vllm: Vllm, capturing: Gateway, http: aiohttp.ClientSession, path: str, more: Json
) -> None:
    for stream in (False, True):
        asked, rollout = request_of(more, stream), f"r-{uuid4().hex[:8]}"
        through = same(await answer(http, capturing.openai(rollout) + path, asked))
        directly = same(await answer(http, vllm.url + "/v1" + path, asked))
        # With an echo vLLM gives the prompt's ids to everybody who streams.
        assert unasked(directly, asked) == unasked(through, asked)
        assert "echo" in asked or not unasked(through, asked)
        assert (told(through) == told(directly)) if stream else (through == directly)
        await check_tape(Tape(capturing.url, http), rollout, asked)


async def check_tape(tape: Tape, rollout: str, asked: Json) -> None:
    """It has an id and a log-probability for every token of every choice. An echo is let alone."""
    (span,) = await tape.spans(rollout, 1)
    assert span.status == SpanStatus.OK
    if "echo" in asked:
        assert span.attributes is None
        return
    many = list(ids_on(await tape.raw(span, "response"), asked["stream"]))
    prompts = len(asked["prompt"]) if asked.get("n") and "prompt" in asked else 1
    assert len(many) == asked.get("n", 1) * prompts
    for ids, logprobs in many:
        assert len(ids) == logprobs > 0


async def test_ids_of_a_streamed_tool_call_are_those_of_a_plain_one(
    capturing: Gateway, http: aiohttp.ClientSession
) -> None:
    tape, found = Tape(capturing.url, http), list[list[tuple[list[int], int]]]()
    for stream in (False, True):
        rollout, more = (
            f"r-{uuid4().hex[:8]}",
            {"messages": SAY, "tools": [TOOL], "structured_outputs": {"choice": [CALL]}},
        )
        await answer(http, capturing.openai(rollout) + CHAT, request_of(more, stream))
        (span,) = await tape.spans(rollout, 1)
        assert span.tool_calls == 1
        found.append(list(ids_on(await tape.raw(span, "response"), stream)))
    assert found[0] == found[1]
