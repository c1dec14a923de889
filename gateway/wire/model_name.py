"""Changes the model name in a request. Pure; every other byte stays."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.gateway.wire.dialects import form
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, locate
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, loads

_MODEL: Final[KeyTree] = {"model": LEAF}


def replace_model(body: bytes, name: str, form_type: str = "") -> bytes:
    """The body with its top-level model name replaced; of several, the last one, which counts. Unchanged if it names
    none. `form_type`: its content type if it is a form."""
    if form_type:
        return form.replaced(body, form_type, "model", name)
    try:
        start, end = locate(body, _MODEL).get(("model",), (0, 0))
    except UNREADABLE:
        return body
    if body[start : start + 1] != b'"' or loads(body[start:end]) == name:
        return body
    return b"%b%b%b" % (body[:start], msgspec.json.encode(name), body[end:])
