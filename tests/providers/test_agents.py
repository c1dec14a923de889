"""Official clients of messages and responses, unmodified, in front of an engine that speaks chat completions only."""

from __future__ import annotations

import json
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from fakes.formats import Failure
from fakes.process import Gateway
from fakes.provider import Outcome, Provider
from fakes.tape import Tape
from openai.types.responses import Response

from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.client.client import Client
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.wire.dialects.loose_json import Json
from penstock.gateway.wire.dialects.tokens import read_tokens

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL: Json = {
    "name": "get",
    "description": "Looks a city up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FUNCTION: Json = {"type": "function", "name": "get", "parameters": TOOL["input_schema"]}
CALLS = (
    DemoToolCall("functions.get:0", "get", '{"city": "Orléans"}'),
    DemoToolCall("chatcmpl-tool-2", "get", '{"city": "Rome"}'),
)
STORY: list[Outcome] = [DemoAnswer("Let me look.", CALLS), DemoAnswer("", CALLS[:1]), DemoAnswer("It is 17.")]
"""What the model says: two calls at once, one without a word, and the answer."""
Agent = Callable[[Gateway, str, bool], Awaitable[Any]]
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def claude(gateway: Gateway, rollout: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.address(rollout), api_key="sk-a", max_retries=0)


def gpt(gateway: Gateway, rollout: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.openai(rollout), api_key="sk-a", max_retries=0)


async def message_of(client: anthropic.AsyncAnthropic, stream: bool, **asked: Any) -> Message:
    """An answer, streamed or not."""
    asked = {"model": "policy", "max_tokens": 100, "tools": [TOOL]} | asked
    messages: Any = client.messages
    if not stream:
        return await messages.create(**asked)
    async with messages.stream(**asked) as events:
        return await events.get_final_message()


async def response_of(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Response:
    asked = {"model": "policy", "tools": [FUNCTION]} | asked
    responses: Any = client.responses
    if not stream:
        return await responses.create(**asked)
    async with responses.stream(**asked) as events:
        return await events.get_final_response()


async def claude_agent(
    gateway: Gateway, rollout: str, stream: bool, sent: Callable[[Json], bool] = bool
) -> list[Message]:
    """Asks, does what it is asked, and goes on until there is an answer. `sent`: which blocks it sends back."""
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": "How warm is it?"}]
    answers: list[Message] = []
    async with claude(gateway, rollout) as client:
        while not answers or answers[-1].stop_reason == "tool_use":
            answers.append(await message_of(client, stream, system=system, messages=messages))
            content = [made for block in answers[-1].content if sent(made := block.model_dump(exclude_none=True))]
            calls = [block for block in answers[-1].content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "17"} for call in calls]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return answers


async def gpt_agent(gateway: Gateway, rollout: str, stream: bool) -> list[Response]:
    items: list[Any] = [{"role": "user", "content": "How warm is it?"}]
    answers: list[Response] = []
    async with gpt(gateway, rollout) as client:
        while not answers or any(item.type == "function_call" for item in answers[-1].output):
            answers.append(await response_of(client, stream, instructions="Be short.", input=items))
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answers[-1].output]
            calls = [item for item in answers[-1].output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "17"} for call in calls]
    return answers


async def spans_of(tape: Tape, rollout: str, engine: Provider, dialect: str) -> list[Span]:
    """The spans of a story: the engine's side with a token and a probability for each, the agent's beside it."""
    spans = await tape.spans(rollout, len(STORY))
    for span, seen in zip(spans, engine.log, strict=True):
        assert (span.dialect, span.path, seen.path) == ("chat", "/v1/chat/completions", "/v1/chat/completions")
        assert span.status == SpanStatus.OK
        assert (span.attributes or {})["penstock.translated"] == dialect
        assert await tape.raw(span, "request") == seen.body
        assert await tape.raw(span, "response") == seen.response
        tokens = read_tokens(seen.response, span.stream)
        assert tokens.complete
        (one,) = tokens.outputs.values()
        assert len(array("i", one.ids)) == one.logprobs > 0
        assert json.loads(await tape.raw(span, "request", "agent"))["model"] == "policy"
        assert b"token_ids" not in await tape.raw(span, "response", "agent")
    return spans


