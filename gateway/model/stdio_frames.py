"""The traffic of a wrapped server of tools, as its wrapper keeps and sends it: frames, one after the other.

A frame is a head of fixed length and the bytes that it keeps. A long line has several frames; their bytes together are
its beginning. If a part of it is not kept, the last frame has the line's end and length.

    magic (u8)  kind (u8)  flags (u8)  0  kept (u32)  sequence (u64)  time (u64, ns since 1970)  size (u64)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

CLIENT: Final = ord("c")
"""A line from the client."""
SERVER: Final = ord("s")
GAP: Final = ord("g")
"""Lines that passed and are not kept; as JSON: their number `lines`, and the time of the first, `since_ns`."""
END: Final = ord("e")
"""The end of the session; as JSON: `by` (client, server, or a wrapper that was killed), and `exit_code`."""
KINDS: Final = frozenset({CLIENT, SERVER, GAP, END})

PATH: Final = "/wrapped"
"""The path for frames, below the address of a rollout. No server has it: servers are below `/mcp`."""
TAIL: Final = 512
"""Bytes at the end of a line that are kept of one that is too long: the id of an answer may be there."""
HEADER: Final = struct.Struct(">BBBxIQQQ")
_MAGIC: Final = 0xA7
_LAST: Final = 1
_MOST: Final = 2**62
"""The largest number, time or size; larger ones could not be stored."""


class StdioFrame(NamedTuple):
    """A line that passed, or a piece of one."""

    kind: int
    sequence: int
    """The line's number in its session, from 1."""
    time_ns: int
    size: int
    """Bytes that the frame stands for; more than in `data` where a part was not kept."""
    data: bytes
    last: bool = True
    """True if the line ends with this frame."""


def pack_frame(frame: StdioFrame) -> bytes:
    flags = _LAST if frame.last else 0
    kept = len(frame.data)
    return HEADER.pack(_MAGIC, frame.kind, flags, kept, frame.sequence, frame.time_ns, frame.size) + frame.data


class FrameBounds(NamedTuple):
    """The offsets of a frame."""

    sequence: int
    kind: int
    start: int
    end: int


def frame_bounds(body: bytes, start: int = 0) -> Iterator[FrameBounds]:
    """The heads of the complete frames of a body."""
    while start + HEADER.size <= len(body):
        magic, kind, _, kept, sequence, _, _ = HEADER.unpack_from(body, start)
        end = start + HEADER.size + kept
        if magic != _MAGIC or end > len(body):
            return
        yield FrameBounds(sequence, kind, start, end)
        start = end


def parse_frames(body: bytes, start: int = 0) -> Iterator[StdioFrame]:
    """The frames of a body; raises `ValueError` where it is not made of complete frames."""
    end = start
    for head in frame_bounds(body, start):
        _, kind, flags, _, sequence, time_ns, size = HEADER.unpack_from(body, head.start)
        data = body[head.start + HEADER.size : head.end]
        if kind not in KINDS or not sequence or size < len(data) or max(sequence, time_ns, size) > _MOST:
            raise ValueError(f"frame {sequence} at byte {head.start} is damaged")
        yield StdioFrame(kind, sequence, time_ns, size, data, bool(flags & _LAST))
        end = head.end
    if end != len(body):
        raise ValueError(f"what follows byte {end} is no whole frame")
