"""An agent on the official Anthropic SDK: a real tool, two questions in one conversation, the second one streamed.

It knows nothing of any gateway: ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY say where the model is, as they always do.
"""

from typing import Any

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

MODEL = "claude-haiku-4-5"
MULTIPLY: ToolParam = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def multiply(arguments: dict[str, Any]) -> str:
    return str(arguments["a"] * arguments["b"])


def ask(client: Anthropic, messages: list[MessageParam], question: str) -> str:
    """One question: call the tool as often as the model wants it, then return its words."""
    messages.append({"role": "user", "content": question})
    while True:
        reply = client.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=[MULTIPLY])
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results: list[ToolResultBlockParam] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": multiply(block.input)}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def ask_aloud(client: Anthropic, messages: list[MessageParam], question: str) -> None:
    """One question without tools, the answer printed as it comes."""
    messages.append({"role": "user", "content": question})
    with client.messages.stream(model=MODEL, max_tokens=500, messages=messages) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()


def main() -> None:
    client = Anthropic()
    messages: list[MessageParam] = []
    print(ask(client, messages, "How much is 19 times 23?"))
    ask_aloud(client, messages, "Thank you, that is all.")


if __name__ == "__main__":
    main()