def conversation(engine: Provider) -> list[Json]:
    """The last conversation that the engine has seen, less what a template does not look at."""
    asked = json.loads(engine.log[-1].body)
    assert asked["tools"][0]["function"]["parameters"] == TOOL["input_schema"]
    calls = [[call["id"] for call in message.get("tool_calls") or ()] for message in asked["messages"]]
    return [
        said(message["role"], message.get("content"), made, message.get("tool_call_id"))
        for message, made in zip(asked["messages"], calls, strict=True)
    ]


def expected(system: Any) -> list[Json]:
    ids = [call.id for call in CALLS]
    return [
        said("system", system),
        said("user", "How warm is it?"),
        said("assistant", "Let me look.", ids),
        said("tool", "17", of=ids[0]),
        said("tool", "17", of=ids[1]),
        said("assistant", None, ids[:1]),
        said("tool", "17", of=ids[0]),
    ]


def said(role: str, content: Any, calls: Sequence[str] = (), of: str | None = None) -> Json:
    return {"role": role, "content": content, "calls": [*calls], "of": of}


@STREAMS
async def test_an_anthropic_agent_calls_tools(gateway: Gateway, engine: Provider, tape: Tape, stream: bool) -> None:
    engine.script, engine.log = STORY.copy(), []
    rollout = f"claude-{stream}"
    first, second, last = await claude_agent(gateway, rollout, stream)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert [block.id for block in first.content if block.type == "tool_use"] == [call.id for call in CALLS]
    assert [block.input for block in first.content if block.type == "tool_use"] == [
        {"city": "Orléans"},
        {"city": "Rome"},
    ]
    assert (first.stop_reason, second.stop_reason, last.stop_reason) == ("tool_use", "tool_use", "end_turn")
    assert (last.content[0].type, getattr(last.content[0], "text", None)) == ("text", "It is 17.")
    assert conversation(engine) == expected([{"type": "text", "text": "Be short."}])
    spans = await spans_of(tape, rollout, engine, "messages")
    assert [span.response_id for span in spans] == [first.id, second.id, last.id]
    assert spans[0].usage is not None
    assert (spans[0].usage.input_tokens, spans[0].usage.output_tokens) == (
        first.usage.input_tokens,
        first.usage.output_tokens,
    )


