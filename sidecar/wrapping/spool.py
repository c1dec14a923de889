"""What has passed and is not on the tape yet, in files: it outlives a wrapper that is killed; the next one sends it.

A session has a folder. In it are `about.json` (where it is sent), `lock`, which its wrapper holds as long as it lives,
and segments of frames (`model.passed`) in the order of their numbers. A segment is removed when the gateway needs none
of its frames any more. In memory is what tells where they are, not what they hold. Files are for their owner alone.

All folders together have a size. Beyond it nothing is kept, and a frame says how much is missing.
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

from penstock.gateway.model.passed import CLIENT, END, GAP, SERVER, Frame, heads, packed
from penstock.sidecar.wrapping.lines import Piece

SEGMENT: Final = 4 << 20
SPOOL_BYTES: Final = 256 << 20
"""Size of all folders together."""
ABOUT: Final = "about.json"
_SUFFIX: Final = ".frames"
_MENDED: Final = 7 / 8
"""How full it may be at most when something is kept again: not one line now and one then."""


def directory() -> Path:
    """Where the folders are."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "penstock" / "wrapped"


def new_session() -> str:
    """A name that sorts by time."""
    return f"{time.time_ns() // 1_000_000:011x}-{secrets.token_hex(8)}"


class _Segment:
    """A file; the numbers of its first and last frame, and its size as far as its frames are whole."""

    def __init__(self, path: Path, first: int) -> None:
        self.path, self.first, self.last, self.size = path, first, first - 1, 0


class _Place(NamedTuple):
    """Where a frame ends."""

    sequence: int
    segment: int
    end: int


