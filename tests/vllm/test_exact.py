"""Exact sessions in front of a real vLLM: multi-turn agents that call tools are one sequence of the engine's own
tokens, with the log-probabilities that it gives them when it reads that sequence."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio
from fakes.many_turns import Agent, told
from fakes.process import Gateway, running, upstream
from fakes.tape import Tape

from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.source import load
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span
from penstock.gateway.releases.adapter_server import VllmClient, settle

from .conftest import Vllm
from .test_adapters import published

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]

Json = dict[str, Any]
ROUTE = '[[route]]\nmodel = "{}"\nupstream = "vllm"\ntrain = {}\n\n'
CALL = '<tool_call>\n{"name":  "get", "arguments": {"x":"é1",   "a": [1]}}\n</tool_call>'
FORCED = [f"  The mill.\n{CALL}", f" And {CALL}\n{CALL}", "\nIt is 42. "]
"""None of it is what the template would write."""
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    """Models whose names begin with `base` are exact; `plain` is the same model, and is not."""
    routes = ROUTE.format("base*", '"exact"') + ROUTE.format("plain", "true")
    routes = routes.replace('model = "plain"', 'model = "plain"\nalias = "base"')
    config = routes + upstream("vllm", vllm.url + "/v1", "openai")
    async with running(tmp_path_factory.mktemp("exact"), config) as made:
        yield made


def agent_of(gateway: Gateway, rollout: str, stream: bool, **asks: Any) -> Agent:
    return Agent(gateway.openai(rollout), stream, **({"model": "base", "max_tokens": 240, "seed": 7} | asks))


async def turn(agent: Agent, **more: Any) -> Json:
    """What the model says next."""
    return await (agent.go_on(**more) if agent.called else agent.turn("Where does the water go?", **more))


def began(spans: Sequence[Span]) -> list[str | None]:
    return [(span.attributes or {}).get("penstock.session.began") for span in spans]


async def retokenised(tape: Tape, rollout: str) -> list[int]:
    found = Diagnosis.model_validate(await tape.get(f"/api/rollouts/{rollout}/diagnosis"))
    calls = [call for attempt in found.attempts for call in attempt.calls]
    return [call.sequence for call in calls if "retokenised" in [one.code for one in call.findings]]


async def sampled(client: Client, rollout: str, model: str) -> list[Sample]:
    await client.reward(rollout, "a1", Judgement(value=1.0))
    (episode,) = [one async for one in load(client, client.rollouts(f"rollout:{rollout}"))]
    made, report = samples(episode, Options(model=model))
    assert not report.dropped
    return made


async def scored(http: aiohttp.ClientSession, vllm: Vllm, model: str, ids: list[int]) -> list[float]:
    """What the engine gives each id when it reads them all; the first has none."""
    asked: Json = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    async with http.post(vllm.url + "/v1/completions", json=asked) as response:
        answer = await response.json()
        assert response.status == 200, answer
    given = answer["choices"][0]["prompt_logprobs"][1:]
    return [0.0, *(one[str(id)]["logprob"] for one, id in zip(given, ids[1:], strict=True))]


@BOTH
async def test_the_template_would_retokenise_and_exact_sessions_do_not(
    gateway: Gateway, client: Client, http: aiohttp.ClientSession, stream: bool
) -> None:
    tape, found = Tape(gateway.url, http), dict[str, list[Json]]()
    for model in ("plain", "base"):
        rollout = f"{model}-{uuid4().hex[:8]}"
        agent = agent_of(gateway, rollout, stream, model=model)
        found[model] = [await turn(agent, structured_outputs={"choice": [text]}) for text in FORCED]
        spans = await tape.spans(rollout, 3)
        assert [span.tool_calls for span in spans] == [1, 2, 0]
        assert await retokenised(tape, rollout) == ([] if model == "base" else [2, 3])
        assert len(await sampled(client, rollout, model)) == (1 if model == "base" else 3)
    assert [said(one) for one in found["base"]] == [said(one) for one in found["plain"]]


def said(choice: Json) -> Any:
    """An answer without what differs each time. Streamed arguments are as the model wrote them."""
    text, calls = told(choice)
    return text, [(name, json.loads(arguments)) for name, arguments in calls], choice["finish_reason"]


@BOTH
@pytest.mark.parametrize("adapter", [False, True], ids=["base", "adapter"])
async def test_what_was_sampled_is_what_the_engine_reads(
    vllm: Vllm,
    engine: VllmClient,
    gateway: Gateway,
    client: Client,
    http: aiohttp.ClientSession,
    adapter: bool,
    stream: bool,
) -> None:
    """The first turn is forced, so that the past drifts; what the model says then is its own."""
    residency, model = published(vllm, {"base@v1": "v1"}), "base@v1" if adapter else "base"
    assert not (await settle(engine, residency, [model] if adapter else [])).failed
    rollout, tape = f"r-{uuid4().hex[:8]}", Tape(gateway.url, http)
    agent = agent_of(gateway, rollout, stream, model=model, temperature=1.0)
    await turn(agent, structured_outputs={"choice": [FORCED[0]]})
    for _ in range(3):
        # It would talk for long; the engine's log-probabilities are those without the bias.
        await turn(agent, min_tokens=5, logit_bias={"1": 5.5})
    spans = await tape.spans(rollout, 4)
    assert began(spans) == ["first", None, None, None]
    assert await retokenised(tape, rollout) == []
    for span in spans[1:]:
        asked = json.loads(await tape.raw(span, "request", "engine"))
        answer = await tape.raw(span, "response")
        given = next(json.loads(one) for one in data_of(answer, stream))["prompt_token_ids"]
        assert asked["token_ids"] == given
    (sample,) = await sampled(client, rollout, model)
    ids = [*sample.prompt.tolist(), *sample.response.tolist()]
    scores = (await scored(http, vllm, model, ids))[len(sample.prompt) :]
    free = [at for segment in sample.segments[1:] for at in range(segment.start, segment.end)]
    assert len(free) > 15
    assert all(sample.mask[at] for at in free)
    assert [scores[at] for at in free] == pytest.approx([float(sample.logprobs[at]) for at in free], abs=1e-4)
    await settle(engine, residency, [])


def data_of(answer: bytes, stream: bool) -> list[bytes]:
    """The documents of an answer."""
    if not stream:
        return [answer]
    return [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]


@BOTH
async def test_several_choices_and_a_text_that_ends_them(
    gateway: Gateway, http: aiohttp.ClientSession, stream: bool
) -> None:
    rollout, tape = f"r-{uuid4().hex[:8]}", Tape(gateway.url, http)
    agent = agent_of(gateway, rollout, stream, stop=["riv"])
    await turn(agent, structured_outputs={"choice": ["\nThe mill "]})
    cut = await turn(agent, structured_outputs={"choice": ["by the river"]})
    assert (cut["message"]["content"], cut["finish_reason"]) == ("by the ", "stop")
    spans = await tape.spans(rollout, 2)
    assert began(spans) == ["first", None]
    assert b"by the riv" not in await tape.raw(spans[1], "response")
    agent.messages = agent.messages[:3]
    agent.asks |= {"n": 2, "temperature": 1.0}
    assert [one["index"] for one in await agent.choices()] == [0, 1]
    assert began(await tape.spans(rollout, 3))[2] == "forked"
