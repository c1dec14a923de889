"""Recorded traffic that is not on the tape yet, in files: it outlives a wrapper that is killed; the next one sends it.

A session has a folder. In it are `about.json` (where it is sent), `lock`, which its wrapper holds as long as it lives,
and segments of frames (`model.stdio_frames`) in the order of their numbers. A segment is removed when the gateway
needs none of its frames any more. Memory holds the positions of frames, not their contents. Files are readable for
their owner alone. All folders together have a limit. Beyond it lines are dropped, and a frame says how many.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, SERVER, TAIL, StdioFrame, frame_bounds, pack_frame

# Cuts the bytes of one direction into lines, and long lines into pieces. Pure.

PIECE: Final = 256 << 10
"""Bytes of a line that are collected before they are written to disk."""
LINE_BYTES: Final = 64 << 20
"""The most bytes of a line that are kept, until the gateway reports its own limit (`limits.recorded_bytes`)."""


class LinePiece(NamedTuple):
    """A line, or a part of one."""

    data: bytes
    size: int
    """Bytes that it stands for; more than `data` has when a part is left out."""
    last: bool


class LineSplitter:
    """Cuts the bytes of one direction."""

    def __init__(self) -> None:
        self.limit = LINE_BYTES
        """The most bytes of a line that are kept."""
        self._rest = bytearray()
        self._kept = self._skipped = 0
        self._tail = b""

    def feed(self, data: bytes) -> list[LinePiece]:
        """Add bytes; return the pieces that are complete now. Together the pieces are all bytes that were fed, line
        ends included.
        """
        made: list[LinePiece] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(made, data[start : end + 1], True)
            start = end + 1
        if start < len(data):
            self._rest += data[start:]
            if len(self._rest) >= PIECE:
                self._add(made, b"", False)
        return made

    def close(self) -> list[LinePiece]:
        """The last line, if it had no end."""
        made: list[LinePiece] = []
        if self._rest or self._kept or self._skipped:
            self._add(made, b"", True)
        return made

    def _add(self, made: list[LinePiece], data: bytes, last: bool) -> None:
        if self._rest:
            data = bytes(self._rest + data)
            self._rest.clear()
        room = self.limit - self._kept
        if len(data) <= room and not self._skipped:
            self._kept += len(data)
            made.append(LinePiece(data, len(data), last))
        else:
            self._cut(made, data, max(0, room), last)
        if last:
            self._kept = self._skipped = 0
            self._tail = b""

    def _cut(self, made: list[LinePiece], data: bytes, room: int, last: bool) -> None:
        """Keep the beginning of a line that is too long, and its last bytes."""
        kept, dropped = (data[:room], data[room:]) if not self._skipped else (b"", data)
        if kept:
            made.append(LinePiece(kept, len(kept), False))
            self._kept += len(kept)
        self._skipped += len(dropped)
        self._tail = (self._tail + dropped)[-TAIL:]
        if last:
            # At least one byte fewer than were left out, to show that some were.
            tail = self._tail if len(self._tail) < self._skipped else self._tail[1:]
            made.append(LinePiece(tail, self._skipped, True))


SEGMENT: Final = 4 << 20
SPOOL_BYTES: Final = 256 << 20
"""The most bytes of all folders together."""
ABOUT: Final = "about.json"
_SUFFIX: Final = ".frames"
_MENDED: Final = 7 / 8
"""The share of its room to which the spool must empty before lines are kept again: otherwise only one line now and then
would be.
"""


def directory() -> Path:
    """The folder of all sessions' folders; raises RuntimeError when the user has no home directory."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "penstock" / "wrapped"


def new_session() -> str:
    """A new session's name, which sorts by time."""
    return f"{time.time_ns() // 1_000_000:011x}-{secrets.token_hex(8)}"


class _Segment:
    """A file of frames: the numbers of its first and last frame, and the size of its complete frames."""

    def __init__(self, path: Path, first: int) -> None:
        self.path, self.first, self.last, self.size = path, first, first - 1, 0


class _FramePosition(NamedTuple):
    """The place in a segment where a frame ends."""

    sequence: int
    segment: int
    end: int


