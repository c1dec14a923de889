"""OpenTelemetry attribute values as plain values: text, bools, ints, floats, None, and lists and dicts of them.

The heads of spans are read in lists, so the content of a foreign span is limited: a long text is cut, everything beyond
the limits is left out, and the span is marked. Bytes become base64 text.

The input is messages of protobuf or those of `gateway.followers.otlp.json_encoding`, which have the same fields.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1 import common_pb2

    from penstock.gateway.followers.otlp import json_encoding

    AnyValue = common_pb2.AnyValue | json_encoding.AnyValue
    KeyValue = common_pb2.KeyValue | json_encoding.KeyValue

MOST_ATTRIBUTES = 128
"""Most attributes of one span, event, link, resource or map: the SDKs' own default."""
MOST_ITEMS = 128
"""Most elements of one list."""
LONGEST_KEY = 256
"""Most characters of a key."""
LONGEST_TEXT = 8192
"""Most characters of one text."""
MOST_CHARACTERS = 65536
"""Most characters of all texts of one span, keys included."""
MOST_LOOKED = 8192
"""Most attributes and elements of one span that are read: two bytes can stand for one."""
DEEPEST = 6
"""Most levels of lists and maps."""


class Bounds:
    """The limits of one span's content; everything in the span counts towards them."""

    __slots__ = ("clipped", "dropped", "left", "looks")

    def __init__(self) -> None:
        self.left = MOST_CHARACTERS
        self.looks = MOST_LOOKED
        self.dropped = 0
        """Number of attributes that were left out."""
        self.clipped = False
        """True when anything was cut or left out."""

    def attributes(self, pairs: Sequence[KeyValue] | None, depth: int = 0) -> dict[str, Any]:
        """Attributes as a dict; of two with one key the last counts."""
        found: dict[str, Any] = {}
        for at, pair in enumerate(pairs or ()):
            if not self.looks:
                self.clipped = True
                self.dropped += len(pairs or ()) - at
                break
            self.looks -= 1
            key = pair.key
            size = len(key)
            if size > self.left or size > LONGEST_KEY or len(found) >= MOST_ATTRIBUTES:
                self.clipped = True
                self.dropped += 1
            else:
                self.left -= size
                found[key] = self.value(pair.value, depth)
        return found

    def value(self, value: AnyValue | None, depth: int = 0) -> Any:
        """An attribute's value as a plain value."""
        if value is None:
            return None
        if text := value.string_value:  # the commonest kind, and only one kind can be there
            return self.text(text)
        kind = value.WhichOneof("value")
        if kind == "array_value" or kind == "kvlist_value":
            return self._nested(value, kind, depth + 1)
        if kind == "bytes_value":
            raw = value.bytes_value or b""
            return self.text(raw if isinstance(raw, str) else b64encode(raw).decode())
        # An index into a table of strings exists in profiles only; here it has no meaning.
        return None if kind is None or kind == "string_value_strindex" else getattr(value, kind)

    def text(self, text: str, longest: int = LONGEST_TEXT) -> str:
        """A text, cut to the limits."""
        size = len(text)
        if size > longest or size > self.left:
            self.clipped = True
            text = text[: min(longest, self.left)]
            size = len(text)
        self.left -= size
        return text

    def _nested(self, value: AnyValue, kind: str, depth: int) -> Any:
        inner = getattr(value, kind)
        found = (inner.values if inner is not None else None) or ()
        if depth > DEEPEST:
            self.clipped = True
            return None
        if kind == "kvlist_value":
            return self.attributes(found, depth)
        # An element costs something even if it is empty.
        self.left -= min(len(found), MOST_ITEMS, self.left)
        most = min(MOST_ITEMS, self.looks)
        self.looks -= min(len(found), most)
        self.clipped |= len(found) > most
        return [self.value(one, depth) for one in islice(found, most)]
