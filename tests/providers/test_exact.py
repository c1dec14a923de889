"""Agents of messages and responses on an exact route: translated, their conversations are one sequence, too."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest
import pytest_asyncio
from fakes import environments
from fakes.process import Gateway, running, upstream
from fakes.scale_out import GENERATE, ScaleOut, scale_out
from fakes.tape import Tape
from fakes.toy_template import CALL, CALLED, Template

from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.wire.dialects.loose_json import Json

from .conftest import HERE, NOWHERE, PYTHON, ROUTE
from .test_agents import STREAMS, claude_agent, gpt_agent

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = f'  Let me look. {CALL}{{"name":  "get", "arguments": {{"y":2,"city":"Oslo"}}}}{CALLED}'
SAYS = [GET, " " + GET, " It is 17. "]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm() -> AsyncGenerator[ScaleOut]:
    async with scale_out() as made:
        made.template = Template(strips=True, rewrites=True)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exact(tmp_path_factory: pytest.TempPathFactory, vllm: ScaleOut, patient: None) -> AsyncGenerator[Gateway]:
    """A gateway that translates, in front of an engine whose template drifts."""
    if not (HERE or environments.installed("providers")):
        pytest.skip(NOWHERE)
    config = ROUTE.replace("train = true", 'train = "exact"') + upstream("vllm", vllm.openai_url, "openai")
    async with running(tmp_path_factory.mktemp("exact"), config, python=PYTHON) as made:
        yield made


@STREAMS
@pytest.mark.parametrize("speaks", ["messages", "responses"])
async def test_a_translated_conversation_goes_on_from_the_very_tokens(
    exact: Gateway, vllm: ScaleOut, speaks: str, stream: bool
) -> None:
    rollout, before = f"{speaks}-{stream}", len(vllm.of(GENERATE))
    vllm.says += SAYS
    answers = await (claude_agent if speaks == "messages" else gpt_agent)(exact, rollout, stream)
    assert len(answers) == 3
    async with aiohttp.ClientSession() as http:
        tape = Tape(exact.url, http)
        spans = await tape.spans(rollout, 3)
        found = Diagnosis.model_validate(await tape.get(f"/api/rollouts/{rollout}/diagnosis"))
        sides = (await tape.detail(spans[-1])).exchange
    assert [(span.attributes or {}).get("penstock.session.began") for span in spans] == ["first", None, None]
    assert len(vllm.of(GENERATE)) == before + 2
    assert [call.goes_on for call in found.attempts[0].calls] == [None, 1, 2]
    assert sides is not None
    assert sorted(side.who for side in sides.sides) == ["agent", "engine"]


@STREAMS
async def test_blank_text_that_the_agent_drops_is_no_fork(exact: Gateway, vllm: ScaleOut, stream: bool) -> None:
    """Claude Code sends back no text that is only white space, as vLLM makes it between reasoning and a tool call."""
    rollout, call = f"blank-{stream}", f'{CALL}{{"name": "get", "arguments": {{"city":"Oslo"}}}}{CALLED}'
    vllm.says += [f"<think>Hm.</think>\n\n{call}", f"\n\n{call}", "It is 17."]
    answers = await claude_agent(exact, rollout, stream, sent=spoken)
    assert any(block.type == "text" and not block.text.strip() for block in answers[0].content)
    async with aiohttp.ClientSession() as http:
        spans = await Tape(exact.url, http).spans(rollout, 3)
    assert [(span.attributes or {}).get("penstock.session.began") for span in spans] == ["first", None, None]


def spoken(block: Json) -> bool:
    """Whether it says something."""
    return block["type"] != "text" or bool(block["text"].strip())