class Spool:
    """The frames of one session. Any thread may put lines; all other methods are for the sending thread."""

    def __init__(self, folder: Path, room: int, segment: int = SEGMENT) -> None:
        """`room`: the most bytes of this session. Raises OSError when the folder cannot be made or another process
        holds it.
        """
        self.folder, self.room = folder, room
        self._segment_bytes = segment
        self._lock = Lock()
        self._segments: list[_Segment] = []
        self._file: int | None = None
        self._sequence = self._missed = self._missed_bytes = self._since_ns = self._size = 0
        self._place = _FramePosition(0, 0, 0)
        self._broken: set[int] = set()
        """Directions whose current line has lost a part: the rest of it is dropped too."""
        self._cut: set[int] = set()
        """Directions that have lost lines which no frame has reported yet."""
        self._guard = _locked(folder)
        self.ended = False
        """True if its last frame is written."""

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, kind: int, pieces: Sequence[LinePiece], time_ns: int) -> None:
        """Keep pieces, or count those that could not be kept."""
        with self._lock:
            for piece in pieces:
                if kind in self._broken or not self._mended(time_ns) or not self._write(kind, piece, time_ns):
                    self._miss(kind, piece, time_ns)

    def _mended(self, time_ns: int) -> bool:
        """True if pieces can be kept again; the loss is then reported by a frame."""
        return not self._missed_bytes or (self._size < self.room * _MENDED and self._mend(time_ns))

    def end(self, by: str, exit_code: int | None, time_ns: int) -> None:
        """Write the last frame: the session is over."""
        said = json.dumps({"by": by} | ({} if exit_code is None else {"exit_code": exit_code})).encode()
        with self._lock:
            self.room += SEGMENT  # the last frames are small
            if self._missed_bytes:
                _ = self._mend(time_ns)
            self.ended = self._write(END, LinePiece(said, len(said), True), time_ns)

    def _miss(self, kind: int, piece: LinePiece, time_ns: int) -> None:
        self._since_ns = self._since_ns or time_ns
        self._missed += piece.last
        self._missed_bytes += piece.size
        self._cut.add(kind)
        (self._broken.discard if piece.last else self._broken.add)(kind)

    def _mend(self, time_ns: int) -> bool:
        """Write a frame that reports the loss; False when there is no room for it."""
        cut = [name for name, kind in (("client", CLIENT), ("server", SERVER)) if kind in self._cut]
        said = json.dumps({"lines": self._missed, "since_ns": self._since_ns, "cut": cut}).encode()
        if not self._write(GAP, LinePiece(said, max(len(said), self._missed_bytes), True), time_ns):
            return False
        self._missed = self._missed_bytes = self._since_ns = 0
        self._cut.clear()
        return True

    def _write(self, kind: int, piece: LinePiece, time_ns: int) -> bool:
        frame = pack_frame(StdioFrame(kind, self._sequence + 1, time_ns, piece.size, piece.data, piece.last))
        if self._size + len(frame) > self.room:
            return False
        try:
            if self._file is None or self._segments[-1].size >= self._segment_bytes:
                self._begin()
            assert self._file is not None
            if os.write(self._file, frame) != len(frame):
                raise OSError("the disk is full")
        except OSError:
            self._abandon()
            return False
        self._sequence += 1
        self._size += len(frame)
        self._segments[-1].size += len(frame)
        self._segments[-1].last = self._sequence
        return True

    def _begin(self) -> None:
        path = self.folder / f"{self._sequence + 1:012d}{_SUFFIX}"
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._segments and not self._segments[-1].size:
            _ = self._segments.pop()  # the disk was full: the new segment has the same name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._segments.append(_Segment(path, self._sequence + 1))

    def _abandon(self) -> None:
        """Close a file that may end with a part of a frame: the next frame begins a new file."""
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, self._segments[-1].size)
            os.close(self._file)
            self._file = None

    @property
    def last(self) -> int:
        """The number of the last frame."""
        return self._sequence

    @property
    def missed(self) -> bool:
        """True while lines are dropped for lack of room."""
        return bool(self._missed_bytes)

    # -- sending -----------------------------------------------------------------------------------------------------

    def after(self, done: int, most: int) -> bytes:
        """The frames after the number `done`, about `most` bytes."""
        segment = next((one for one in self._listed() if one.last > done), None)
        if segment is None:
            return b""
        near = (self._place.sequence, self._place.segment) == (done, segment.first)
        offset = self._place.end if near else 0
        body = _content(segment, offset)
        first = end = -1
        for head in frame_bounds(body):
            if head.sequence <= done:
                continue
            first = head.start if first < 0 else first
            if end > first and head.end - first > most:
                break
            end = head.end
            # The next request begins here, unless the gateway asks for other frames.
            self._place = _FramePosition(head.sequence, segment.first, offset + end)
        return body[first:end] if first >= 0 else b""

    def select(self, numbers: Sequence[int], most: int) -> tuple[bytes, list[int]]:
        """(the first of the frames with these numbers, about `most` bytes; the numbers that are not here)."""
        wanted, found, size, lost = set(numbers), list[bytes](), 0, list[int]()
        segments = self._listed()
        for segment in segments:
            if not wanted.isdisjoint(range(segment.first, segment.last + 1)):
                body = _content(segment)
                for head in frame_bounds(body):
                    if head.sequence in wanted and size < most:
                        found.append(body[head.start : head.end])
                        size += len(found[-1])
        if size == 0:
            lost = sorted(wanted)
        return b"".join(found), lost

    def acknowledge(self, done: int, open_: Sequence[int]) -> None:
        """Remove segments that the gateway does not need: it has all frames up to `done`, and needs only the bytes of
        `open_` again.
        """
        with self._lock:
            writing = self._segments[-1] if self._file is not None else None
            for segment in list(self._segments):
                needed = segment is writing or segment.last > done
                if not needed and not any(segment.first <= one <= segment.last for one in open_):
                    with suppress(OSError):
                        segment.path.unlink()
                    self._segments.remove(segment)
                    self._size -= segment.size

    def _listed(self) -> list[_Segment]:
        with self._lock:
            return list(self._segments)

    def remove(self) -> None:
        """Delete the session's files: all of it is on the tape."""
        self.close()
        for path in (*(one.path for one in self._segments), self.folder / ABOUT, self.folder / "lock"):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Release the folder; another process may then send the session."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self._guard >= 0:
                os.close(self._guard)
                self._guard = -1

    def recover(self, now_ns: int) -> None:
        """Read the frames that a killed wrapper has left, and write a last frame that says so."""
        for path in sorted(self.folder.glob(f"{'[0-9]' * 12}{_SUFFIX}")):
            segment = _Segment(path, int(path.name.removesuffix(_SUFFIX)))
            for head in frame_bounds(path.read_bytes()):
                segment.last, segment.size = head.sequence, head.end
                self.ended = head.kind == END
            if segment.size:
                self._segments.append(segment)
                self._size += segment.size
                self._sequence = segment.last
            else:
                path.unlink()
        if not self.ended and self._segments:
            self.room = self._size
            self.end("killed", None, now_ns)


def _content(segment: _Segment, offset: int = 0) -> bytes:
    """The frames of a segment. Only one segment is in memory at a time."""
    size = segment.size - offset
    with segment.path.open("rb") as file:
        _ = file.seek(offset)
        return file.read(size)


def _locked(folder: Path) -> int:
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise
    return guard


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Write the destination of a session."""
    file = os.open(folder / ABOUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "w") as written:
        json.dump(about, written)


def session_folders(root: Path) -> list[Path]:
    """The folders of all sessions, oldest first."""
    return sorted(path for path in root.glob("*-*") if path.is_dir()) if root.is_dir() else []


def bytes_used(root: Path, but: Path | None = None) -> int:
    """Bytes in all folders, except those in `but`."""
    total = 0
    for path in root.glob(f"*/*{_SUFFIX}") if root.is_dir() else ():
        with suppress(OSError):
            total += path.stat().st_size if path.parent != but else 0
    return total
