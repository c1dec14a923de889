"""The files of an index, and the manifest that lists the valid ones.

A seal writes one Parquet file for each table with new rows, then the manifest, each under another name first, synced
and renamed. Files that the manifest does not name are left over from a killed seal; they are deleted. The manifest has
the size and CRC of each file, so that damage is noticed when the index is opened, which is then made anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from penstock.gateway.followers.index.rows import COLUMNS
from penstock.gateway.tape.store.directory import sync

SEALED: Final = 50_000
"""Rows of spans, or of changed rollouts, that are sealed together."""
NEAR: Final = 5_000
"""Most changes that are read between a question and its answer; an index further behind does not answer."""
NOW, LINKED, SPILL = "now", "linked", "spill"
"""Directories of snapshots of the rows in memory, of links to these that last as long as a query, and of data that a
question swaps out when it exceeds its memory."""
FORMAT: Final = f"6 {zlib.crc32(repr(COLUMNS).encode()):08x}"
"""The version of the manifest and the columns. An index of another version, or with other columns, is made anew."""
_MANIFEST: Final = "manifest.json"
_CHUNK: Final = 1 << 20


class SegmentFile(msgspec.Struct, frozen=True):
    """A sealed file, with its size in bytes and its CRC-32."""

    table: str
    name: str
    rows: int
    bytes: int
    crc: int


class Manifest(msgspec.Struct, frozen=True):
    """The contents of an index."""

    cursor: int = 0
    """The last change of the tape that is in it."""
    mark: str = ""
    """Hashes of the last changes, which identify the tape."""
    running: tuple[tuple[int, str], ...] = ()
    """(cursor, key in hex) of running calls."""
    files: tuple[SegmentFile, ...] = ()
    forgotten: tuple[int, ...] = ()
    """Numbers of forgotten rollouts that may still be in files."""
    prices: str = ""
    """Digest of the price list that costs were computed with."""
    format: str = FORMAT

    def of(self, table: str) -> list[SegmentFile]:
        """The files of a table, oldest first."""
        return [file for file in self.files if file.table == table]


class IndexLockedError(Exception):
    """Another process has the index open."""


class SegmentDirectory:
    """The directory of an index, held by one process."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if needed, and locks it. Raises `IndexLockedError`."""
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise IndexLockedError(f"another process has the index in {path} open") from None

    def close(self) -> None:
        """Releases the lock of the directory."""
        os.close(self._lock)

    def load(self) -> Manifest:
        """The manifest of a whole index; an empty one if there is none or it is damaged."""
        try:
            found = msgspec.json.decode((self.path / _MANIFEST).read_bytes(), type=Manifest)
            whole = found.format == FORMAT and all(map(self.is_whole, found.files))
        except (OSError, msgspec.MsgspecError):
            return Manifest()
        return found if whole else Manifest()

    def is_whole(self, file: SegmentFile) -> bool:
        """True if a file is as it was written; raises `OSError`."""
        path = self.path / file.name
        return path.stat().st_size == file.bytes and _crc(path) == file.crc

    def new_path(self, table: str, cursor: int) -> Path:
        """The path at which the next file of a table is written; `finish` renames it."""
        return self.path / f"{table}-{cursor:016d}.parquet.new"

    def replacement_path(self, file: SegmentFile) -> Path:
        """The path at which the replacement of a file is written; `finish` renames it."""
        name, _, times = file.name.removesuffix(".parquet").partition(".")
        return self.path / f"{name}.{int(times or 0) + 1}.parquet.new"

    def finish(self, table: str, written: Path, rows: int) -> SegmentFile:
        """Makes a written file durable and renames it."""
        sync(written)
        target = written.with_suffix("")
        crc, size = _crc(written), written.stat().st_size
        written.rename(target)
        return SegmentFile(table, target.name, rows, size, crc)

    def commit(self, manifest: Manifest) -> None:
        """Makes a manifest valid, durably, and deletes the files that it does not name."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        new = self.path / f"{_MANIFEST}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        sync(new)
        sync(self.path)
        new.rename(self.path / _MANIFEST)
        sync(self.path)
        self.clean(manifest.files)

    def clean(self, files: Iterable[SegmentFile]) -> None:
        """Deletes the files of an index that are not among these."""
        kept = {file.name for file in files}
        for path in self.path.glob("*.parquet*"):
            if path.name not in kept:
                path.unlink()


def clear(path: Path) -> None:
    """Deletes temporary files that a killed process has left beside the files of an index."""
    for name in (NOW, LINKED, SPILL):
        shutil.rmtree(path / name, ignore_errors=True)


def seal_of(name: str) -> str:
    """The cursor in the names of the files of one seal."""
    return name.removesuffix(".parquet").partition(".")[0].rpartition("-")[2]


def _crc(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found
