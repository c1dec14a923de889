"""Gemini's wire objects as the parts of a Turn, and the pieces of a stream as one answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from penstock.gateway.model.turn import Message, Part, Tool
from penstock.gateway.wire.dialects.loose_json import DEEPEST, Json, arr, count, dumps, obj, objs, text
from penstock.gateway.wire.dialects.parts import result_part, tool_of

_SNAKE = re.compile(r"(?<=[a-z])[A-Z]")
ROLES = {"model": "assistant", "function": "tool"}
MEDIA = ("inlineData", "fileData")
_PIECE = frozenset({"args", "partialArgs", "partial_args", "willContinue", "will_continue"})
_STEP = re.compile(r"""\.([^.\[\]]+)|\[(\d{1,6})\]|\[(["'])(.*?)\3\]""")
"""A step of a JSONPath: a name after a dot, an index of a list, or a name in quotes."""
_VALUES = ("stringValue", "numberValue", "boolValue", "structValue", "listValue", "value")
"""The fields that hold a partial argument's value; without any of them it is null."""


def folded(answers: list[Json], problems: list[str]) -> Json:
    """The answers of a stream as one: the newest value of each field, and all parts of each candidate."""
    whole: Json = {}
    pieces: dict[int, list[Json]] = {}
    for answer in answers:
        whole |= {key: value for key, value in answer.items() if key != "candidates" and value}
        for at, piece in enumerate(objs(answer.get("candidates"))):
            index = count(piece.get("index"))
            pieces.setdefault(at if index is None else index, []).append(piece)
    candidates = [_candidate(index, pieces[index]) for index in sorted(pieces)]
    blocked = obj(whole.get("promptFeedback")).get("blockReason")
    if not ("error" in whole or blocked or (candidates and all(map(_finished, candidates)))):
        problems.append("response: the stream ended early")
    return whole | ({"candidates": candidates} if candidates else {})


def _finished(candidate: Json) -> bool:
    return bool(candidate.get("finishReason"))


def _candidate(index: int, pieces: list[Json]) -> Json:
    whole: Json = {}
    parts: list[list[Json]] = []
    calls = FunctionCallBuilder()
    for piece in pieces:
        whole |= {key: value for key, value in piece.items() if value}
        for item in items(obj(piece.get("content")).get("parts")):
            part = obj(item)
            given = field(part, "functionCall")
            call = calls.add(obj(given)) if isinstance(given, dict) else None
            if call is not None:
                parts += [[{**_without_call(part), "functionCall": call}]] if call is calls.begun else []
            elif parts and _goes_on(obj(parts[-1][-1]), part):
                parts[-1].append(part)
            else:
                parts.append([part or item])
    return whole | {"index": index, "content": {"role": "model", "parts": [_joined(group) for group in parts]}}


def _without_call(part: Json) -> Json:
    return {key: value for key, value in part.items() if key not in ("functionCall", "function_call")}


def _joined(group: list[Any]) -> Any:
    return group[0] if len(group) == 1 else group[0] | {"text": "".join(part["text"] for part in group)}


def _goes_on(one: Json, other: Json) -> bool:
    """True if two parts are pieces of one text."""
    alone = {*one, *other} <= {"text", "thought"} and one.get("thought") == other.get("thought")
    return alone and isinstance(one.get("text"), str) and isinstance(other.get("text"), str)


class FunctionCallBuilder:
    """The function calls of a candidate. An incomplete call says so (`willContinue`); the next ones without a name, or
    with the same name, continue it: their `partialArgs` set values of its arguments, each by its path."""

    __slots__ = ("_open", "_paths", "begun", "made")

    def __init__(self) -> None:
        self.made: list[Json] = []
        """All calls, as plain answers have them."""
        self.begun: Json | None = None
        """The newest call, until a piece continues it."""
        self._open: Json | None = None
        self._paths: set[str] = set()
        """The paths whose text the next piece continues."""

    def add(self, piece: Json) -> Json | None:
        """Return the call that a piece begins or continues; None where the piece is no call."""
        call, self.begun = self._open, None
        names = (None, "", call.get("name")) if call is not None else ()
        if call is None or piece.get("name") not in names or piece.get("id") not in (None, call.get("id")):
            if not piece:
                return None
            call = self.begun = {key: value for key, value in piece.items() if key not in _PIECE} | {"args": {}}
            self.made.append(call)
            self._paths.clear()
        given = piece.get("args")
        if given:
            both = isinstance(given, dict) and isinstance(call["args"], dict)
            call["args"] = call["args"] | given if both else given
        for one in objs(field(piece, "partialArgs")):
            self._set(call, one)
        self._open = call if field(piece, "willContinue") is True else None
        return call

    def _set(self, call: Json, one: Json) -> None:
        path = text(field(one, "jsonPath")) or ""
        keys = [int(at) if at else name or quoted for name, at, _, quoted in _STEP.findall(path)]
        if keys and isinstance(call["args"], dict):
            value = next((it for name in _VALUES if (it := field(one, name)) is not None), None)
            set_at(obj(call["args"]), keys[:DEEPEST], value, path in self._paths)
        if field(one, "willContinue") is True:
            self._paths.add(path)
        else:
            self._paths.discard(path)


def set_at(root: Json, keys: list[str | int], value: Any, more: bool) -> None:
    """Set the value at a path, making the objects and lists that are missing. `more`: a text is appended to the text at
    that path."""
    place: Any = root
    for key, below in zip(keys, [*keys[1:], None], strict=True):
        listed = isinstance(place, list)
        at: Any = min(key if isinstance(key, int) else len(arr(place)), len(arr(place))) if listed else str(key)
        if listed and at == len(arr(place)):
            arr(place).append(None)
        there: Any = arr(place)[at] if listed else obj(place).get(at)
        if below is None:
            place[at] = there + value if more and isinstance(there, str) and isinstance(value, str) else value
            return
        wanted: type = list if isinstance(below, int) else dict
        place[at] = there if isinstance(there, wanted) else wanted()
        place = place[at]


def items(value: Any) -> Iterable[Any]:
    """The items of a list; one object stands for a list of one, None for an empty one."""
    return arr(value) if isinstance(value, list) else [] if value is None else [value]


def field(wire: Json, name: str) -> Any:
    """A field by its camelCase or its snake_case name."""
    return wire[name] if name in wire else wire.get(snake(name))


@lru_cache
def snake(name: str) -> str:
    """A camelCase name in snake_case."""
    return _SNAKE.sub(lambda it: "_" + it[0].lower(), name)


def message_of(wire: Json, role: str) -> Message:
    """A content as a message."""
    role = text(wire.get("role")) or role
    parts = [part for item in items(wire.get("parts")) for part in parts_of(item)]
    return Message(role=ROLES.get(role, role), parts=parts)


def parts_of(item: Any) -> list[Part]:
    """A wire part as message parts; none for an empty text."""
    wire = obj(item)
    call, result = obj(field(wire, "functionCall")), obj(field(wire, "functionResponse"))
    said = text(wire.get("text"))
    if call:
        given: Any = (FunctionCallBuilder().add(call) or call).get("args") or {}
        arguments = given if isinstance(given, str) else dumps(given)
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
