"""What official clients do, one function per habit: the same code runs against a provider and through the gateway.

A case returns everything its client got, so that the two runs can be compared.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from anthropic import AsyncAnthropic
from anthropic.types import ToolParam
from fakes.formats import Failure
from fakes.provider import Script
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionToolParam

from examples.demo.model import DemoAnswer, Json, decide

QUESTION = "How much is 19 times 23?"
ASKED: Any = [{"role": "system", "content": "Grüße \u2028 from the system."}, {"role": "user", "content": QUESTION}]
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "multiply", "parameters": SCHEMA, "strict": False}
MESSAGES_TOOL: ToolParam = {"name": "multiply", "input_schema": {"type": "object", "properties": SCHEMA["properties"]}}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a client is told to go. The two base URLs are all that differs between the two runs."""

    openai_url: str
    anthropic_url: str

    def openai(self, max_retries: int = 0) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.openai_url, api_key="sk-agent", max_retries=max_retries)

    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.anthropic_url, api_key="sk-ant-agent", max_retries=0)


@dataclass(frozen=True, slots=True)
class Case:
    """What a client does, what the provider answers, and what must be found on the tape."""

    run: Callable[[Endpoint], Awaitable[Any]]
    dialect: str
    calls: int = 1
    script: Callable[[], Script] = field(default=lambda: decide)

    def __str__(self) -> str:
        return self.run.__name__


# OpenAI ---------------------------------------------------------------------------------------------------------------


async def chat_plain(at: Endpoint) -> Any:
    async with at.openai() as client:
        reply = await client.chat.completions.create(model="gpt-5", messages=ASKED, logprobs=True, temperature=0.0)
        return reply.model_dump()


async def chat_stream(at: Endpoint) -> Any:
    async with at.openai() as client:
        events = await client.chat.completions.create(
            model="gpt-5", messages=ASKED, stream=True, stream_options={"include_usage": True}
        )
        return [event.model_dump() async for event in events]


