"""An agent on the official OpenAI SDK: a real tool, two questions in one conversation, the second one streamed.

It knows nothing of any gateway: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, as they always do.
"""

import json
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam

MODEL = "gpt-5-mini"
MULTIPLY: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(a: int, b: int) -> int:
    return a * b


def ask(client: OpenAI, messages: list[Any], question: str) -> str:
    """One question: call the tool as often as the model wants it, then return its words."""
    messages.append({"role": "user", "content": question})
    while True:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[MULTIPLY]).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            assert call.type == "function"
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def ask_aloud(client: OpenAI, messages: list[Any], question: str) -> None:
    """One question without tools, the answer printed as it comes."""
    messages.append({"role": "user", "content": question})
    events = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    for event in events:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


def main() -> None:
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": "You are good with numbers."}]
    print(ask(client, messages, "How much is 19 times 23?"))
    ask_aloud(client, messages, "Thank you, that is all.")


if __name__ == "__main__":
    main()
