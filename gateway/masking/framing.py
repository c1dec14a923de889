"""Cuts a stream into its events: server-sent events, or frames of AWS. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from binascii import crc32
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.gateway.dialects.event_stream import FIXED, LEAST, PRELUDE
from penstock.gateway.masking.json_walk import Malformed, walk
from penstock.gateway.masking.text import Joined, Slice, Text, literal

_LINE: Final = re.compile(rb"([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
_DATA: Final = re.compile(rb"data(?:: ?|\Z)")
_KNOWN: Final = re.compile(rb"(?:event|id|retry)(?:: ?|\Z)")
_prelude: Final = struct.Struct(">III").unpack_from


class Events(NamedTuple):
    """The contents of a stream."""

    datas: list[Text]
    """The data of each event."""
    fields: list[Text]
    """Other values of the format: names and ids of events, headers of frames."""
    other: list[Text]
    """Lines that the format does not define, and comments."""


def server_sent(body: Text) -> Events:
    """The events of a stream; the last may have been cut off."""
    datas, fields, other, lines = list[Text](), list[Text](), list[Text](), list[Text]()
    start = 3 if body.data.startswith(b"\xef\xbb\xbf") else 0
    for line in _LINE.finditer(body.data, start):
        begin, end = line.span(1)
        if begin == end:
            if lines:
                datas.append(lines[0] if len(lines) == 1 else Joined(lines, b"\n"))
            lines = []
        elif (field := _DATA.match(body.data, begin, end)) is not None:
            lines.append(Slice(body, field.end(), end))
        else:
            known = _KNOWN.match(body.data, begin, end)
            (other if known is None else fields).append(Slice(body, begin if known is None else known.end(), end))
    return Events([*datas, Joined(lines, b"\n")] if lines else datas, fields, other)


def aws_frames(body: Text) -> Events:
    """The contents of frames; raises `Malformed`. A frame that was cut off is masked whole, because it cannot be
    parsed."""
    found, data, at = Events([], [], []), body.data, 0
    while len(data) - at >= PRELUDE:
        size, headers, checksum = _prelude(data, at)
        if crc32(data[at : at + 8]) != checksum or size < LEAST + headers:
            raise Malformed(f"what stands at byte {at} is no frame of an event stream")
        if len(data) - at < size:
            break
        begins = at + PRELUDE + headers
        found.fields.extend(_headers(Slice(body, at + PRELUDE, begins)))
        found.datas.extend(_unpacked(Slice(body, begins, at + size - 4)))
        at += size
    if at < len(data):
        _ = body.write(at, len(data))
    return found


def _headers(block: Text) -> Iterator[Text]:
    """The values of headers that are texts; raises `Malformed`."""
    data, at = block.data, 0
    try:
        while at < len(data):
            kind, at = data[at + 1 + data[at]], at + 2 + data[at]
            size = FIXED.get(kind)
            if size is None:
                size = 2 + int.from_bytes(data[at : at + 2])
                yield Slice(block, at + 2, at + size)
            at += size
    except IndexError:
        raise Malformed("a frame of an event stream has headers that cannot be read") from None


def _unpacked(payload: Slice) -> Iterator[Text]:
    """A payload, and before it the event in an envelope (`{"bytes": "..."}`) of InvokeModel."""
    if b'"bytes"' in payload.data:
        try:
            found = [one for document in walk(payload.data) for one in document]
        except Malformed:
            found = []
        opened = bytearray(payload.data)
        for one in found:
            if one.path == ("bytes",) and one.kind == "text":
                try:
                    yield Base64(literal(payload, one.start, one.end))
                except ValueError:
                    continue
                opened[one.start : one.end] = b" " * (one.end - one.start)
        payload.data = bytes(opened)
    yield payload


class Base64:
    """The bytes that a text in base64 encodes."""

    def __init__(self, outer: Text) -> None:
        """Raises `ValueError` if the text is no base64."""
        self._outer = outer
        try:
            self.data = base64.b64decode(outer.data, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
        self._buffer = bytearray(self.data)

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        """See `Text`: encodes the changed groups of three bytes anew."""
        new = b"*" * (end - start) if new is None else new
        changed = bytes(self._buffer[start:end]) != new
        self._buffer[start:end] = new
        first, last = start // 3, -(-end // 3)
        written = base64.b64encode(self._buffer[first * 3 : last * 3])
        _ = self._outer.write(first * 4, first * 4 + len(written), written)
        return changed
