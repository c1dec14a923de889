"""What goes wrong is said in a sentence, with the way out, before a budget is spent on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.formats import Failure
from fakes.mistakes import tells
from fakes.optimising import Done, Optimising, answers
from fakes.process import PATHS
from fakes.provider import Outcome

from examples import shop, shop_model
from examples.demo.model import DemoAnswer, Json
from penstock.gateway.client.console import CommandError as Said
from penstock.gateway.model.queue import Claim
from penstock.gateway.model.resource import NewVersion
from penstock.trainer.commands import optimise

FEW: dict[str, Any] = {"budget": {"rollouts": 60}}


@dataclass
class Agent:
    """An agent with a fault."""

    here: Optimising
    fault: str
    ran: list[str] = field(default_factory=list[str])

    async def __call__(self, claim: Claim) -> Done:
        self.ran.append(claim.rollout.id)
        if self.fault == "fails":
            return Done(None, "", "failed")
        if self.fault == "calls nobody":
            return Done(1.0)
        if self.fault == "another prompt":
            await self.here.ask(claim, "You are somebody else.", claim.rollout.input["question"])
            return Done(0.5)
        done = await self.here.answer(claim)
        return Done(None) if self.fault == "unjudged" else Done(0.5) if self.fault == "flat" else done


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fails", "rollouts have failed, such as shop."),
        ("calls nobody", "has made a call of a model through the gateway"),
        ("another prompt", "shop: not found in any call of the first"),
        ("unjudged", "has a reward. Give `penstock run` a judge"),
    ],
)
async def test_an_agent_nobody_can_learn_from_stops_the_run_at_once(here: Optimising, fault: str, said: str) -> None:
    agent = Agent(here, fault)
    async with here.agents(agent):
        ended = await here.apo(here.config(**FEW))
    assert ended.code == 1
    assert said in ended.output
    assert "Traceback" not in ended.output
    assert len(agent.ran) <= 24, "the first batch"
    assert said in ((await here.client.run("shop")).message or "")


async def test_rewards_that_are_all_the_same_are_named(here: Optimising) -> None:
    async with here.agents(Agent(here, "flat")):
        ended = await here.apo(here.config(**FEW))
    assert ended.code == 0, ended.output
    assert "the texts stay as they are" in ended.output
    assert "rewards were 0.5" in ended.output


async def test_a_reflecting_model_that_says_nothing_of_use_is_named(here: Optimising) -> None:
    here.provider.script = lambda asked: nonsense(asked)
    async with here.agents():
        ended = await here.apo(here.config(**FEW, reflection={"model": shop_model.THINKER}))
    assert ended.code == 0, ended.output
    assert tells(ended.output, "reflections", "`penstock show shop.reflections`")


def nonsense(asked: Json) -> Outcome:
    return DemoAnswer("Certainly! {{{") if asked["model"] == shop_model.THINKER else answers(asked)


async def test_after_a_reflecting_model_that_refuses_the_same_command_goes_on(here: Optimising) -> None:
    here.provider.script = lambda asked: (
        Failure(400, "no credit left") if asked["model"] == shop_model.THINKER else answers(asked)
    )
    config = here.config(**FEW)
    async with here.agents():
        first = await here.apo(config)
        assert first.code == 1
        assert tells(first.output, "model 'thinker'", "400: no credit left")
        before = await here.counted()
        here.provider.script = answers
        second = await here.apo(config)
    assert second.code == 0, second.output
    assert before["train"] == 24
    assert (
        max([len(one.attempts) async for one in here.client.rollouts("mode:train") if ".reflections" not in one.id])
        == 1
    )


@pytest.mark.parametrize(
    ("section", "limit"), [("reflections", 3), ("tokens", 6_000), ("money", 0.008), ("reflections", 0)]
)
async def test_what_reflections_may_cost_is_kept_exactly(here: Optimising, section: str, limit: float) -> None:
    prices = {"model": shop_model.THINKER, "most_tokens": 500, "price": [1.0, 4.0]}
    async with here.agents():
        ended = await here.apo(here.config(budget={"rollouts": 100, section: limit}, reflection=prices))
    assert ended.code == 0, ended.output
    spans = await here.reflections() if limit else []
    usages = [span.usage for span in spans if span.usage is not None]
    read = sum(usage.input_tokens or 0 for usage in usages)
    written = sum(usage.output_tokens or 0 for usage in usages)
    used = {"reflections": len(spans), "tokens": read + written, "money": (read + 4 * written) / 1e6}
    assert used[section] <= limit
    assert len(usages) == len(spans)
    # It is used, too: what is left would not have been enough for one more.
    assert not limit or used["reflections"] >= 3


async def said_by(here: Optimising, config: Path) -> str:
    """What the command says before it begins."""
    with pytest.raises(Said) as caught:
        await asyncio.to_thread(optimise, config, gateway=here.gateway.url)
    return str(caught.value)


async def test_a_prompt_that_nobody_registered_is_named(here: Optimising) -> None:
    said = await said_by(here, here.config(texts={"prompts": ["shopp"]}))
    assert "texts.prompts: 'shopp': " in said
    await here.client.add_version("search", NewVersion(kind="tool-text", content={"tool": "search", "text": "finds"}))
    said = await said_by(here, here.config(texts={"prompts": ["search"]}))
    assert tells(said, "texts.prompts: 'search'", "tool-text")


async def test_too_few_tasks_are_counted(here: Optimising) -> None:
    said = await said_by(here, here.config(of=shop.tasks()[:7]))
    assert tells(said, "split has", "of 7 tasks")


async def test_without_a_gateway_it_says_how_one_is_started(here: Optimising) -> None:
    config = here.config()
    await here.gateway.kill()
    said = await said_by(here, config)
    assert tells(said, "cannot reach the gateway", "`penstock serve` starts one")
    assert not (here.home / "run-shop").exists()


ENGINE = """
from penstock.trainer.apo.protocol import Candidate

async def propose(pool, evidence):
    texts = {name: text + "\\nBe brief." for name, text in pool.seed.texts.items()}
    return [Candidate(texts, None, "half a \\ud83d")] if len(pool.candidates) == 1 else []
"""


async def test_half_a_character_in_what_an_engine_claims_is_left_out(here: Optimising) -> None:
    (here.home / "half_engine.py").write_text(ENGINE)
    config = here.config(budget={"rollouts": 40}, engine="half_engine:propose")
    async with here.agents():
        process = await here.start("train", "apo", config, env={"PYTHONPATH": f"{PATHS}:{here.home}"})
        ended = await here.ended(process)
    assert ended.code == 0, ended.output
    notes = [one.note for one in (await here.client.resource("shop")).versions]
    assert notes == ["", "shop: half a "]
