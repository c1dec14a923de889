"""Turns and their messages as passages."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.gateway.dialects.loose_json import dumps, obj
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.turn import Message, Part, Turn


def of_turn(turn: Turn) -> Iterator[Passage]:
    """All that is said in a turn."""
    for message in turn.messages:
        yield from of_message(message, False)
    for choice in turn.choices:
        yield from of_message(choice.message, True)
    if turn.error:
        yield of_error(turn.error)


def of_message(message: Message, answer: bool) -> Iterator[Passage]:
    """Its parts that have a text."""
    for part in message.parts:
        yield from of_part(part, message.role, answer)


def of_part(part: Part, role: str, answer: bool) -> Iterator[Passage]:
    """Its text, if it has one."""
    if said := _text(part):
        yield Passage(answer, role, part.type, part.name, part.id, said)


def of_error(text: str) -> Passage:
    """What a provider says of a call that failed."""
    return Passage(True, "", "error", None, None, text)


def of_body(body: bytes, answer: bool) -> Iterator[Passage]:
    """A body that nobody understands, if it is text."""
    try:
        if said := body.decode():
            yield Passage(answer, "", "body", None, None, said)
    except UnicodeDecodeError:
        return


def _text(part: Part) -> str | None:
    if part.type == "tool_call":
        return f"{part.name or ''}({part.arguments or ''})"
    if part.type == "unknown":
        return None if part.data is None else dumps(part.data)
    if part.text is None and part.type == "tool_call_response":
        given = obj(part.data).get("structuredContent")
        return None if given is None else dumps(given)
    return part.text