@pytest.mark.slow
async def test_a_tool_runner_that_asks_for_a_thread_goes_on_without_one(gateway: Gateway, engine: Provider) -> None:
    """The engine keeps no conversations: the SDK is told so in the API's own words, and sends the whole."""
    engine.script, engine.log = STORY.copy(), []
    get = anthropic.beta_async_tool(_get, name="get", description="Looks a city up.")
    asked: Any = [{"role": "user", "content": "How warm is it?"}]
    async with claude(gateway, "runner") as client:
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=100, tools=[get], messages=asked)
        last = await runner.until_done()
    assert getattr(last.content[0], "text", None) == "It is 17."
    roles = [message["role"] for message in json.loads(engine.log[-1].body)["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool"]


async def _get(city: str) -> str:
    return city and "17"


@STREAMS
async def test_an_openai_agent_of_responses_calls_tools(
    gateway: Gateway, engine: Provider, tape: Tape, stream: bool
) -> None:
    engine.script, engine.log = STORY.copy(), []
    rollout = f"gpt-{stream}"
    first, second, last = await gpt_agent(gateway, rollout, stream)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [(call.id, call.arguments) for call in CALLS]
    assert (first.output_text, last.output_text, last.status) == ("Let me look.", "It is 17.", "completed")
    assert conversation(engine) == expected("Be short.")
    spans = await spans_of(tape, rollout, engine, "responses")
    assert [span.response_id for span in spans] == [first.id, second.id, last.id]
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert spans[0].usage is not None
    assert (spans[0].usage.input_tokens, spans[0].usage.output_tokens) == (
        first.usage.input_tokens,
        first.usage.output_tokens,
    )


AGENTS: list[Agent] = [claude_agent, gpt_agent]


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_translated_rollout_is_one_sample(gateway: Gateway, engine: Provider, tape: Tape, agent: Agent) -> None:
    """Where the template writes what was generated as it was generated, the conversation is one sequence."""
    from penstock.adapters.samples import Options, samples
    from penstock.adapters.source import load

    engine.script, engine.log = STORY.copy(), []
    rollout = f"sample-{AGENTS.index(agent)}"
    await agent(gateway, rollout, True)
    await tape.spans(rollout, len(STORY))
    async with Client(gateway.url) as client:
        (episode,) = [one async for one in load(client, [rollout])]
    found, report = samples(episode, Options(allow=frozenset({"no_reward"})))
    assert (report.samples, report.choices, report.dropped) == (1, len(STORY), [])
    (made,) = found
    assert [segment.sequence for segment in made.segments] == [1, 2, 3]


@STREAMS
async def test_refusals_are_errors_of_the_agents_api(
    gateway: Gateway, engine: Provider, tape: Tape, stream: bool
) -> None:
    engine.log = []
    search: Json = {"type": "web_search_20250305", "name": "web_search"}
    async with claude(gateway, f"refused-{stream}") as client:
        said = r"tools\[0\]\.type: 'web_search_20250305' is a search that the provider runs"
        with pytest.raises(anthropic.BadRequestError, match=said):
            await message_of(client, stream, messages=[{"role": "user", "content": "hi"}], tools=[search])
    async with gpt(gateway, f"refused-{stream}") as client:
        with pytest.raises(openai.BadRequestError, match="the gateway keeps no responses") as refused:
            await response_of(client, stream, input="hi", previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "translation")
    assert engine.log == []
    one, two = await tape.spans(f"refused-{stream}", 2)
    assert [(span.dialect, span.error, span.http_status) for span in (one, two)] == [
        ("messages", "translation", 400),
        ("responses", "translation", 400),
    ]


@STREAMS
async def test_errors_of_the_engine_are_those_of_the_agents_api(
    gateway: Gateway, engine: Provider, stream: bool
) -> None:
    engine.script = [Failure(429, "Too many.", headers={"Retry-After": "7"}), Failure(500, "Out of memory.")]
    async with claude(gateway, "errors") as client:
        with pytest.raises(anthropic.RateLimitError, match=r"Too many\.") as limited:
            await message_of(client, stream, messages=[{"role": "user", "content": "hi"}])
    assert limited.value.response.headers["retry-after"] == "7"
    async with gpt(gateway, "errors") as client:
        with pytest.raises(openai.InternalServerError, match=r"Out of memory\."):
            await response_of(client, stream, input="hi")


async def test_tokens_are_counted_where_they_were(gateway: Gateway, engine: Provider) -> None:
    engine.log = []
    async with claude(gateway, "counting") as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="policy", messages=[{"role": "user", "content": "hi"}])
    assert [seen.path for seen in engine.log] == ["/v1/messages/count_tokens"]


async def test_other_models_are_not_translated(gateway: Gateway, engine: Provider) -> None:
    engine.log = []
    async with gpt(gateway, "other") as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="judge", input="hi")
    assert [seen.path for seen in engine.log] == ["/v1/responses"]


async def test_a_refusal_after_which_the_agent_asks_otherwise_is_no_error(
    gateway: Gateway, engine: Provider, tape: Tape
) -> None:
    async def errors() -> tuple[int, int, list[str]]:
        """Of the rollout, of all calls, and what the doctor says of the first call."""
        found = await tape.get("/api/rollouts/bargain/diagnosis")
        codes = [one["code"] for one in found["attempts"][0]["calls"][0]["findings"]]
        totals = (await tape.get("/api/rollouts/bargain"))["attempts"][0]["totals"]
        return totals["errors"], (await tape.get("/api/stats"))["by_model"]["policy-bargain"]["errors"], codes

    asked: Json = {"model": "policy-bargain", "messages": [{"role": "user", "content": "?"}]}
    engine.script = [DemoAnswer("It is 17.")]
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    async with claude(gateway, "bargain") as client:
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await message_of(client, False, **asked, tools=[search])
        await tape.spans("bargain", 1)
        assert await errors() == (1, 1, ["error"])
        await message_of(client, False, **asked)
        await tape.spans("bargain", 2)
        assert await errors() == (0, 0, ["refused"])
        # What fails later is an error again.
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await message_of(client, False, **asked, tools=[search])
        await tape.spans("bargain", 3)
        assert (await errors())[:2] == (1, 1)