class Spool:
    """The frames of one session. Lines are put by any thread, the rest is for the thread that sends."""

    def __init__(self, folder: Path, room: int, segment: int = SEGMENT) -> None:
        """`room`: bytes that it may have. Raises OSError when the folder cannot be made or is somebody's."""
        self.folder, self.room = folder, room
        self._segment_bytes = segment
        self._lock = Lock()
        self._segments: list[_Segment] = []
        self._file: int | None = None
        self._sequence = self._missed = self._missed_bytes = self._since_ns = self._size = 0
        self._place = _Place(0, 0, 0)
        self._broken: set[int] = set()
        """Directions whose line has lost a part: the rest of it is left out, too."""
        self._cut: set[int] = set()
        """The same as far as no frame has said it."""
        self._guard = _locked(folder)
        self.over = False
        """Whether its last frame is there."""

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, kind: int, pieces: Sequence[Piece], time_ns: int) -> None:
        """Keeps what has passed, or notes that it could not."""
        with self._lock:
            for piece in pieces:
                if kind in self._broken or not self._mended(time_ns) or not self._write(kind, piece, time_ns):
                    self._miss(kind, piece, time_ns)

    def _mended(self, time_ns: int) -> bool:
        """Whether something can be kept again; what is missing is said then."""
        return not self._missed_bytes or (self._size < self.room * _MENDED and self._mend(time_ns))

    def end(self, by: str, exit_code: int | None, time_ns: int) -> None:
        """The session is over."""
        said = json.dumps({"by": by} | ({} if exit_code is None else {"exit_code": exit_code})).encode()
        with self._lock:
            self.room += SEGMENT  # what follows is small, and the last
            if self._missed_bytes:
                _ = self._mend(time_ns)
            self.over = self._write(END, Piece(said, len(said), True), time_ns)

    def _miss(self, kind: int, piece: Piece, time_ns: int) -> None:
        self._since_ns = self._since_ns or time_ns
        self._missed += piece.last
        self._missed_bytes += piece.size
        self._cut.add(kind)
        (self._broken.discard if piece.last else self._broken.add)(kind)

    def _mend(self, time_ns: int) -> bool:
        """Says what is missing."""
        cut = [name for name, kind in (("client", CLIENT), ("server", SERVER)) if kind in self._cut]
        said = json.dumps({"lines": self._missed, "since_ns": self._since_ns, "cut": cut}).encode()
        if not self._write(GAP, Piece(said, max(len(said), self._missed_bytes), True), time_ns):
            return False
        self._missed = self._missed_bytes = self._since_ns = 0
        self._cut.clear()
        return True

    def _write(self, kind: int, piece: Piece, time_ns: int) -> bool:
        frame = packed(Frame(kind, self._sequence + 1, time_ns, piece.size, piece.data, piece.last))
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
            _ = self._segments.pop()  # a disk that was full: it has the same name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._segments.append(_Segment(path, self._sequence + 1))

    def _abandon(self) -> None:
        """A frame of which only a part may be there: what follows begins a new file."""
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
        """Whether something is not kept now, for want of room."""
        return bool(self._missed_bytes)

    # -- sending -----------------------------------------------------------------------------------------------------

    def after(self, done: int, most: int) -> bytes:
        """Frames behind this number, about so many bytes."""
        segment = next((one for one in self._listed() if one.last > done), None)
        if segment is None:
            return b""
        near = (self._place.sequence, self._place.segment) == (done, segment.first)
        offset = self._place.end if near else 0
        body = _content(segment, offset)
        first = end = -1
        for head in heads(body):
            if head.sequence <= done:
                continue
            first = head.start if first < 0 else first
            if end > first and head.end - first > most:
                break
            end = head.end
            # Where the next request begins, unless something else is asked for.
            self._place = _Place(head.sequence, segment.first, offset + end)
        return body[first:end] if first >= 0 else b""

    def pick(self, numbers: Sequence[int], most: int) -> tuple[bytes, list[int]]:
        """(the first of these frames, about so many bytes; those that are not here)."""
        wanted, found, size, lost = set(numbers), list[bytes](), 0, list[int]()
        segments = self._listed()
        for segment in segments:
            if not wanted.isdisjoint(range(segment.first, segment.last + 1)):
                body = _content(segment)
                for head in heads(body):
                    if head.sequence in wanted and size < most:
                        found.append(body[head.start : head.end])
                        size += len(found[-1])
        if size == 0:
            lost = sorted(wanted)
        return b"".join(found), lost

    def settle(self, done: int, open_: Sequence[int]) -> None:
        """The gateway has the frames up to a number, and does not need their bytes but for those of `open_`."""
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
        """All of it is on the tape."""
        self.close()
        for path in (*(one.path for one in self._segments), self.folder / ABOUT, self.folder / "lock"):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Lets go of it; somebody else may send it."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self._guard >= 0:
                os.close(self._guard)
                self._guard = -1

    def recover(self, now_ns: int) -> None:
        """Finds what a wrapper has left that was killed, and says that it was."""
        for path in sorted(self.folder.glob(f"{'[0-9]' * 12}{_SUFFIX}")):
            segment = _Segment(path, int(path.name.removesuffix(_SUFFIX)))
            for head in heads(path.read_bytes()):
                segment.last, segment.size = head.sequence, head.end
                self.over = head.kind == END
            if segment.size:
                self._segments.append(segment)
                self._size += segment.size
                self._sequence = segment.last
            else:
                path.unlink()
        if not self.over and self._segments:
            self.room = self._size
            self.end("killed", None, now_ns)


def _content(segment: _Segment, offset: int = 0) -> bytes:
    """Its frames. Only one segment is in memory at a time."""
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
    """Notes where a session is sent."""
    file = os.open(folder / ABOUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "w") as written:
        json.dump(about, written)


def left(root: Path) -> list[Path]:
    """The folders of all sessions, the oldest first."""
    return sorted(path for path in root.glob("*-*") if path.is_dir()) if root.is_dir() else []


def used(root: Path, but: Path | None = None) -> int:
    """Bytes in all folders but one."""
    total = 0
    for path in root.glob(f"*/*{_SUFFIX}") if root.is_dir() else ():
        with suppress(OSError):
            total += path.stat().st_size if path.parent != but else 0
    return total
