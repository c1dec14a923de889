"""Releases of what translated agents use: prompts are found in the agent's own request, and mirrors are translated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.process import Gateway
from fakes.provider import Provider
from fakes.releasing import NEW, OLD, system_of
from fakes.tape import Tape

from examples.demo.model import DemoAnswer, Json
from penstock.gateway.client.client import Client
from penstock.gateway.model.facts import SHADOW_OF
from penstock.gateway.model.release import NewRelease

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAITS: Any = {"shadowed": "required", "shadow": {"share": 1.0, "calls": 2}}
AGENTS: list[tuple[str, Json]] = [
    ("messages", {"system": OLD, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}),
    ("responses", {"instructions": OLD, "input": "Hello"}),
]


async def test_prompts_of_translated_agents_are_released(gateway: Gateway, engine: Provider, tape: Tape) -> None:
    """Both formats: the live call goes with the stable version, its mirror with the candidate, both as chat."""
    engine.script, engine.log = lambda asked: DemoAnswer("Hello"), []
    async with Client(gateway.url) as client:
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        traffic = Traffic(gateway.url, tape.http, client)
        how = policy(0.5, **WAITS)
        release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
        await traffic.when(release.id, lambda view: view.doing == "shadow" and view.total == 2)
        for number, (kind, asked) in enumerate(AGENTS):
            url = f"{gateway.openai(f'released-{kind}')}/{kind}"
            async with tape.http.post(url, json={"model": "policy"} | asked) as response:
                assert response.status == 200, await response.text()
            await traffic.when(release.id, lambda view, number=number: view.done > number or view.doing is None)
        shadow = await client.rollout(f"{release.id}-shadow")
    systems = [system_of(json.loads(seen.body)) for seen in engine.log]
    assert systems == [OLD, NEW] * 2
    assert {seen.path for seen in engine.log} == {"/v1/chat/completions"}
    for kind, _ in AGENTS:
        (span,) = await tape.spans(f"released-{kind}", 1)
        assert span.versions == {"travel": "v1"}
        assert json.loads(await tape.raw(span, "request", "agent"))["model"] == "policy"
    mirrors = await tape.spans(f"{release.id}-shadow", 2, shadow.attempts[-1].id)
    assert [span.dialect for span in mirrors] == ["chat", "chat"]
    assert all(SHADOW_OF in (span.attributes or {}) for span in mirrors)
