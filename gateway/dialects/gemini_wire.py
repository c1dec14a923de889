"""Gemini's wire objects as what a Turn is made of, and the pieces of a stream as one answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from penstock.gateway.dialects.loose_json import Json, arr, count, dumps, obj, objs, text
from penstock.gateway.dialects.parts import result_part, tool_of
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Message, Part, Tool

_SNAKE = re.compile(r"(?<=[a-z])[A-Z]")
ROLES = {"model": "assistant", "function": "tool"}
MEDIA = ("inlineData", "fileData")


def folded(answers: list[Json], problems: list[str]) -> Json:
    """The answers of a stream as one: the newest of what stands in each, and all parts of each candidate."""
    whole: Json = {}
    pieces: dict[int, list[Json]] = {}
    for answer in answers:
        whole |= {key: value for key, value in answer.items() if key != "candidates" and value is not None}
        for at, piece in enumerate(objs(answer.get("candidates"))):
            index = count(piece.get("index"))
            pieces.setdefault(at if index is None else index, []).append(piece)
    candidates = [_candidate(index, pieces[index]) for index in sorted(pieces)]
    if not ("error" in whole or "promptFeedback" in whole or (candidates and all(map(_finished, candidates)))):
        problems.append("response: the stream ended early")
    return whole | ({"candidates": candidates} if candidates else {})


def _finished(candidate: Json) -> bool:
    return bool(candidate.get("finishReason"))


def _candidate(index: int, pieces: list[Json]) -> Json:
    whole: Json = {}
    parts: list[Any] = []
    for piece in pieces:
        whole |= {key: value for key, value in piece.items() if value is not None}
        for part in items(obj(piece.get("content")).get("parts")):
            if parts and _goes_on(obj(parts[-1]), obj(part)):
                parts[-1] = parts[-1] | {"text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    return whole | {"index": index, "content": {"role": "model", "parts": parts}}


def _goes_on(one: Json, other: Json) -> bool:
    """Whether two parts are pieces of one text."""
    alone = {*one, *other} <= {"text", "thought"} and one.get("thought") == other.get("thought")
    return alone and isinstance(one.get("text"), str) and isinstance(other.get("text"), str)


def items(value: Any) -> Iterable[Any]:
    """What stands in a list, or the one thing that stands for it."""
    return arr(value) if isinstance(value, list) else [] if value is None else [value]


def field(wire: Json, name: str) -> Any:
    """A field by its camelCase name, or by the snake_case one."""
    return wire[name] if name in wire else wire.get(_SNAKE.sub(lambda it: "_" + it[0].lower(), name))


def message_of(wire: Json, role: str) -> Message:
    """A content as a message."""
    role = text(wire.get("role")) or role
    parts = [part for item in items(wire.get("parts")) for part in parts_of(item)]
    return Message(role=ROLES.get(role, role), parts=parts)


def parts_of(item: Any) -> list[Part]:
    """A part as a part of a message; none for an empty text."""
    wire = obj(item)
    call, result = obj(field(wire, "functionCall")), obj(field(wire, "functionResponse"))
    said = text(wire.get("text"))
    if call:
        arguments = dumps(call.get("args") or {})
        return [Part(type="tool_call", id=text(call.get("id")), name=text(call.get("name")), arguments=arguments)]
    if result:
        return [result_part(result.get("id"), dumps(result.get("response")), name=result.get("name"))]
    if any(field(wire, name) is not None for name in MEDIA):
        return [Part(type="media", data=item)]
    if wire.get("thought") is True:
        return [Part(type="reasoning", text=said)]
    if said is None:
        return [Part(type="unknown", data=item)]
    return [Part(type="text", text=said)] if said else []


def tools_of(wire: Json) -> list[Tool]:
    """Functions by name, Google's own tools by their field."""
    declared = objs(items(field(wire, "functionDeclarations")))
    own = [name for name in wire if name not in ("functionDeclarations", "function_declarations")]
    return [
        *[
            tool_of(it, "tool", it["parameters"] if "parameters" in it else field(it, "parametersJsonSchema"))
            for it in declared
        ],
        *[Tool(name=name) for name in own],
    ]


def usage_of(usage: Any) -> Usage | None:
    """Usage as reported; thoughts are output, results of Google's own tools are input."""
    fields = obj(usage)
    if not fields:
        return None
    asked, results = count(fields.get("promptTokenCount")), count(fields.get("toolUsePromptTokenCount"))
    said, thought = count(fields.get("candidatesTokenCount")), count(fields.get("thoughtsTokenCount"))
    return Usage(
        input_tokens=None if asked is None else asked + (results or 0),
        output_tokens=None if said is None and thought is None else (said or 0) + (thought or 0),
        cached_tokens=count(fields.get("cachedContentTokenCount")),
        reasoning_tokens=thought,
    )
