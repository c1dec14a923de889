"""Turns and their messages as passages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.gateway.dialects.loose_json import arr, dumps, obj
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.turn import Message, Part, Turn

_SAID: Final = ("text", "title", "context", "reason", "stdout", "stderr", "output")
"""The fields that hold texts in data that is no text itself."""


def of_turn(turn: Turn) -> Iterator[Passage]:
    """All passages of a turn."""
    for message in turn.messages:
        yield from of_message(message, False)
    for choice in turn.choices:
        yield from of_message(choice.message, True)
    if turn.error:
        yield of_error(turn.error)


def of_message(message: Message, answer: bool) -> Iterator[Passage]:
    """The passages of a message's parts that have a text."""
    for part in message.parts:
        yield from of_part(part, message.role, answer)


def of_part(part: Part, role: str, answer: bool) -> Iterator[Passage]:
    """The passage of a part, if it has a text."""
    if said := _text(part):
        yield Passage(answer, role, part.type, part.name, part.id, said)


def of_error(text: str) -> Passage:
    """The error message of a failed call as a passage."""
    return Passage(True, "", "error", None, None, text)


def of_body(body: bytes, answer: bool) -> Iterator[Passage]:
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
