"""Turns and their messages as passages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.gateway.model.passage import Passage
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.wire.dialects.loose_json import arr, dumps, obj

_SAID: Final = ("text", "title", "context", "reason", "stdout", "stderr", "output")
"""The fields that hold texts in data that is no text itself."""


def turn_passages(turn: Turn) -> Iterator[Passage]:
    """All passages of a turn."""
    for message in turn.messages:
        yield from message_passages(message, False)
    for choice in turn.choices:
        yield from message_passages(choice.message, True)
    if turn.error:
        yield error_passage(turn.error)


def message_passages(message: Message, answer: bool) -> Iterator[Passage]:
    """The passages of a message's parts that have a text."""
    for part in message.parts:
        yield from part_passages(part, message.role, answer)


def part_passages(part: Part, role: str, answer: bool) -> Iterator[Passage]:
    """The passage of a part, if it has a text."""
    if said := _text(part):
        yield Passage(answer, role, part.type, part.name, part.id, said)


def error_passage(text: str) -> Passage:
    """The error message of a failed call as a passage."""
    return Passage(True, "", "error", None, None, text)


def body_passages(body: bytes, answer: bool) -> Iterator[Passage]:
    """The body of a call in no known format, if it is text."""
    try:
        if said := body.decode():
            yield Passage(answer, "", "body", None, None, said)
    except UnicodeDecodeError:
        return


def _text(part: Part) -> str | None:
    match part.type:
        case "tool_call":
            return f"{part.name or ''}({part.arguments or ''})"
        case "unknown":
            return None if part.data is None or _is_numbers(part.data) else dumps(part.data)
        case "tool_call_response" | "media":
            said = part.text or ""
            return "\n".join(filter(None, (said, *(text for text in _texts(part.data) if text not in said))))
        case _:
            return part.text


def _texts(data: Any) -> Iterator[str]:
    """The texts in data that is no text itself: documents, resources, a shell's output; no images."""
    rest = [data]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            wire = obj(one)
            if wire.get("structuredContent") is not None:
                yield dumps(wire["structuredContent"])
            named = [*_SAID, "data"] if wire.get("type") == "text" else _SAID
            yield from (text for name in named if isinstance(text := wire.get(name), str) and text)
            rest += [value for name, value in wire.items() if name != "structuredContent"][::-1]
        elif isinstance(one, list):
            rest += arr(one)[::-1]


def _is_numbers(data: Any) -> bool:
    """True for a token id or a list of them."""
    return isinstance(data, int) or (isinstance(data, list) and all(map(_is_numbers, arr(data)[:1])))
