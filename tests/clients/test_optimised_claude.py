"""Claude Code, which nobody rewrote, gets better: its system text is recognised, or asks for a prompt by its name.

The model is a script; Claude Code is the real one.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from clients.profiles import NOWHERE, PROFILES
from conftest import StartGateway
from fakes.optimising import Optimising
from fakes.process import upstreams
from fakes.provider import Provider

from examples import shop, shop_model
from examples.demo.model import DemoAnswer, Json, as_messages, last_text, text_of
from penstock.gateway.model.resource import NewVersion, Template

CLAUDE = next(profile for profile in PROFILES if profile.client == "Claude Code")
OURS = "You answer customers of Acme, a furniture shop.\nName the article that the customer asks about."
ASK = ["-p", "--output-format", "json", "--append-system-prompt"]
pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(900)]


def model(asked: Json) -> DemoAnswer:
    """It does what the system texts ask for."""
    if asked["model"] == shop_model.THINKER:
        raise AssertionError("nobody reflects here")
    system = "\n".join(text_of([block]) for block in asked["system"])
    question = last_text(as_messages(asked), "user")
    return DemoAnswer(shop_model.serve(system, question, random.Random(json.dumps([system, question]))))


@pytest.fixture
async def here(
    tmp_path: Path, start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> AsyncGenerator[Optimising]:
    if not CLAUDE.installed():
        pytest.skip(NOWHERE)
    gateway = await start_gateway(upstreams(openai=provider.openai_url, anthropic=provider.url))
    async with Optimising(tmp_path, gateway, provider, http) as made:
        provider.script = model
        yield made


def command(appended: str) -> list[str]:
    """Claude Code with a text that it puts behind its own system text; the question follows."""
    return [CLAUDE.command[0], *ASK, appended]


async def register_what_it_sends(here: Optimising) -> str:
    """Its whole system text with ours behind it, as one call has it, is the prompt; returns what is appended."""
    env = {"HOME": str(here.home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_API_KEY": "none"}
    words = ["run", "--max", "1", *(f"--env={name}={value}" for name, value in env.items()), "--arg={question}"]
    enqueued = here.home / "first.jsonl"
    enqueued.write_text(json.dumps(shop.tasks()[0]) + "\n")
    for asked in (["enqueue", str(enqueued)], [*words, "--", *command(OURS)]):
        ended = await here.ended(await here.start(*asked))
        assert ended.code == 0, ended.output
    bodies = [json.loads(seen.plain) for seen in here.provider.log if seen.body]
    (text,) = {block["text"] for body in bodies for block in body["system"] if OURS in block["text"]}
    assert len(text) > len(OURS) + 1000, "its own text is before ours"
    content = {"text": Template((text,), ()).source, "sent": True}
    await here.client.add_version("shop", NewVersion(kind="prompt", content=content))
    return OURS


async def register_a_placeholder(here: Optimising) -> str:
    """Only what is appended is the prompt, and Claude Code asks for it by its name."""
    await here.client.add_version("shop", NewVersion(kind="prompt", content={"text": OURS}))
    return "{{penstock:shop}}"


@pytest.mark.parametrize("register", [register_what_it_sends, register_a_placeholder])
async def test_claude_code_gets_better(here: Optimising, register: Any) -> None:
    appended = await register(here)
    env = [f"--env=HOME={here.home}", "--env=CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"]
    runner = ["--workers=2", "--arg={question}", "--reward=clients.shop_judge:reward", *env, "--", *command(appended)]
    config = here.config(
        of=shop.tasks()[::2],
        engine="fakes.engines:knows",
        budget={"rollouts": 60},
        rollouts={"run": runner},
    )
    ended = await here.apo(config)
    assert ended.code == 0, ended.output
    assert "better by" in ended.output, ended.output
    assert "penstock release start shop --candidate" in ended.output
    async for rollout in here.client.rollouts("mode:test"):
        calls = [span async for span in here.client.spans(rollout.id, filter="kind:llm")]
        assert calls
        assert {json.dumps(call.versions) for call in calls} == {json.dumps(rollout.config.versions)}
