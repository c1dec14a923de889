"""The content of a call in the shape of the GenAI conventions: messages, instructions, tools, sampling. Pure.

The content is only read and sent when `otlp.capture_content` is set. The shapes are the JSON schemas beside the
conventions: `gen-ai-input-messages.json` and others.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.model.turn import Message, Part, Tool, Turn
from penstock.gateway.wire.dialects import by_name


def of_turn(turn: Turn) -> dict[str, Any]:
    """The content as attributes of a call's span."""
    instructions, messages = _split(turn)
    found = _sampling(turn.sampling) | {
        semconv.INSTRUCTIONS: [part for message in instructions for part in map(_part, message.parts)],
        semconv.INPUT: [_message(message) for message in messages],
        semconv.TOOLS: [_tool(tool) for tool in turn.tools],
        semconv.OUTPUT: [
            _message(choice.message) | {"finish_reason": _finish(choice.finish)} for choice in turn.choices
        ],
    }
    return {name: value for name, value in found.items() if value != []}


def _split(turn: Turn) -> tuple[list[Message], list[Message]]:
    """(instructions, conversation): in dialects that send instructions as messages, these stay in the conversation."""
    if not by_name(turn.dialect).instructions or not turn.messages or turn.messages[0].role != "system":
        return [], turn.messages
    return turn.messages[:1], turn.messages[1:]


def _sampling(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in said.items():
        known = semconv.SAMPLING.get(name)
        if known is not None and isinstance(value, int | float) and not isinstance(value, bool):
            found[known[0]] = known[1](value)
    stops = next((said[name] for name in semconv.STOPS if said.get(name)), None)
    if stops is not None:
        found[semconv.STOP] = [str(one) for one in stops] if isinstance(stops, list) else [str(stops)]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return found


def _message(message: Message) -> dict[str, Any]:
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "parts": [_part(part) for part in message.parts]} | name


def _part(part: Part) -> dict[str, Any]:
    match part.type:
        case "tool_call":
            return {"type": part.type, "id": part.id, "name": part.name or "", "arguments": _arguments(part.arguments)}
        case "tool_call_response":
            return {"type": part.type, "id": part.id, "response": part.data if part.text is None else part.text}
        case "text" | "reasoning" | "refusal":
            return {"type": part.type, "content": part.text or ""}
        case "media" | "unknown":
            return {"type": part.type, "data": part.data}


def _arguments(text: str | None) -> Any:
    """Arguments as a JSON value wherever they are JSON, else as text: models write broken JSON too."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tool(tool: Tool) -> dict[str, Any]:
    found = {"description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "name": tool.name} | {key: value for key, value in found.items() if value is not None}


def _finish(finish: str | None) -> str:
    return "error" if finish is None else semconv.FINISHES.get(finish, finish)
