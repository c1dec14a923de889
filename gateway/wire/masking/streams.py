"""Cuts a stream into its events, and joins texts that it has spread over several of them, so that a pattern finds
values that no single event holds. Pure.

Strings at the same place of several events are one text: with the same path, in which elements of lists count by their
`index` if they have one, and with the same block numbers and ids beside them. If a stream distinguishes kinds of text,
as thoughts from answers, or moves elements of a list, strings that may be one text are joined, too. So it works for any
wire format, known or new. Members that each event repeats, such as `id` and `model`, are not joined.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

from penstock.gateway.wire.dialects.bedrock import frame_bounds, header_values
from penstock.gateway.wire.dialects.json_scan import BodyFormatError, JsonNode, Path, plain, walk
from penstock.gateway.wire.dialects.loose_json import AmbiguousJsonError, distinct_members
from penstock.gateway.wire.masking.text import JoinedText, MaskableText, TextSlice, literal

_LINE: Final = re.compile(rb"([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
_DATA: Final = re.compile(rb"data(?:: ?|\Z)")
_KNOWN: Final = re.compile(rb"(?:event|id|retry)(?:: ?|\Z)")
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
_KINDS: Final = ("thought", "type")
"""Members that give the kind of the texts beside them."""
Key: TypeAlias = tuple[object, ...]
_EXACT, _ANY_KIND, _ANY_PLACE = range(3)


# -- events: server-sent, or frames of AWS -----------------------------------------------------------------------------


class StreamContents(NamedTuple):
    """The contents of a stream."""

    datas: list[MaskableText]
    """The data of each event."""
    fields: list[MaskableText]
    """Other values of the format: names and ids of events, headers of frames."""
    other: list[MaskableText]
    """Lines that the format does not define, and comments."""


def server_sent(body: MaskableText) -> StreamContents:
    """The events of a stream; the last may have been cut off."""
    datas, fields, other, lines = list[MaskableText](), list[MaskableText](), list[MaskableText](), list[MaskableText]()
    start = 3 if body.data.startswith(b"\xef\xbb\xbf") else 0
    for line in _LINE.finditer(body.data, start):
        begin, end = line.span(1)
        if begin == end:
            if lines:
                datas.append(lines[0] if len(lines) == 1 else JoinedText(lines, b"\n"))
            lines = []
        elif (field := _DATA.match(body.data, begin, end)) is not None:
            lines.append(TextSlice(body, field.end(), end))
        else:
            known = _KNOWN.match(body.data, begin, end)
            (other if known is None else fields).append(TextSlice(body, begin if known is None else known.end(), end))
    return StreamContents([*datas, JoinedText(lines, b"\n")] if lines else datas, fields, other)


def aws_frames(body: MaskableText) -> StreamContents:
    """The contents of frames; raises `BodyFormatError`. A frame that was cut off is masked whole, because it cannot be
    parsed."""
    found, data, over = StreamContents([], [], []), body.data, 0
    try:
        for _, headers, payload, end in frame_bounds(data):
            block, over = TextSlice(body, headers, payload), end + 4
            found.fields.extend([TextSlice(block, one.start, one.end) for one in header_values(block.data) if one.long])
            found.datas.extend(_unpacked(TextSlice(body, payload, end)))
    except ValueError as error:
        raise BodyFormatError(str(error)) from None
    if over < len(data):
        _ = body.write(over, len(data))
    return found


def _unpacked(payload: TextSlice) -> Iterator[MaskableText]:
    """A payload, and before it the event in an envelope (`{"bytes": "..."}`) of InvokeModel."""
    if b'"bytes"' in payload.data:
        try:
            found = [one for document in walk(payload.data) for one in document]
        except BodyFormatError:
            found = []
        opened = bytearray(payload.data)
        for one in found:
            if one.path == ("bytes",) and one.kind == "text":
                try:
                    yield Base64Text(literal(payload, one.start, one.end))
                except ValueError:
                    continue
                opened[one.start : one.end] = b" " * (one.end - one.start)
        payload.data = bytes(opened)
    yield payload


class Base64Text:
    """The bytes that a text in base64 encodes."""

    def __init__(self, outer: MaskableText) -> None:
        """Raises `ValueError` if the text is no base64."""
        self._outer = outer
        try:
            self.data = base64.b64decode(outer.data, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
        self._buffer = bytearray(self.data)

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        """See `MaskableText`: encodes the changed groups of three bytes anew."""
        new = b"*" * (end - start) if new is None else new
        changed = bytes(self._buffer[start:end]) != new
        self._buffer[start:end] = new
        first, last = start // 3, -(-end // 3)
        written = base64.b64encode(self._buffer[first * 3 : last * 3])
        _ = self._outer.write(first * 4, first * 4 + len(written), written)
        return changed


# -- joined texts ------------------------------------------------------------------------------------------------------


class Channel(NamedTuple):
    """Texts that may be one."""

    path: Path
    parts: list[MaskableText]
    exact: bool
    """True if they are of the same place and kind, so that they certainly are one text."""


def may_continue(one: JsonNode) -> bool:
    """True if a text may continue in another event."""
    return not (one.path and one.path[-1] in _AGAIN)


class ChannelTable:
    """The texts of a stream, by their place in its events and their kind."""

    def __init__(self) -> None:
        self._all: dict[Key, Channel] = {}

    def add(self, event: MaskableText, found: Sequence[JsonNode]) -> None:
        """Adds the texts of an event."""
        places = {one.path: event.data[one.start : one.end] for one in found if _is_place(one)}
        beside = tuple([(path, said) for path, said in places.items() if len(path) == 1])
        kinds = {one.path: plain(event.data[one.start : one.end]) for one in found if _says_kind(one)}
        known: dict[Path, tuple[Key, Key]] = {}
        for one in found:
            if one.kind != "text" or not may_continue(one):
                continue
            outer, text = one.path[:-1], literal(event, one.start, one.end)
            if outer not in known:
                known[outer] = (beside, *_placed(outer, places)), _kind(kinds, outer)
            place, kind = known[outer]
            for key in _keys((*place, *one.path[-1:]), kind):
                self._all.setdefault(key, Channel(one.path, [], key[0] == _EXACT)).parts.append(text)

    def add_text(self, event: MaskableText) -> None:
        """Adds an event that is no JSON."""
        self._all.setdefault((), Channel((), [], True)).parts.append(event)

    def joined(self) -> list[Channel]:
        """The channels, those that certainly are one text last."""
        exact = {tuple(map(id, one.parts)): one for one in self._all.values() if one.exact}
        wide = {tuple(map(id, one.parts)): one for one in self._all.values() if len(one.parts) > 1}
        return [*[one for key, one in wide.items() if key not in exact], *exact.values()]


def _keys(place: Key, kind: Key) -> Iterator[Key]:
    """The channels of a text: that of its place and kind; that of its place, because only the first event may give the
    kind; and that of its kind elsewhere in a list, because events may leave out elements that have ended."""
    yield _EXACT, place, kind
    yield _ANY_KIND, place
    if any(isinstance(step, int) for step in place):
        yield _ANY_PLACE, tuple([None if isinstance(step, int) else step for step in place]), kind


def joined_texts(events: Iterable[bytes]) -> list[bytes] | None:
    """The texts that `ChannelTable` would join, without their places; None if an event needs `ChannelTable`."""
    strings = _StringTable()
    for event in events:
        if event[:1] not in (b"{", b"["):
            return None
        try:
            value = json.loads(event, object_pairs_hook=distinct_members)
        except AmbiguousJsonError:
            return None
        except (ValueError, RecursionError):
            if event != _DONE:
                return None
            strings.add((), (), "")
            continue
        strings.gather(value, (_beside(value),))
    return strings.joined()


def _beside(value: Any) -> object:
    if not isinstance(value, dict):
        return None
    return tuple(
        [(key, str(said)) for key, said in cast(dict[str, Any], value).items() if key in _PLACES and _tells(said)]
    )


def _tells(said: Any) -> bool:
    """True if a value gives a place, as in `_is_place`: null, for example, is the same as a missing one."""
    return isinstance(said, int | str) and not isinstance(said, bool)


class _StringTable:
    """The texts of `ChannelTable` without their places."""

    def __init__(self) -> None:
        self._all: dict[Key, list[str]] = {}
        self._known: dict[Key, list[list[str]]] = {}

    def add(self, place: Key, kind: Key, text: str) -> None:
        channels = self._known.get((place, kind))
        if channels is None:
            channels = [self._all.setdefault(key, []) for key in _keys(place, kind)]
            self._known[place, kind] = channels
        for one in channels:
            one.append(text)

    def joined(self) -> list[bytes]:
        """The texts of more than one piece, joined."""
        texts = {"".join(one) for one in self._all.values() if len(one) > 1}
        return [one.encode("utf-8", "surrogatepass") for one in texts]

    def gather(self, value: Any, place: Key) -> None:
        """Adds the texts of an event."""
        if isinstance(value, dict):
            found = cast(dict[str, Any], value)
            names = _telling(len(place) > 1)
            kind = tuple([(n, str(found[n])) for n in names if not isinstance(found.get(n, []), dict | list)])
            for name, inner in found.items():
                if isinstance(inner, str):
                    if name not in _AGAIN:
                        self.add((*place, name), kind, inner)
                elif isinstance(inner, dict | list):
                    self.gather(inner, (*place, name))
        elif isinstance(value, list):
            for at, inner in enumerate(cast(list[Any], value)):
                # An element counts by its `index`, if it has one.
                said = cast(dict[str, Any], inner).get("index") if isinstance(inner, dict) else None
                there = (*place, str(said) if _tells(said) else at)
                if isinstance(inner, str):
                    self.add(there, (), inner)
                else:
                    self.gather(inner, there)


def _telling(inside: bool) -> tuple[str, ...]:
    """Members that give the kind of the texts beside them. At the top of an event `id` is one, too."""
    return _KINDS if inside else (*_KINDS, "id")


def _says_kind(one: JsonNode) -> bool:
    return (
        one.kind in ("text", "integer", "other")
        and one.path[-1:] != ()
        and (one.path[-1] in _telling(len(one.path) > 1))
    )


def _kind(kinds: dict[Path, bytes], outer: Path) -> Key:
    if not kinds:
        return ()
    there = [(*outer, name) for name in _telling(bool(outer))]
    return tuple([(path[-1], kinds[path]) for path in there if path in kinds])


def _is_place(one: JsonNode) -> bool:
    return one.kind in ("integer", "text") and bool(one.path) and one.path[-1] in _PLACES


def _placed(path: Path, places: dict[Path, bytes]) -> Key:
    """The path with the `index` of elements that have one."""
    if not places:
        return path
    return tuple(
        [
            places.get((*path[: at + 1], "index"), step) if isinstance(step, int) else step
            for at, step in enumerate(path)
        ]
    )
