"""Changes the model name in a request. Pure; every other byte stays as it was."""

from __future__ import annotations

import re

import msgspec

_STRING = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)


class _Model(msgspec.Struct):
    model: str


_model = msgspec.json.Decoder(_Model)


def replace_model(body: bytes, name: str) -> bytes:
    """The body with its top-level model name replaced; unchanged when it names none.

    Each place that looks like the key is tried: only at the top-level key does the parser then see the new name.
    """
    wanted = msgspec.json.encode(name)
    if _named(body) in (None, name):
        return body
    for found in _STRING.finditer(body):
        candidate = body[: found.start(1)] + wanted + body[found.end(1) :]
        if _named(candidate) == name:
            return candidate
    return body


def _named(body: bytes) -> str | None:
    try:
        return _model.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
