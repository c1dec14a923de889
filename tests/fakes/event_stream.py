"""Streams as AWS sends them, written by the description of the format: for tests of what reads them."""

from __future__ import annotations

import json
import struct
from binascii import crc32
from collections.abc import Mapping
from typing import Any


def frame(headers: Mapping[str, str], payload: bytes, others: bytes = b"") -> bytes:
    """A frame of these texts and this payload. `others`: headers of other types, as they are written."""
    block = others
    for name, value in headers.items():
        key, said = name.encode(), value.encode()
        block += bytes([len(key)]) + key + b"\7" + struct.pack(">H", len(said)) + said
    start = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    whole = start + struct.pack(">I", crc32(start)) + block + payload
    return whole + struct.pack(">I", crc32(whole))


def event(name: str, value: Any) -> bytes:
    """An event of the service's model."""
    headers = {":event-type": name, ":content-type": "application/json", ":message-type": "event"}
    return frame(headers, json.dumps(value, separators=(",", ":")).encode())


def exception(name: str, message: str) -> bytes:
    """An exception of the service's model, which ends a stream."""
    headers = {":exception-type": name, ":content-type": "application/json", ":message-type": "exception"}
    return frame(headers, json.dumps({"message": message}).encode())
