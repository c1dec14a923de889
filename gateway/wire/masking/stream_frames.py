"""Cuts a stream into its events: server-sent events, or frames of AWS. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from binascii import crc32
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.gateway.wire.dialects.event_stream import FIXED, LEAST, PRELUDE
from penstock.gateway.wire.dialects.json_scan import BodyFormatError, walk
from penstock.gateway.wire.masking.text import JoinedText, MaskableText, TextSlice, literal

_LINE: Final = re.compile(rb"([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
_DATA: Final = re.compile(rb"data(?:: ?|\Z)")
_KNOWN: Final = re.compile(rb"(?:event|id|retry)(?:: ?|\Z)")
_prelude: Final = struct.Struct(">III").unpack_from


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
    found, data, at = StreamContents([], [], []), body.data, 0
    while len(data) - at >= PRELUDE:
        size, headers, checksum = _prelude(data, at)
        if crc32(data[at : at + 8]) != checksum or size < LEAST + headers:
            raise BodyFormatError(f"what stands at byte {at} is no frame of an event stream")
        if len(data) - at < size:
            break
        begins = at + PRELUDE + headers
        found.fields.extend(_headers(TextSlice(body, at + PRELUDE, begins)))
        found.datas.extend(_unpacked(TextSlice(body, begins, at + size - 4)))
        at += size
    if at < len(data):
        _ = body.write(at, len(data))
    return found


def _headers(block: MaskableText) -> Iterator[MaskableText]:
    """The values of headers that are texts; raises `BodyFormatError`."""
    data, at = block.data, 0
    try:
        while at < len(data):
            kind, at = data[at + 1 + data[at]], at + 2 + data[at]
            size = FIXED.get(kind)
            if size is None:
                size = 2 + int.from_bytes(data[at : at + 2])
                yield TextSlice(block, at + 2, at + size)
            at += size
    except IndexError:
        raise BodyFormatError("a frame of an event stream has headers that cannot be read") from None


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
