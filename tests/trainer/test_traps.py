"""A step in which every rollout meets another trap: what is learnt from, and what is left out and why.

Real are the gateway, collecting, samples, credit and the update; the engine is scripted. Each group has three rollouts,
of which the first meets the trap that the group is named after; docs/reliability.md lists where else each is tried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from aiohttp import web
from conftest import StartGateway
from fakes.engine import CHAT, FakeEngine, fault, serving
from fakes.process import Gateway, vllms
from fakes.tiny_model import config
from fakes.vllm_process import TOKENS, answered, numbers
from fakes.workers import beside, finish
from pydantic import ValidationError

from penstock.adapters.samples import Options
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim, ClaimRequest
from penstock.gateway.model.rollout import Judgement
from penstock.trainer.data.collector import RolloutCollector
from penstock.trainer.data.tasks import RolloutTask
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.update import learn
from penstock.trainer.serving.publisher import Publisher

TRAPS = (
    "nothing", "equal", "unjudged", "not_a_number", "late", "long", "refused", "empty", "aborted", "left", "parallel",
)  # fmt: skip
Json = dict[str, Any]


class Trapped(FakeEngine):
    """Answers as the question's first word says."""

    async def _generate(self, request: web.Request, body: Json) -> web.StreamResponse:
        if not body.get("return_token_ids"):
            return await super()._generate(request, body)
        made = answered(body["model"], body["messages"])
        choice = made["choices"][0]
        match body["messages"][0]["content"].split()[0]:
            case "long":
                choice["token_ids"] = numbers("", 14) * 8
                choice["logprobs"]["content"] *= 20
                choice["logprobs"]["content"] = choice["logprobs"]["content"][: len(choice["token_ids"])]
                made["usage"]["completion_tokens"] = len(choice["token_ids"])
            case "refused":
                return fault(400, "This model's maximum context length is 64 tokens.")
            case "empty":
                choice |= {"token_ids": [], "logprobs": {"content": []}}
                choice["message"]["content"] = ""
            case "aborted":
                choice["finish_reason"] = "abort"
            case "left":
                await asyncio.Event().wait()
            case _:
                pass
        return web.json_response(made)


@pytest.fixture
async def vllm() -> AsyncGenerator[Trapped]:
    async with serving(Trapped()) as made:
        yield made


@pytest.fixture
async def served(start_gateway: StartGateway, vllm: FakeEngine) -> Gateway:
    return await start_gateway(vllms(vllm.openai_url))


class Agent:
    """Works on what it is given."""

    def __init__(self, served: Gateway, http: aiohttp.ClientSession, client: Client, vllm: Trapped) -> None:
        self.served, self.http, self.client, self.vllm = served, http, client, vllm
        self.later: list[Callable[[], Awaitable[object]]] = []
        """What is said when all have ended but one."""

    async def work(self, most: int) -> None:
        """So many rollouts; the last one ends when everything else has been said."""
        claims: list[Claim] = []
        while len(claims) < most:
            claims += (await self.client.claim(ClaimRequest(worker="w", wait_s=20, limit=100))).claims
        for claim in claims[:-1]:
            await self.one(claim)
        for said in self.later:
            await said()
        await self.one(claims[-1])

    async def one(self, claim: Claim) -> None:
        """One rollout; its reward is its place in its group."""
        trap, number = claim.rollout.input["trap"], int(claim.rollout.id[-1])
        met = number == 0
        text = f"{trap if met else 'nothing'} {claim.rollout.id}"
        match trap:
            case "left" if met:
                await self.leave(claim, text)
            case "parallel":
                await asyncio.gather(*(self.ask(claim, text, 200) for _ in range(2)))
            case _:
                await self.ask(claim, text, 400 if met and trap == "refused" else 200)
        given: list[float] = [1.0 if trap == "equal" else float(number)]
        if trap == "not_a_number" and met:
            await self.not_a_number(claim)
        if trap == "late":
            judged = Judgement(value=given[0])
            self.later.append(lambda: self.client.reward(claim.rollout.id, claim.attempt.id, judged))
        if trap == "late" or (met and trap in ("unjudged", "not_a_number")):
            given = []
        await finish(self.client, claim, *given)

    async def ask(self, claim: Claim, text: str, status: int) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        async with self.http.post(f"{self.served.url}{claim.address}/v1/chat/completions", json=body) as answer:
            assert answer.status == status, await answer.text()

    async def leave(self, claim: Claim, text: str) -> None:
        """Goes away in the middle of the answer."""
        before = sum(path == CHAT for path, _ in self.vllm.asked)
        asking = asyncio.ensure_future(self.ask(claim, text, 200))
        await self.vllm.until(CHAT, before + 1)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    async def not_a_number(self, claim: Claim) -> None:
        """Nobody can give such a reward: not the typed client, and not what sends bytes."""
        for value in (float("nan"), float("inf")):
            with pytest.raises(ValidationError):
                Judgement(value=value)
            body = json.dumps({"worker": "w", "status": "succeeded", "rewards": [{"value": value}]})
            url = f"{self.served.url}/api/rollouts/{claim.rollout.id}/attempts/{claim.attempt.id}/finish"
            async with self.http.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 400, await answer.text()


async def test_every_trap_in_one_step(
    served: Gateway, client: Client, vllm: Trapped, http: aiohttp.ClientSession, model: Path
) -> None:
    tasks = [RolloutTask(number, {"trap": trap}) for number, trap in enumerate(TRAPS)]
    publisher = Publisher(client, "policy", "vllm", "base", "run")
    await publisher.begin()
    await publisher.register("run.0", Path("/adapters/run.0"), None, "")
    await publisher.train_on("run.0")
    collector = RolloutCollector(client, "run", Options(model="policy"))
    async with beside(collector.run()):
        order = await collector.order("train", "1", 1, tasks, 3, 600.0)
        agent = Agent(served, http, client, vllm)
        found, _ = await asyncio.gather(collector.gather(order, 600.0), agent.work(len(order.names)))
    # What never comes to a sample, call by call.
    left_out = {"no_reward": 2, "empty": 1, "interrupted": 1, "cancelled": 1, "error": 1}
    assert found.report.reasons == left_out
    assert found.report.notes == {"late_reward": 3}
    engine = TrainingEngine(config(model, engine={"batch_tokens": 100}))
    before = {name: one.clone() for name, one in engine.model.trained.items()}
    metrics = learn(engine, found.samples, lambda _: 0, engine.config)
    dropped = {name: value for name, value in metrics.items() if name.startswith("dropped/") and value}
    assert dropped == {"dropped/rollouts_equal": 3, "dropped/samples_long": 1}
    # Two of three where the first met its trap, all where nothing stands in the way; parallel calls are all kept.
    samples = {"nothing": 3, "late": 3, "parallel": 6} | dict.fromkeys(
        ("unjudged", "not_a_number", "long", "refused", "empty", "aborted", "left"), 2
    )
    assert metrics["samples"] == sum(samples.values())
    assert metrics["tokens"] == TOKENS * sum(samples.values())
    assert metrics["groups/used"] == len(samples)
    assert (metrics["unscored"], metrics["skipped"], metrics["updates"]) == (0, 0, 1)
    assert any((before[name] != one).any() for name, one in engine.model.trained.items())
    # Training never asks for the base itself, which a CPU's vLLM mixes up with the adapters of its batch.
    trained = [body["model"] for path, body in vllm.asked if path == CHAT and body.get("return_token_ids")]
    assert set(trained) == {"policy@run.0"}
