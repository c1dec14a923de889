"""Checks whether a request can be translated. Pure; whatever cannot is refused, with its place, rather than left out.

Chat completions cannot express much of what messages and responses can ask: tools that the provider runs, documents,
conversations that it keeps. A request that asks for one of these would get an answer to another question. Fields that
only say how to serve a request (caching, tiers, storing) are left out: the answer is the same without them. The tables
of `messages_request` and `responses_request`, and docs/translation.md, list both kinds of fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final, NoReturn

from penstock.gateway.model.negotiation import KIND
from penstock.gateway.wire.dialects.loose_json import Json, arr, obj, replace_invalid_characters, strict, text
from penstock.gateway.wire.http.errors import ClientFault

_ABSENT: Final[tuple[Any, ...]] = (None, False, [], {}, "")


def refuse(field: str, message: str) -> NoReturn:
    """Raise `ClientFault` for a request that cannot be translated."""
    raise ClientFault(400, KIND, message, field)


def document(body: bytes) -> Json:
    """The request; refused unless it is a JSON object that loses nothing in reading but halves of characters."""
    asked = obj(strict(body) or strict(replace_invalid_characters(body)))
    if not asked:
        refuse("body", "the request is no readable JSON object")
    if not text(asked.get("model")):
        refuse("model", "the request names no model")
    return asked


def only(asked: Json, known: Collection[str], left_out: Collection[str], where: str = "") -> Json:
    """The fields of an object in `known`; any other that is not in `left_out` is refused."""
    for name, value in asked.items():
        if name not in known and name not in left_out and value not in _ABSENT:
            refuse(where + name, "it cannot be said in chat completions, which is all that this model's engine speaks")
    return {name: value for name, value in asked.items() if name in known and value is not None}


def one_of(value: Any, allowed: Collection[str | None], where: str) -> str:
    """The value, or "" for None; refused unless it is one of `allowed`."""
    if not (isinstance(value, str) or value is None) or value not in allowed:
        shown = ", ".join(repr(one) for one in allowed if one is not None)
        refuse(where, f"{value!r} cannot be said in chat completions; allowed: {shown}")
    return value or ""


def object_field(asked: Json, name: str, where: str = "") -> Json:
    """A field that must be an object if it is there; else {}."""
    value = asked.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(where + name, "it must be an object")
    return obj(value)


def items(value: Any, where: str) -> Iterator[tuple[Json, str]]:
    """Yield the objects in an array, each with its place."""
    if not isinstance(value, list):
        refuse(where, "it must be an array")
    for at, item in enumerate(arr(value)):
        place = f"{where}[{at}]"
        if not isinstance(item, dict):
            refuse(place, "it must be an object")
        yield obj(item), place


def non_empty_text(value: Any, where: str) -> str:
    """The value; refused unless it is a string that is not empty."""
    found = text(value)
    if not found:
        refuse(where, "it must be a string that is not empty")
    return found
