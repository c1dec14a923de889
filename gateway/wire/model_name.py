"""Changes the model name in a request. Pure; every other byte stays."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.gateway.wire.capture.json_ranges import LEAF, KeyTree, find
from penstock.gateway.wire.dialects import form
from penstock.gateway.wire.dialects.json_scan import members
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, is_bulky, loads

_MODEL: Final[KeyTree] = {"model": LEAF}


def replace_model(body: bytes, name: str, form_type: str = "") -> bytes:
    """The body with its top-level model name replaced; of several, the last one, which counts. Unchanged if it names
    none. `form_type`: its content type if it is a form."""
    if form_type:
        return form.replaced(body, form_type, "model", name)
    try:
        # `find` takes a quarter of the time, but creates objects for all values that it skips.
        places = [one[1:3] for one in find(body, _MODEL)] if not is_bulky(body) else _walked(body)
    except UNREADABLE:
        return body
    start, end = places[-1] if places else (0, 0)
    if body[start : start + 1] != b'"' or loads(body[start:end]) == name:
        return body
    return b"%b%b%b" % (body[:start], msgspec.json.encode(name), body[end:])


def _walked(body: bytes) -> list[tuple[int, int]]:
    return [(start, end) for key, start, end in members(body) if key == "model"]
