"""Cuts a body that is a stream into what its events carry: server-sent events, or frames of AWS. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from binascii import crc32
from typing import Final, NamedTuple

from penstock.gateway.dialects.event_stream import LEAST, PRELUDE
from penstock.gateway.masking.json_walk import Malformed, walk
from penstock.gateway.masking.text import Joined, Root, Slice, Text, literal

_LINE: Final = re.compile(rb"([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
_DATA: Final = re.compile(rb"data(?:: ?|\Z)")
_FIELD: Final = re.compile(rb"\A(?:\xef\xbb\xbf)?(?:[\r\n]*+)(?:(?:data|event|id|retry)(?::|[\r\n])|:)")
_prelude: Final = struct.Struct(">III").unpack_from


class Events(NamedTuple):
    """What a stream carries."""

    datas: list[Text]
    """The data of each event."""
    rest: list[Text]
    """Its other lines."""


def looks_like_events(body: bytes) -> bool:
    """Whether it begins as server-sent events do."""
    return _FIELD.match(body[:64]) is not None


def server_sent(body: Root) -> Events:
    """The events of a stream; the last may have been cut off."""
    datas, rest, lines = list[Text](), list[Text](), list[Text]()
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
            rest.append(Slice(body, begin, end))
    return Events([*datas, Joined(lines, b"\n")] if lines else datas, rest)


def aws_frames(body: Root) -> list[Text]:
    """The payloads of frames; raises `Malformed`. A frame that was cut off is masked whole: nobody can read it."""
    payloads, data, at = list[Text](), body.data, 0
    while len(data) - at >= PRELUDE:
        size, headers, checksum = _prelude(data, at)
        if crc32(data[at : at + 8]) != checksum or size < LEAST + headers:
            raise Malformed(f"what stands at byte {at} is no frame of an event stream")
        if len(data) - at < size:
            break
        payloads.append(_unpacked(Slice(body, at + PRELUDE + headers, at + size - 4)))
        at += size
    if at < len(data):
        _ = body.write(at, len(data))
    return payloads


def _unpacked(payload: Text) -> Text:
    """The event in a payload that is an envelope (`{"bytes": "..."}`), as InvokeModel sends."""
    if b'"bytes"' not in payload.data:
        return payload
    try:
        found = next((one for one in walk(payload.data)[0] if one.path == ("bytes",) and one.kind == "text"), None)
    except Malformed:
        return payload
    inner = None if found is None else literal(payload, found.start, found.end)
    try:
        return payload if inner is None else Base64(inner)
    except ValueError:
        return payload


class Base64:
    """What a text in base64 stands for."""

    def __init__(self, outer: Text) -> None:
        """Raises `ValueError`."""
        self._outer = outer
        try:
            self.data = base64.b64decode(outer.data, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
        self._buffer = bytearray(self.data)

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        """See `Text`: groups of three bytes are written anew."""
        new = b"*" * (end - start) if new is None else new
        changed = bytes(self._buffer[start:end]) != new
        self._buffer[start:end] = new
        first, last = start // 3, -(-end // 3)
        written = base64.b64encode(self._buffer[first * 3 : last * 3])
        _ = self._outer.write(first * 4, first * 4 + len(written), written)
        return changed
