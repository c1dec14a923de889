"""A conversation as it stands in a request: the raw JSON of each of its items, cut out without making objects of them.

A request of common size is cut by msgspec in one pass, which also reads the fields that the summary needs. msgspec does
not let other threads run meanwhile, so a request larger than `LARGE` is cut by `skim`, in a thread: it walks through
the body in steps of well below a millisecond each, at a tenth of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.gateway.wire.dialects.json_scan import elements, members
from penstock.gateway.wire.dialects.loose_json import (
    UNREADABLE,
    RequestFields,
    arr,
    base_fields,
    fields_from_members,
    is_bulky,
    peek,
    repaired,
)

LARGE: Final = 256 << 10
"""Bytes of a request above which msgspec would delay other calls."""
ANSWER_TYPE_SUFFIXES: Final = ("_call_output", "_approval_response")
"""Ends of the types of those items by which a client answers the model, where items have types."""
MOST_ITEMS: Final = 1 << 16
"""Most items of a conversation, and most members of a request, that are read of a large request."""

T = TypeVar("T")
RequestMembers = dict[str, "msgspec.Raw | list[msgspec.Raw]"]
"""Members of a request by name: raw JSON, or for a list, the raw JSON of its items."""


class ConversationItems(NamedTuple):
    """The items of a request's conversation."""

    asked: RequestFields | None
    """The fields that the summary needs; None where nothing was read."""
    raw: list[msgspec.Raw]
    """The items as JSON objects, oldest first. They hold the whole request in memory."""
    previous: str | None = None
    """The id of the response that the items continue, where they are not the whole conversation."""


def cutter(kind: type[RequestFields]) -> Callable[[bytes], tuple[RequestFields, RequestMembers]]:
    """Return a function that reads requests. `kind` extends `RequestFields` by a field for each member that belongs to
    the conversation, of type `msgspec.Raw`, a list of it, or a type that msgspec can write again."""
    decode = msgspec.json.Decoder(kind).decode
    wanted = frozenset(kind.__struct_fields__)
    names = tuple(wanted - set(RequestFields.__struct_fields__))

    def cut(body: bytes) -> tuple[RequestFields, RequestMembers]:
        if len(body) > LARGE:
            return _skimmed(body, wanted)
        try:
            asked = decode(body)
        except UNREADABLE:
            try:
                asked = repaired(decode, body)
            except UNREADABLE:
                return peek(body), {}
            # The items are taken as they stand in the body, so that the body can become a stem.
            return base_fields(asked), _skimmed(body, wanted)[1]
        values: RequestMembers = {}
        for name in names:
            if value := getattr(asked, name):
                values[name] = _raw(value)
        return base_fields(asked), values

    return cut


def _raw(value: Any) -> msgspec.Raw | list[msgspec.Raw]:
    if isinstance(value, list):
        return arr(value)
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))


def member_json(value: msgspec.Raw | list[msgspec.Raw] | None) -> bytes:
    """A member as JSON; empty where there is none."""
    if isinstance(value, list):
        return b"[" + b",".join(map(bytes, value)) + b"]"
    return b"" if value is None else bytes(value)


def _skimmed(body: bytes, names: frozenset[str]) -> tuple[RequestFields, RequestMembers]:
    try:
        found = skim(body, names)
    except ValueError:
        return peek(body), {}
    return fields_from_members(
        {name: member_json(found.pop(name)) for name in RequestFields.__struct_fields__ if name in found}
    ), found


def skim(body: bytes, names: frozenset[str]) -> RequestMembers:
    """The members of a JSON object that have these names; raises `ValueError` where the body is no object. The text
    between its brackets is not checked."""
    if is_bulky(body):
        raise ValueError("it holds more than is read")
    found: RequestMembers = {}
    view = memoryview(body)
    for name, at, end in _bounded(members(body)):
        if name in names:
            listed = body[at] == 0x5B
            cut = [msgspec.Raw(view[a:b]) for a, b in (_bounded(elements(body, at)) if listed else [(at, end)])]
            found[name] = cut if listed else cut[0]
    return found


def _bounded(parts: Iterator[T]) -> Iterator[T]:
    """Limit parts to `MOST_ITEMS`, since the same thread reads the next requests; raises `ValueError` beyond."""
    for number, part in enumerate(parts):
        if number == MOST_ITEMS:
            raise ValueError(f"it holds more than {MOST_ITEMS} items")
        yield part
