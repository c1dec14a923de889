"""A copy of a tape, made while a gateway writes it.

The copy is the tape as of one commit, record by record: it has no unused pages. It is written and inspected in a
directory of its own inside the target, and moved into place at the end. So a copy that was killed is never taken for a
tape, and the next copy removes what the killed one has left. Nothing else is ever deleted, and no tape is overwritten.

LMDB's own compacting copy is not used: in 0.9.36 it ends with a segmentation fault at `order`, whose values are sorted
below one key.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.gateway.tape.store.directory import ErrorWording, TapeError, lock_directory, sync
from penstock.gateway.tape.store.environment import DATABASES, Environment, Txn

_MAP_BYTES = 1 << 20
"""Size of a map when it is opened; it is never smaller than the file, and grows."""
_PARTIAL = ".penstock-partial-"
"""Prefix of directories with unfinished copies."""
_RECORDS, _BYTES = 4096, 16 << 20
"""Limits of one transaction."""

Record = tuple[bytes, bytes]


@contextmanager
def copy_tape(source: Path, target: Path, way_out: str = "name another directory") -> Generator[Path]:
    """Copy the tape of one directory into another: yield a directory in which the copy can be inspected, and move the
    copy into place if nothing is raised there. Readers and the writer of the source go on; what is written meanwhile is
    not in the copy, and pages that the writer frees are not used again before the copy is done.

    Raises `TapeError` when there is no tape, when the target has one already, or when the disk does not take it.
    `way_out`: advice for a user who may not write to the target.
    """
    tape = Environment(source, readonly=True, map_bytes=_MAP_BYTES)
    words = ErrorWording("write a copy to", way_out)
    try:
        lock = lock_directory(target, words)
        try:
            if (target / "tape" / "data.mdb").exists():
                raise TapeError(f"{target} holds a tape already, which stays as it is; {way_out}")
            for left in target.glob(f"{_PARTIAL}*"):  # left by copies that were killed: nobody else holds the lock
                shutil.rmtree(left, ignore_errors=True)
            partial = _made(target)
            try:
                _write(tape, partial, target, words)
                yield partial
                _put_in_place(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)
    finally:
        tape.close()


def _made(target: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target))
    except OSError as error:
        raise TapeError(f"cannot write a copy to {target}: {error.strerror}") from error


def _write(tape: Environment, to: Path, target: Path, words: ErrorWording) -> None:
    with _named(to, target):
        copy = Environment(to, readonly=False, map_bytes=_MAP_BYTES, words=words)
    try:
        with tape.read() as txn:
            for name in DATABASES:
                for records in _batches(txn, tape.dbs[name]):
                    with _named(to, target):
                        copy.write(functools.partial(_append, copy.dbs[name], records))
    finally:
        copy.close()


@contextmanager
def _named(partial: Path, target: Path) -> Generator[None]:
    """Name the directory that the user gave in errors, not the partial one."""
    try:
        yield
    except TapeError as error:
        raise TapeError(str(error).replace(str(partial), str(target))) from error


def _batches(txn: Txn, database: Any) -> Iterator[list[Record]]:
    """Yield all records of a database in batches of at most `_RECORDS` records and about `_BYTES` bytes."""
    records, size = list[Record](), 0
    with txn.cursor(db=database) as cursor:
        for key, value in cursor:
            records.append((key, value))
            size += len(value)
            if len(records) == _RECORDS or size >= _BYTES:
                yield records
                records, size = [], 0
    if records:
        yield records


def _append(database: Any, records: list[Record], txn: Txn) -> None:
    with txn.cursor(db=database) as cursor:
        _ = cursor.putmulti(records)


def _put_in_place(partial: Path, target: Path) -> None:
    try:
        (partial / "tape" / "data.mdb").rename(target / "tape" / "data.mdb")
        for directory in (target / "tape", target, target.absolute().parent):
            sync(directory)
    except OSError as error:
        raise TapeError(f"the copy in {target} may not outlast a crash of the machine: {error}") from error
