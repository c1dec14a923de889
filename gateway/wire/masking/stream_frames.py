"""Cuts a stream into its events: server-sent events, or frames of AWS. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.gateway.wire.dialects.bedrock import frame_bounds, header_values
from penstock.gateway.wire.dialects.json_scan import BodyFormatError, walk
from penstock.gateway.wire.masking.text import JoinedText, MaskableText, TextSlice, literal

_LINE: Final = re.compile(rb"([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
_DATA: Final = re.compile(rb"data(?:: ?|\Z)")
_KNOWN: Final = re.compile(rb"(?:event|id|retry)(?:: ?|\Z)")


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
