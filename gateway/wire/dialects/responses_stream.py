"""The stream of a response: its items, put together from the events that servers send, and the fields of its summary.

An item begins with `output_item.added`, continues with deltas and `.done` events, which repeat its texts and arguments,
and ends with `output_item.done`. Servers leave out any of these, the `output_index` too: an event belongs to the item
that it names (`item_id`, which is not the `call_id`), else to that of its index, else to the newest. A `.done` counts
before the deltas. The last event holds the whole answer, unless its server leaves the items out.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import msgspec

from penstock.gateway.wire.dialects.failures import ErrorFields
from penstock.gateway.wire.dialects.loose_json import Json, arr, chunks, count, obj, objs, text
from penstock.gateway.wire.dialects.stream_events import StreamReader
from penstock.gateway.wire.dialects.tool_calls import folded_arguments
from penstock.gateway.wire.dialects.usage import usage_fields
from penstock.gateway.wire.dialects.websocket_messages import ENDS, is_steering_event

_NEWEST = ("id", "model", "status", "incomplete_details", "usage", "service_tier", "tool_usage", "output", "error")
LOST = ("response.failed", "response.cancelled")
"""Events that end a response without an answer."""
LISTS = {
    "response.output_text": ("content", "content_index", "output_text", "text"),
    "response.refusal": ("content", "content_index", "refusal", "refusal"),
    "response.reasoning_text": ("content", "content_index", "reasoning_text", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "summary_text", "text"),
}
"""Events of an item's lists, each `.delta` or `.done`: the list, the field that holds the index in it, the part's type,
and the part's text field, which is also that of its `.done`."""
FIELDS = {
    "response.function_call_arguments": ("function_call", "arguments"),
    "response.custom_tool_call_input": ("custom_tool_call", "input"),
}
"""Events of an item's own fields, `.delta` or `.done`: the item's type, the field."""
PARTS = {
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
"""Events that hold a part of an item's list, `.added` or `.done`."""
ITEMS = ("response.output_item.added", "response.output_item.done")
_TEXT_OF = {of: field for _, _, of, field in LISTS.values()}
ITEM_OF = {
    "response.output_text": "message",
    "response.refusal": "message",
    "response.content_part": "message",
    "response.reasoning_text": "reasoning",
    "response.reasoning_summary_text": "reasoning",
    "response.reasoning_summary_part": "reasoning",
} | {kind: of for kind, (of, _) in FIELDS.items()}
"""The type of the item that an event continues, for items whose start never came."""
_MORE = {f"{kind}.{end}": of for kind, of in ITEM_OF.items() for end in ("added", "delta", "done")}


class ItemHead(msgspec.Struct, gc=False):
    type: Any = None
    id: Any = None
    call_id: Any = None
    action: Any = None


class ResponseHead(ErrorFields, gc=False):
    """The fields of a response that the summary needs."""

    id: Any = None
    model: Any = None
    status: Any = None
    incomplete_details: Any = None
    usage: Any = None
    service_tier: Any = None
    tool_usage: Any = None
    output: list[ItemHead] | None = None


class EventHead(ErrorFields, gc=False):
    output_index: Any = None
    item_id: Any = None
    item: ItemHead | None = None
    usage: Any = None
    response: ResponseHead | None = None


_events = StreamReader(EventHead).events


def assembled(body: bytes, problems: list[str]) -> Json:
    """A stream as a plain answer: the newest value of each field of the response, and its items."""
    answer: Json = {}
    beside: Json = {}
    places = _ItemIndex()
    items: dict[_ItemPosition, list[Json]] = {}
    ended = False
    for event in chunks(body, problems):
        kind, index = text(event.get("type")) or "", event.get("output_index")
        ended = ended or kind in ENDS
        beside |= usage_fields({"usage": event.get("usage")})
        if isinstance(event.get("response"), dict):
            said = {
                key: value
                for key, value in obj(event["response"]).items()
                if (objs(value) if key == "output" else value)
            }
            answer |= ({"status": kind.removeprefix("response.")} if kind in ENDS else {}) | said
        elif kind in ITEMS:
            item = obj(event.get("item"))
            items.setdefault(places.of(index, item.get("id"), kind == ITEMS[0]), []).append(event)
        elif kind in _MORE:
            items.setdefault(places.of(index, event.get("item_id")), []).append(event)
        if "error" in event and not is_steering_event(kind):
            answer["error"] = event["error"]
    if not (ended or answer.get("error")):
        problems.append("response: the stream ended early")
    return beside | answer | {"output": arr(answer.get("output")) or [_item(items[place]) for place in sorted(items)]}


def stream_summary(body: bytes) -> tuple[ResponseHead, bool]:
    """(the events of a stream as a plain answer, True if one says that it ends). No function is called for a delta of a
    known item."""
    answer, ended, error = ResponseHead(), False, None
    beside: Json = {}
    places = _ItemIndex()
    items: dict[_ItemPosition, ItemHead] = {}
    for event in chain.from_iterable(_events(body)):
        kind: str = event.type if type(event.type) is str else ""
        if (event.error or kind == "error" or event.object == "error") and not is_steering_event(kind):
            error = event.error or True
        if event.usage:
            beside |= usage_fields({"usage": event.usage})
        if (said := event.response) is not None:
            ended = ended or kind in ENDS
            for name in _NEWEST:
                value = getattr(said, name)
                if not value and name == "status" and kind in ENDS:
                    value = kind.removeprefix("response.")
                if value:
                    setattr(answer, name, value)
        elif kind in _MORE:
            known_as, index = event.item_id, event.output_index
            if type(known_as) is str and type(index) is int and known_as in places.ids:
                place = places.ids[known_as]
                if places.indexes.get(index) == place:
                    places.newest = place
                    continue
            item = ItemHead(_MORE[kind], None, text(known_as) or "")
            items.setdefault(places.of(index, known_as), item)
        elif kind in ITEMS:
            item = event.item or ItemHead()
            place = places.of(event.output_index, item.id, kind == ITEMS[0])
            before = items.setdefault(place, item)
            items[place] = ItemHead(
                item.type or before.type, item.id, item.call_id or before.call_id, item.action or before.action
            )
        else:
            ended = ended or kind in ENDS
    answer.error = error or answer.error
    answer.usage = answer.usage or beside.get("usage")
    answer.output = answer.output or [items[place] for place in sorted(items)]
    return answer, ended


_ItemPosition = tuple[int, int]
"""The index of an item, and the number of items before it."""


class _ItemIndex:
    """The places of a stream's items: an event finds its item by id, else by index, else it is the newest."""

    def __init__(self) -> None:
        self.ids: dict[str, _ItemPosition] = {}
        self.indexes: dict[int, _ItemPosition] = {}
        self.newest: _ItemPosition | None = None
        self._known = 0

    def of(self, index: Any, known_as: Any, begins: bool = False) -> _ItemPosition:
        """The place of the item that an event is about. `begins`: the event says that the item is new."""
        at, id = count(index), text(known_as)
        place = None if id is None else self.ids.get(id)
        if place is None and not begins:
            place = self.newest if at is None else self.indexes.get(at)
        if place is None:
            beside = 0 if self.newest is None else self.newest[0]
            place, self._known = (beside if at is None else at, self._known), self._known + 1
        self.newest = place
        if at is not None:
            self.indexes[at] = place
        if id is not None:
            self.ids[id] = place
        return place


class _ItemPart:
    """A part of an item's list, as far as it has come."""

    def __init__(self) -> None:
        self.known: Json = {}
        self.texts: list[str] = []

    def add(self, said: Any, whole: bool) -> None:
        """Add a piece of its text; replace the text where the piece is `whole`."""
        if isinstance(said, str) and said:
            if whole:
                self.texts.clear()
            self.texts.append(said)

    def made(self) -> Json:
        """The part as a plain answer has it."""
        field = _TEXT_OF.get(text(self.known.get("type")) or "", "text")
        return self.known | ({field: "".join(self.texts)} if self.texts or field not in self.known else {})


def _item(events: list[Json]) -> Json:
    """An item, as far as it came. Its fields in `output_item.done` count before those of earlier events."""
    started = [obj(event.get("item")) for event in events if event["type"] == ITEMS[0]]
    done = [obj(event.get("item")) for event in events if event["type"] == ITEMS[1]]
    more = [event for event in events if event["type"] in _MORE]
    known = {"type": _MORE[more[0]["type"]], "id": more[0].get("item_id")} if more else Json()
    if "call" in str(known.get("type")):
        known |= {"call_id": text(known["id"]) or "", "name": next((it["name"] for it in more if it.get("name")), None)}
    whole = (started[-1] if started else known) | _pieces(more)
    return whole | {key: value for it in done for key, value in it.items() if value or key not in whole}


def _pieces(events: list[Json]) -> Json:
    """The lists and fields of an item that its events hold."""
    lists: defaultdict[str, defaultdict[int, _ItemPart]] = defaultdict(lambda: defaultdict(_ItemPart))
    fields: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        kind, _, end = event["type"].rpartition(".")
        if kind in LISTS:
            name, place, of, field = LISTS[kind]
            part = lists[name][count(event.get(place)) or 0]
            part.known.setdefault("type", of)
            part.add(event.get(field if end == "done" else "delta"), end == "done")
        elif kind in PARTS:
            name, place = PARTS[kind]
            part, said = lists[name][count(event.get(place)) or 0], obj(event.get("part"))
            part.known |= {key: value for key, value in said.items() if value or key not in part.known}
            part.add(said.get(_TEXT_OF.get(text(said.get("type")) or "", "text")), end == "done")
        elif kind in FIELDS and (said := event.get("delta" if end == "delta" else FIELDS[kind][1])):
            if end == "done":
                fields[kind].clear()
            fields[kind].append(said)
    made = {name: [parts[at].made() for at in sorted(parts)] for name, parts in lists.items()}
    return made | {FIELDS[kind][1]: _argument(kind, pieces) for kind, pieces in fields.items()}


def _argument(kind: str, pieces: list[Any]) -> str:
    """The arguments of a function, or the text input of a custom tool."""
    if FIELDS[kind][0] == "function_call":
        return folded_arguments(pieces)
    return "".join(piece for piece in pieces if isinstance(piece, str))