async def chat_tools(at: Endpoint) -> Any:
    async with at.openai() as client:
        first = await client.chat.completions.create(model="gpt-5", messages=ASKED, tools=[CHAT_TOOL])
        said = first.choices[0].message
        assert said.tool_calls is not None
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "437"}
        conversation: Any = [*ASKED, said.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(model="gpt-5", messages=conversation, tools=[CHAT_TOOL])
        assert second.choices[0].message.content == "The answer is 437."
        return first.model_dump(), second.model_dump()


async def chat_tools_stream(at: Endpoint) -> Any:
    async with (
        at.openai() as client,
        client.chat.completions.stream(model="gpt-5", messages=ASKED, tools=[CHAT_TOOL]) as stream,
    ):
        events = [event.type async for event in stream]
        return events, (await stream.get_final_completion()).model_dump()


async def chat_two_choices(at: Endpoint) -> Any:
    async with at.openai() as client:
        reply = await client.chat.completions.create(model="gpt-5", messages=ASKED, n=2)
        assert len(reply.choices) == 2
        return reply.model_dump()


async def chat_vendor_fields(at: Endpoint) -> Any:
    async with at.openai() as client:
        extra = {"return_token_ids": True, "x_unknown": {"b": 1e-05, "a": [None]}}
        raw = await client.chat.completions.with_raw_response.create(model="q", messages=ASKED, extra_body=extra)
        assert raw.headers.get_list("x-vendor") == ["one", "two"]
        return raw.content


async def completions_plain(at: Endpoint) -> Any:
    async with at.openai() as client:
        return (await client.completions.create(model="davinci", prompt=QUESTION)).model_dump()


async def completions_stream(at: Endpoint) -> Any:
    async with at.openai() as client:
        events = await client.completions.create(model="davinci", prompt=QUESTION, stream=True)
        return [event.model_dump() async for event in events]


async def responses_plain(at: Endpoint) -> Any:
    async with at.openai() as client:
        reply = await client.responses.create(model="gpt-5", instructions="Be brief.", input=QUESTION)
        return reply.output_text, reply.model_dump()


async def responses_stream(at: Endpoint) -> Any:
    async with at.openai() as client:
        events = await client.responses.create(model="gpt-5", input=QUESTION, stream=True)
        return [event.model_dump() async for event in events]


async def responses_tools_stream(at: Endpoint) -> Any:
    async with at.openai() as client:
        events = await client.responses.create(model="gpt-5", input=QUESTION, tools=[RESPONSES_TOOL], stream=True)
        return [event.model_dump() async for event in events]


async def embeddings(at: Endpoint) -> Any:
    async with at.openai() as client:
        return (await client.embeddings.create(model="embed", input=["one", "two"])).model_dump()


async def openai_models(at: Endpoint) -> Any:
    async with at.openai() as client:
        return [model.model_dump() async for model in client.models.list()]


async def openai_retries(at: Endpoint) -> Any:
    async with at.openai(max_retries=1) as client:
        return (await client.chat.completions.create(model="gpt-5", messages=ASKED)).model_dump()


async def openai_fails(at: Endpoint) -> Any:
    with pytest.raises(openai.APIStatusError) as failed:
        await chat_plain(at)
    return type(failed.value), failed.value.body, failed.value.response.headers.get("retry-after")


async def openai_stream_fails(at: Endpoint) -> Any:
    with pytest.raises(openai.RateLimitError) as failed:
        await chat_stream(at)
    return failed.value.body, failed.value.response.headers.get("retry-after")


# Anthropic ------------------------------------------------------------------------------------------------------------


async def messages_plain(at: Endpoint) -> Any:
    async with at.anthropic() as client:
        return (
            await client.messages.create(model="opus", max_tokens=99, system="Hm.", messages=ASKED[1:])
        ).model_dump()


async def messages_stream(at: Endpoint) -> Any:
    async with (
        at.anthropic() as client,
        client.messages.stream(model="opus", max_tokens=99, messages=ASKED[1:]) as stream,
    ):
        events = [event.model_dump() async for event in stream]
        return events, (await stream.get_final_message()).model_dump()


async def messages_tools(at: Endpoint) -> Any:
    async with at.anthropic() as client:
        first = await client.messages.create(model="opus", max_tokens=99, messages=ASKED[1:], tools=[MESSAGES_TOOL])
        call = first.content[0]
        assert call.type == "tool_use"
        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "437"}]}
        conversation: Any = [*ASKED[1:], {"role": "assistant", "content": first.content}, result]
        second = await client.messages.create(model="opus", max_tokens=99, messages=conversation, tools=[MESSAGES_TOOL])
        return first.model_dump(), second.model_dump()


async def messages_tools_stream(at: Endpoint) -> Any:
    async with (
        at.anthropic() as client,
        client.messages.stream(model="opus", max_tokens=99, messages=ASKED[1:], tools=[MESSAGES_TOOL]) as stream,
    ):
        return (await stream.get_final_message()).model_dump()


async def count_tokens(at: Endpoint) -> Any:
    async with at.anthropic() as client:
        return (await client.messages.count_tokens(model="opus", messages=ASKED[1:])).model_dump()


async def anthropic_models(at: Endpoint) -> Any:
    async with at.anthropic() as client:
        return [model.model_dump() async for model in client.models.list()]


async def anthropic_fails(at: Endpoint) -> Any:
    with pytest.raises(anthropic.APIStatusError) as failed:
        await messages_plain(at)
    return type(failed.value), failed.value.body, failed.value.response.headers.get("retry-after")


# Frameworks -----------------------------------------------------------------------------------------------------------


@tool("multiply")
def langchain_multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@asynccontextmanager
async def langchain(at: Endpoint) -> AsyncGenerator[ChatOpenAI]:
    """LangChain's model, with a connection pool that is closed: its own one never is."""
    async with DefaultAsyncHttpxClient() as pool:
        yield ChatOpenAI(
            model="gpt-5",
            base_url=at.openai_url,
            api_key=lambda: "sk-agent",
            max_retries=0,
            http_async_client=pool,
        )


async def langchain_agent(at: Endpoint) -> Any:
    async with langchain(at) as model:
        able = model.bind_tools([langchain_multiply])  # pyright: ignore[reportUnknownMemberType]
        conversation: list[BaseMessage] = [HumanMessage(QUESTION)]
        first: AIMessage = await able.ainvoke(conversation)
        results = [await langchain_multiply.ainvoke(call) for call in first.tool_calls]
        second = await able.ainvoke([*conversation, first, *results])
        assert second.text == "The answer is 437."
        return first.tool_calls, first.usage_metadata, second.response_metadata


