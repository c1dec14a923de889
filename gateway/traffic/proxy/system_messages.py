"""Folds system messages for engines whose chat template takes only one, at the beginning.

Claude Code sends system messages after the user has spoken, and Codex begins with two system messages. Many templates
refuse both, and so the engine refuses every call. System messages at the beginning become one. A later one becomes text
of the user, between `<system>` and `</system>`, where it stood: a conversation that goes on keeps its beginning, and so
its tokens.

A route decides whether this is done (`fold_system`). Without that setting a call goes out unchanged, and once more,
folded, if the engine refuses it with words about systems or roles. If the folded call succeeds, later calls are folded
at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import orjson

from penstock.gateway.config import RouteSettings
from penstock.gateway.model.facts import FOLDED
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.proxy.call_filter import CallFilter, CallPlan
from penstock.gateway.wire.dialects.json_scan import LEAF, JsonRange, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, Json, arr, error_message, loads, obj, strict, text
from penstock.gateway.wire.dialects.parts import TEXT

_SYSTEM: Final = ("system", "developer")
_ABOUT_ROLES: Final = re.compile("system|role", re.IGNORECASE)
FoldedModels = set[tuple[str, str]]
"""Pairs of upstream name and route model whose template takes only one system message."""


class SystemFoldingMiddleware:
    """Folds the system messages of calls, at once or after the engine has refused them."""

    def __init__(self) -> None:
        self._known: FoldedModels = set()

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if the route's model is one of ours: trained, or translated to."""
        return route is not None and bool(route.train or route.translates)

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Fold at once if the template is known to need it; else add the part that folds after a refusal."""
        if route is None or send.call.dialect.name != "chat":
            return
        key = send.pools[0].name, route.model
        if key in self._known:
            send.body, count = fold_system_messages(send.body)
            send.attributes |= {FOLDED: count} if count else {}
            send.convert = _folding(send.convert)
        else:
            send.filters.append(SystemFoldingFilter(self._known, key))


class SystemFoldingFilter(CallFilter):
    """A call that is folded after its engine has refused it."""

    __slots__ = ("_key", "_known", "_tried")

    def __init__(self, known: FoldedModels, key: tuple[str, str]) -> None:
        self._known, self._key, self._tried = known, key, False

    def retry_body(self, record: CallRecord, answer: bytes) -> bytes | None:
        """The request with one system message, if the refusal is about roles; else None."""
        if self._tried or not _ABOUT_ROLES.search(error_message(obj(loads(answer))) or ""):
            return None
        body, count = fold_system_messages(record.body)
        if not count:
            return None
        self._tried, record.convert = True, _folding(record.convert)
        record.note({FOLDED: count})
        return body

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Remember that this template needs folded messages."""
        if self._tried:
            self._known.add(self._key)


def _folding(convert: Callable[[bytes], bytes] | None) -> Callable[[bytes], bytes]:
    return lambda body: fold_system_messages(body if convert is None else convert(body))[0]


def fold_system_messages(body: bytes) -> tuple[bytes, int]:
    """Return a request of chat completions with at most one system message, at the beginning, and the number of
    messages that were folded. The same bytes and 0 if nothing needs folding, or something cannot be folded."""
    try:
        # Of two lists of messages the last one counts.
        places = find(body, {"messages": LEAF})[-1:]
        raw = body[places[0].start : places[0].end] if places else b"[]"
        usual = strict(raw)
        # Python's own reader gives back halves of characters and NaN as they came.
        given = arr(json.loads(raw.decode("utf-8", "surrogatepass")) if usual is None else usual)
        return _spliced(body, places, given, orjson.dumps if usual is not None else lambda it: json.dumps(it).encode())
    except UNREADABLE:
        return body, 0


def _spliced(
    body: bytes, places: list[JsonRange], given: list[Any], write: Callable[[list[Json]], bytes]
) -> tuple[bytes, int]:
    if not all(isinstance(one, dict) for one in given):
        return body, 0
    count = sum(one.get("role") in _SYSTEM for one in given[1:])
    made = _folded(given) if count else None
    return (body, 0) if made is None else (splice(body, places, write(made)), count)


def _folded(given: list[Json]) -> list[Json] | None:
    """The folded messages; None if a system message is more than text."""
    first = next((at for at, one in enumerate(given) if one.get("role") not in _SYSTEM), len(given))
    head = [_said(one.get("content")) for one in given[:first]]
    made: list[Json] = [{"role": "system", "content": "\n\n".join(said or "" for said in head)}] if head else []
    if None in head:
        return None
    for one in given[first:]:
        said = _said(one.get("content")) if one.get("role") in _SYSTEM else None
        if said is not None:
            _tell(made, f"<system>\n{said}\n</system>")
        elif one.get("role") in _SYSTEM:
            return None
        else:
            made.append(one)
    return made


def _tell(made: list[Json], said: str) -> None:
    """Append text to the user's last message, or add a user message."""
    last = made[-1] if made else {}
    content = last.get("content")
    if last.get("role") == "user" and isinstance(content, str):
        made[-1] = last | {"content": f"{content}\n\n{said}"}
    elif last.get("role") == "user" and isinstance(content, list):
        made[-1] = last | {"content": [*arr(content), {"type": "text", "text": said}]}
    else:
        made.append({"role": "user", "content": said})


def _said(content: Any) -> str | None:
    """The text of a content that is only text; None for any other."""
    if isinstance(content, str):
        return content
    parts = [obj(part) for part in arr(content)]
    texts = [text(part.get("text")) for part in parts if text(part.get("type")) in TEXT]
    return "\n".join(said or "" for said in texts) if parts and len(texts) == len(parts) else None
