"""Agents that nobody rewrote: a command on the OpenAI SDK, and one of two prompts, optimised together or one alone."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

import pytest
from fakes.optimising import Done, Optimising
from fakes.process import ROOT
from fakes.tape import Tape

from examples import shop
from examples.demo.model import DemoAnswer, Json, last_text
from examples.shop_model import ASKED, THINKER, serve
from penstock.gateway.model.queue import Claim

AGENT = f"{sys.executable} {ROOT / 'examples' / 'shop.py'}"
RUNNER = {"run": ["--workers=3", "--reward=examples.shop:reward"]}
PARTS = {"planner": ("greeting", "number", "arrival"), "worker": ("article", "price", "closing")}
"""What is wanted in the answer to each prompt."""
PROMPTS = {"planner": "You plan the answers of a shop.", "worker": "You write the answers of a shop."}


@pytest.mark.timeout(600)
async def test_a_command_on_the_openai_sdk_whose_prompt_was_found_in_its_traffic(bare: Optimising) -> None:
    """The seed is the template that `prompts discover` has found, with the date as its slot."""
    for day in range(1, 25):
        await traffic(bare, f"day-{day}", shop.PROMPT.format(date=f"2026-10-{day:02}"))
    await Tape(bare.gateway.url, bare.http).written()
    found = await bare.ended(await bare.start("prompts", "discover", "--register", "found"))
    assert found.code == 0, found.output
    (version,) = (await bare.client.resource("found")).versions
    assert version.content["text"] == shop.PROMPT
    config = bare.config(
        of=shop.tasks()[::3], engine="fakes.engines:knows",
        texts={"prompts": ["found"]}, budget={"rollouts": 40}, rollouts=RUNNER,
    )  # fmt: skip
    ended = await bare.apo(config, "--agent", AGENT)
    assert ended.code == 0, ended.output
    assert "found@shop." in ended.output, ended.output
    assert (await bare.counted())["test"] > 0
    async for rollout in bare.client.rollouts("mode:test"):
        (call,) = [span async for span in bare.client.spans(rollout.id, filter="kind:llm")]
        assert call.versions == rollout.config.versions


async def traffic(here: Optimising, rollout: str, system: str) -> None:
    """A call of production."""
    body = {
        "model": shop.MODEL,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "order 1001"}],
    }
    async with here.http.post(here.gateway.openai(rollout) + "/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def two(here: Optimising, claim: Claim) -> Done:
    """An agent that plans and then writes, with a prompt for each, both at once here."""
    task: dict[str, Any] = claim.rollout.input
    said = await asyncio.gather(*(here.ask(claim, text, task["question"]) for text in PROMPTS.values()))
    facts = shop.facts(task["order"])
    missing = [
        f"the {name} has no {part}"
        for name, text in zip(PARTS, said, strict=True)
        for part in PARTS[name]
        if facts[part] not in text
    ]
    return Done(1 - len(missing) / 6, "; ".join(missing))


def model(asked: Json) -> DemoAnswer:
    """Both models: the reflecting one names the failure that is most frequent, in the text that it is of."""
    question, draw = last_text(asked["messages"], "user"), random.Random(json.dumps(asked["messages"]))
    if asked["model"] != THINKER:
        return DemoAnswer(serve(last_text(asked["messages"], "system"), question, draw))
    counts = Counter(
        {(name, part): question.count(f"the {name} has no {part}") for name in PARTS for part in PARTS[name]}
    )
    shown = [one for one in counts if f"## Text {one[0]}\n" in question and counts[one]]
    return DemoAnswer(
        json.dumps(
            {
                "hypotheses": [
                    {
                        "failure": f"the {name} has no {part}",
                        "resource": name,
                        "kind": "add",
                        "line": 0,
                        "text": ASKED[part][1],
                    }
                    for name, part in draw.sample(shown, min(3, len(shown)))
                ]
            }
        )
    )


@pytest.mark.parametrize("prompts", [["planner", "worker"], ["worker"]])
async def test_prompts_of_one_agent_together_or_alone(here: Optimising, prompts: list[str]) -> None:
    here.provider.script = model
    for name, text in PROMPTS.items():
        await here.register(name, text)
    async with here.agents(lambda claim: two(here, claim)):
        ended = await here.apo(here.config(texts={"prompts": prompts}, budget={"rollouts": 240}))
    assert ended.code == 0, ended.output
    for name in PROMPTS:
        versions = (await here.client.resource(name)).versions
        assert (len(versions) > 1) == (name in prompts)
        assert (f"{name}@" in ended.output) == (name in prompts), ended.output
    async for rollout in here.client.rollouts("mode:val"):
        assert set(rollout.config.versions) == set(prompts)
        calls = [span async for span in here.client.spans(rollout.id, filter="kind:llm")]
        used = {name: version for call in calls for name, version in (call.versions or {}).items()}
        assert {name: used[name] for name in prompts} == rollout.config.versions
        assert len(prompts) == 2 or used["planner"] == "v1"
