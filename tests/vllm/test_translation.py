"""An agent of Anthropic's messages in front of a real vLLM, which gives token ids with chat completions only."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import anthropic
import pytest
import pytest_asyncio
from anthropic.types import Message
from fakes import environments, process
from fakes.process import Gateway, running, upstream
from fakes.tape import Tape

from penstock.gateway.wire.dialects.tokens import read_tokens

from .conftest import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]

ROUTE = '[[route]]\nmodel = "base"\nupstream = "vllm"\ntrain = true\n\n'
TOOL: Any = {
    "name": "get",
    "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
FORCED: Any = {"type": "tool", "name": "get"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def translating(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    """A gateway that trains `base`, in the environment that has litellm."""
    if not environments.installed("providers"):
        pytest.skip("there is no litellm here: `make install-providers` installs it")
    config = ROUTE + upstream("vllm", vllm.url + "/v1", "openai")
    home, python = tmp_path_factory.mktemp("translating"), environments.python("providers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "PATIENCE", 600.0)
        async with running(home, config, python=python) as made:
            yield made


async def asked(client: anthropic.AsyncAnthropic, stream: bool, messages: list[Any]) -> Message:
    about: Any = {"model": "base", "max_tokens": 90, "tools": [TOOL], "tool_choice": FORCED}
    # The model's text is the same every time. The newest version of the API, the SDK's, has no sampling parameters.
    about |= {"extra_body": {"temperature": 0}, "extra_headers": {"anthropic-version": "2023-06-01"}}
    to: Any = client.messages
    if not stream:
        return await to.create(messages=messages, **about)
    async with to.stream(messages=messages, **about) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_anthropic_agent_calls_a_tool(translating: Gateway, http: aiohttp.ClientSession, stream: bool) -> None:
    rollout = f"agent-{stream}"
    messages: list[Any] = [{"role": "user", "content": "Where does the water go?"}]
    async with anthropic.AsyncAnthropic(base_url=translating.address(rollout), api_key="sk-a") as client:
        first = await asked(client, stream, messages)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        said = [block.model_dump(exclude_none=True) for block in first.content]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "to the mill"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        second = await asked(client, stream, messages)
    assert (call.name, second.role) == ("get", "assistant")
    tape = Tape(translating.url, http)
    spans = await tape.spans(rollout, 2)
    for span, answer in zip(spans, (first, second), strict=True):
        assert (span.dialect, span.response_id) == ("chat", answer.id)
        tokens = read_tokens(await tape.raw(span, "response"), span.stream)
        assert tokens.complete
        (one,) = tokens.outputs.values()
        assert len(array("i", one.ids)) == one.logprobs == answer.usage.output_tokens
        assert len(array("i", tokens.prompt)) == answer.usage.input_tokens