async def langchain_stream(at: Endpoint) -> Any:
    async with langchain(at) as model:
        return [(chunk.text, chunk.usage_metadata) async for chunk in model.astream(QUESTION)]


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def agents_responses(at: Endpoint) -> Any:
    async with at.openai() as client:
        agent = Agent(name="Accountant", model=OpenAIResponsesModel("gpt-5", client), tools=[multiply])
        return (await Runner.run(agent, QUESTION)).to_input_list()


async def agents_responses_stream(at: Endpoint) -> Any:
    async with at.openai() as client:
        agent = Agent(name="Accountant", model=OpenAIResponsesModel("gpt-5", client), tools=[multiply])
        streamed = Runner.run_streamed(agent, QUESTION)
        return [event.type async for event in streamed.stream_events()], streamed.to_input_list()


async def agents_chat(at: Endpoint) -> Any:
    async with at.openai() as client:
        agent = Agent(name="Accountant", model=OpenAIChatCompletionsModel("gpt-5", client), tools=[multiply])
        return (await Runner.run(agent, QUESTION)).to_input_list()


# What the provider is told to answer ----------------------------------------------------------------------------------


def says(*outcomes: DemoAnswer | Failure) -> Callable[[], Script]:
    """A script that gives these answers in turn."""
    return lambda: list(outcomes)


THOUGHTFUL = DemoAnswer("Four hundred \U0001f642", thinking="Nineteen times twenty-three is")
VENDOR = DemoAnswer("hm", extra={"prompt_token_ids": [1, 2, 3], "kv_transfer_params": None, "x_vendor": {"k": 1e-07}})
LIMITED = Failure(429, "Slow down.", "rate_limit_exceeded", {"Retry-After": "7"})

CASES = [
    Case(chat_plain, "chat"),
    Case(chat_stream, "chat"),
    Case(chat_tools, "chat", calls=2),
    Case(chat_tools_stream, "chat"),
    Case(chat_two_choices, "chat"),
    Case(chat_vendor_fields, "chat", script=says(VENDOR)),
    Case(completions_plain, "completions"),
    Case(completions_stream, "completions"),
    Case(responses_plain, "responses", script=says(THOUGHTFUL)),
    Case(responses_stream, "responses", script=says(THOUGHTFUL)),
    Case(responses_tools_stream, "responses"),
    Case(embeddings, "embeddings"),
    Case(openai_models, "models"),
    Case(
        openai_retries, "chat", calls=2, script=says(Failure(503, headers={"retry-after-ms": "1"}), DemoAnswer("Yes."))
    ),
    Case(openai_fails, "chat", script=says(Failure(400, "No such model.", "model_not_found"))),
    Case(openai_fails, "chat", script=says(Failure(401, "Bad key.", "invalid_api_key"))),
    Case(openai_fails, "chat", script=says(Failure(404))),
    Case(openai_fails, "chat", script=says(LIMITED)),
    Case(openai_fails, "chat", script=says(Failure(500))),
    Case(openai_stream_fails, "chat", script=says(LIMITED)),
    Case(messages_plain, "messages", script=says(THOUGHTFUL)),
    Case(messages_stream, "messages", script=says(THOUGHTFUL)),
    Case(messages_tools, "messages", calls=2),
    Case(messages_tools_stream, "messages"),
    Case(count_tokens, "count_tokens"),
    Case(anthropic_models, "models"),
    Case(anthropic_fails, "messages", script=says(Failure(400))),
    Case(anthropic_fails, "messages", script=says(Failure(401))),
    Case(anthropic_fails, "messages", script=says(LIMITED)),
    Case(anthropic_fails, "messages", script=says(Failure(529))),
    Case(langchain_agent, "chat", calls=2),
    Case(langchain_stream, "chat"),
    Case(agents_responses, "responses", calls=2),
    Case(agents_responses_stream, "responses", calls=2),
    Case(agents_chat, "chat", calls=2),
]
