"""A conversation as it stands in a request: the raw JSON of each of its items, cut out without making objects of them.

A request of common size is cut by msgspec in one pass, which gives in the same pass what a summary needs of it. msgspec
does not let other threads run meanwhile, so one larger than `LARGE` is cut by `skim`, for a thread: it walks through
the body in steps of well below a millisecond each, at a tenth of the speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.gateway.dialects.loose_json import UNREADABLE, Peek, arr, is_bulky, loads, peek, peek_of, peeked

LARGE: Final = 256 << 10
"""Bytes of a request above which cutting it would hold others up."""
ANSWERS: Final = ("_call_output", "_approval_response")
"""How the types of those items end with which a client answers the model, where items have types."""
MOST_ITEMS: Final = 1 << 16
"""Items of a conversation, and members of a request, that are read of a large one."""
_STEP = 64 << 10
_BLANK = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^ \t\n\r,\]}]+")
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""What stands before the next bracket; ends early at a string that is longer than the step."""

T = TypeVar("T")
Values = dict[str, "msgspec.Raw | list[msgspec.Raw]"]
"""Members of a request by name, as raw JSON; of those that are lists the items."""


class Items(NamedTuple):
    """What a request holds."""

    asked: Peek | None
    """What was read of it besides."""
    raw: list[msgspec.Raw]
    """The items of its conversation as JSON objects, oldest first. They hold the whole request."""
    previous: str | None = None
    """The id of the response that they go on from, where they are not the whole conversation."""


def cutter(kind: type[Peek]) -> Callable[[bytes], tuple[Peek, Values]]:
    """A function that reads requests: `kind` has a field more than `Peek` for each member that tells the conversation,
    of type `msgspec.Raw`, a list of it, or what msgspec can write again."""
    decode = msgspec.json.Decoder(kind).decode
    wanted = frozenset(kind.__struct_fields__)
    names = tuple(wanted - set(Peek.__struct_fields__))

    def cut(body: bytes) -> tuple[Peek, Values]:
        if len(body) > LARGE:
            return _skimmed(body, wanted)
        try:
            asked = decode(body)
        except UNREADABLE:
            return peek(body), {}
        values: Values = {}
        for name in names:
            if value := getattr(asked, name):
                values[name] = _raw(value)
        return peeked(asked), values

    return cut


def _raw(value: Any) -> msgspec.Raw | list[msgspec.Raw]:
    if isinstance(value, list):
        return arr(value)
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))


def whole(value: msgspec.Raw | list[msgspec.Raw] | None) -> bytes:
    """A member as JSON; nothing where there is none."""
    if isinstance(value, list):
        return b"[" + b",".join(map(bytes, value)) + b"]"
    return b"" if value is None else bytes(value)


def _skimmed(body: bytes, names: frozenset[str]) -> tuple[Peek, Values]:
    try:
        found = skim(body, names)
    except ValueError:
        return peek(body), {}
    return peek_of({name: whole(found.pop(name)) for name in Peek.__struct_fields__ if name in found}), found


def skim(body: bytes, names: frozenset[str]) -> Values:
    """The members of a JSON object that have these names; raises `ValueError` where the body is none. What lies between
    its brackets is not checked."""
    if is_bulky(body):
        raise ValueError("it holds more than is read")
    found: Values = {}
    view = memoryview(body)
    for name, at in _bounded(_members(body)):
        if name in names:
            listed = body[at] == 0x5B
            parts = _bounded(_elements(body, at)) if listed else [(at, _end(body, at))]
            cut = [msgspec.Raw(view[a:b]) for a, b in parts]
            found[name] = cut if listed else cut[0]
    return found


def _bounded(parts: Iterator[T]) -> Iterator[T]:
    """No more than a conversation has: its thread reads the next request after this one."""
    for number, part in enumerate(parts):
        if number == MOST_ITEMS:
            raise ValueError(f"it holds more than {MOST_ITEMS} items")
        yield part


def _members(body: bytes) -> Iterator[tuple[str, int]]:
    """Names and where their values begin."""
    at = _expect(body, 0, b"{")
    while body[(at := _blank(body, at)) : at + 1] == b'"':
        end = _string(body, at + 1)
        name = body[at:end]
        at = _blank(body, _expect(body, end, b":"))
        yield str(loads(name)), at
        at = _blank(body, _end(body, at))
        if body[at : at + 1] != b",":
            break
        at += 1
    _expect(body, at, b"}")


def _elements(body: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Where the elements of a list begin and end."""
    at = _blank(body, at + 1)
    while body[at : at + 1] != b"]":
        end = _end(body, at)
        yield at, end
        at = _blank(body, end)
        if body[at : at + 1] == b",":
            at = _blank(body, at + 1)
        elif body[at : at + 1] != b"]":
            raise ValueError(f"no comma at {at}")


def _blank(body: bytes, at: int) -> int:
    found = _BLANK.match(body, at)
    return at if found is None else found.end()


def _expect(body: bytes, at: int, mark: bytes) -> int:
    at = _blank(body, at)
    if body[at : at + 1] != mark:
        raise ValueError(f"no {mark.decode()} at {at}")
    return at + 1


def _end(body: bytes, at: int) -> int:
    """Where the value that begins here ends."""
    first = body[at : at + 1]
    if first == b'"':
        return _string(body, at + 1)
    if first not in (b"{", b"["):
        found = _SCALAR.match(body, at, at + _STEP)
        if found is None:
            raise ValueError(f"no value at {at}")
        return found.end()
    depth = 0
    while True:
        found = _FLAT.match(body, at, at + _STEP)
        at = at if found is None else found.end()
        mark = body[at : at + 1]
        if mark == b'"':
            at = _string(body, at + 1)
        elif mark in (b"{", b"["):
            depth, at = depth + 1, at + 1
        elif mark in (b"}", b"]"):
            depth, at = depth - 1, at + 1
            if not depth:
                return at
        elif not mark:
            raise ValueError("it ends early")


def _string(body: bytes, at: int) -> int:
    """Where the string ends whose first character stands here."""
    while at < len(body):
        quote = body.find(b'"', at, at + _STEP)
        end = min(at + _STEP, len(body)) if quote < 0 else quote
        if body.find(b"\\", at, end) < 0:
            at = end
        elif (found := _TEXT.match(body, at, at + _STEP)) is not None:
            at = found.end()
        if body[at : at + 1] == b'"':
            return at + 1
        if at + 1 == len(body):
            break
    raise ValueError("a string does not end")
