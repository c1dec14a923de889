"""An agent on the OpenAI Agents SDK: a function tool and the SDK's own loop, over the Responses API.

OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, as they always do. The SDK's own tracing, which would send
the conversation to OpenAI, is off.
"""

import asyncio

from agents import Agent, Runner, function_tool, set_tracing_disabled
from openai.types.responses import ResponseTextDeltaEvent


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(name="Accountant", model="gpt-5-mini", instructions="You are good with numbers.", tools=[multiply])
    result = await Runner.run(agent, "How much is 19 times 23?")
    print(result.final_output)

    conversation = result.to_input_list()
    conversation.append({"role": "user", "content": "Thank you, that is all."})
    streamed = Runner.run_streamed(agent.clone(tools=[]), conversation)
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            print(event.data.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())
