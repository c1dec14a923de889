"""Access to JSON that may be anything: every function takes any value and none of them raises.

A provider's body is read through these, so that an odd value is an absent one and never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import orjson

from gateway import sse
from gateway.model import Usage

Json = dict[str, Any]

UNREADABLE = (ValueError, RecursionError)
"""What msgspec and orjson raise on bytes that are no JSON, or are nested too deep."""

LONGEST_LABEL = 256
MOST_TOKENS = 1 << 53


class Peek(msgspec.Struct):
    """What the hot path wants of a request; everything else is skipped without making an object of it."""

    model: Any = None
    n: Any = None
    tools: msgspec.Raw = msgspec.Raw()


_PEEK = msgspec.json.Decoder(Peek)


def peek(request: bytes) -> Peek:
    """The few fields of a request body that a head needs."""
    try:
        return _PEEK.decode(request)
    except UNREADABLE:
        return Peek()


def loads(body: bytes | str) -> Any:
    """The JSON value, None when there is none."""
    try:
        value = orjson.loads(body)
        # orjson writes 254 levels and pydantic about as many: what is deeper could be read but never shown again.
        # The brackets stand for the levels that a Turn and its answer add.
        orjson.dumps([[[[[[[[[[value]]]]]]]]]])
    except (*UNREADABLE, TypeError):
        return None
    return value


def document(body: bytes, what: str, problems: list[str]) -> Json:
    """A body as a JSON object; a problem is noted and {} given when it is none."""
    value = loads(body)
    if not isinstance(value, dict):
        problems.append(f"{what}: {'not a JSON object' if body else 'empty'}")
    return obj(value)


def chunks(body: bytes, problems: list[str]) -> Iterator[Json]:
    """The JSON objects of a stream. An error event looks the same however it was sent: an object with `error`."""
    for number, event in enumerate(sse.events(body), 1):
        value = loads(event.data)
        if isinstance(value, dict):
            chunk = obj(cast(Any, value))
            failed = "error" in (event.type, chunk.get("type"))
            yield {"error": chunk} if failed and "error" not in chunk else chunk
        elif event.data.strip() != "[DONE]":
            problems.append(f"response: event {number} is not a JSON object")


def obj(value: Any) -> Json:
    """The value if it is an object, else {}."""
    return cast(Json, value) if isinstance(value, dict) else {}


def arr(value: Any) -> list[Any]:
    """The value if it is an array, else []."""
    return cast(list[Any], value) if isinstance(value, list) else []


def objs(value: Any) -> list[Json]:
    """The objects in an array."""
    return [cast(Json, item) for item in arr(value) if isinstance(item, dict)]


def text(value: Any) -> str | None:
    """The value if it is a string."""
    return value if isinstance(value, str) else None


def label(value: Any) -> str | None:
    """The value if it is a string short enough for a head."""
    return value if isinstance(value, str) and len(value) <= LONGEST_LABEL else None


def count(value: Any) -> int | None:
    """The value if it is a sane count."""
    return value if type(value) is int and 0 <= value < MOST_TOKENS else None


def joined(pieces: list[Json], key: str) -> str | None:
    """The strings under a key, put together; None when there is not one."""
    found = [value for piece in pieces if isinstance(value := piece.get(key), str)]
    return "".join(found) if found else None


def earliest(pieces: list[Json], key: str) -> Any:
    """The first value under a key that says something."""
    return next((value for piece in pieces if (value := piece.get(key))), None)


def dumps(value: Any) -> str:
    """A value that came from `loads` as compact JSON text."""
    return orjson.dumps(value).decode()


def tokens(usage: Any, asked: str, made: str) -> Usage | None:
    """Usage as OpenAI's APIs write it: `prompt_tokens` and `completion_tokens`, or `input_tokens` and `output_tokens`."""
    fields = obj(usage)
    if not fields:
        return None
    read, written = obj(fields.get(asked + "_tokens_details")), obj(fields.get(made + "_tokens_details"))
    return Usage(
        input_tokens=count(fields.get(asked + "_tokens")),
        output_tokens=count(fields.get(made + "_tokens")),
        cached_tokens=count(read.get("cached_tokens")),
        cache_write_tokens=count(read.get("cache_write_tokens")),
        reasoning_tokens=count(written.get("reasoning_tokens")),
    )


def error_message(answer: Json) -> str | None:
    """The provider's message, if the body is an error in any of the shapes that servers use."""
    error = answer.get("error")
    if error is None and (answer.get("object") == "error" or ("detail" in answer and len(answer) == 1)):
        error = answer
    if not error:
        return None
    fields = obj(error)
    return text(error) or text(fields.get("message")) or text(fields.get("detail")) or dumps(error)
