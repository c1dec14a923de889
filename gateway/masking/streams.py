"""Joins texts that a stream has cut over several events, so that a pattern finds what no event holds alone. Pure.

Strings at the same place of several events are one text: the same path, where elements of lists count by their `index`
if they say one, and the same numbers and ids of blocks beside. So nothing is known of a wire format; a new one is
joined too. Members that are said again in each event, such as `id` and `model`, are not joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, cast

from penstock.gateway.masking.json_walk import Found
from penstock.gateway.masking.paths import Path
from penstock.gateway.masking.text import Text, literal

_AGAIN: Final = frozenset({
    "id", "object", "model", "type", "role", "event", "status", "system_fingerprint", "service_tier", "finish_reason",
    "stop_reason", "stop_sequence", "item_id", "call_id", "response_id", "responseId", "modelVersion", "finishReason",
    "obfuscation", "p", "signature", "thoughtSignature", "encrypted_content", "createTime", "jsonrpc", "method",
    "progressToken", "native_finish_reason", "provider",
})  # fmt: skip
_PLACES: Final = frozenset({
    "index", "output_index", "content_index", "summary_index", "annotation_index", "contentBlockIndex", "item_id",
})  # fmt: skip


_DONE: Final = b"[DONE]"
"""Ends streams of OpenAI."""


class Channels:
    """The texts of a stream, by where they stand in its events."""

    def __init__(self) -> None:
        self._parts: dict[tuple[object, ...], tuple[Path, list[Text]]] = {}

    def add(self, event: Text, found: Iterable[Found]) -> None:
        """Takes one event."""
        found = list(found)
        places = {one.path: event.data[one.start : one.end] for one in found if _is_place(one)}
        beside = tuple([(path, said) for path, said in places.items() if len(path) == 1])
        for one in found:
            if one.kind == "text" and not (one.path and one.path[-1] in _AGAIN):
                key = (beside, *_placed(one.path, places))
                self._parts.setdefault(key, (one.path, []))[1].append(literal(event, one.start, one.end))

    def add_text(self, event: Text) -> None:
        """Takes an event that is no JSON."""
        self._parts.setdefault((), ((), []))[1].append(event)

    def cut_apart(self) -> list[tuple[Path, list[Text]]]:
        """Texts of several pieces, with their paths."""
        return [(path, parts) for path, parts in self._parts.values() if len(parts) > 1]


def joined_texts(events: Iterable[bytes]) -> list[bytes] | None:
    """What `Channels` would join of these events, as texts alone; None where one is read better with care."""
    parts: dict[tuple[object, ...], list[str]] = {}
    for event in events:
        if event[:1] not in (b"{", b"["):
            return None
        try:
            value = json.loads(event, object_pairs_hook=_object)
        except _Twice:
            return None
        except (ValueError, RecursionError):
            if event != _DONE:
                return None
            parts.setdefault((), []).append("")
            continue
        _gather(value, (_beside(value),), parts)
    return ["".join(one).encode("utf-8", "surrogatepass") for one in parts.values() if len(one) > 1]


class _Twice(Exception):
    """A key stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Twice
    return made


def _beside(value: Any) -> object:
    if not isinstance(value, dict):
        return None
    return tuple([(key, said) for key, said in cast(dict[str, Any], value).items() if key in _PLACES])


def _gather(value: Any, key: tuple[object, ...], parts: dict[tuple[object, ...], list[str]]) -> None:
    if isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            if isinstance(inner, str):
                if name not in _AGAIN:
                    parts.setdefault((*key, name), []).append(inner)
            elif isinstance(inner, dict | list):
                _gather(inner, (*key, name), parts)
    elif isinstance(value, list):
        for at, inner in enumerate(cast(list[Any], value)):
            # An element counts by the index that it says, if it says one.
            said = cast(dict[str, Any], inner).get("index") if isinstance(inner, dict) else None
            place = (*key, at if said is None else str(said))
            if isinstance(inner, str):
                parts.setdefault(place, []).append(inner)
            else:
                _gather(inner, place, parts)


def _is_place(one: Found) -> bool:
    return one.kind in ("integer", "text") and bool(one.path) and one.path[-1] in _PLACES


def _placed(path: Path, places: dict[Path, bytes]) -> tuple[object, ...]:
    """The path with elements by the index that they say."""
    if not places:
        return path
    return tuple(
        [
            places.get((*path[: at + 1], "index"), step) if isinstance(step, int) else step
            for at, step in enumerate(path)
        ]
    )
