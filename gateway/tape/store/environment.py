"""The LMDB environment of a tape: opening it, its transactions, its growth. Nothing else imports lmdb.

One gateway may write, and holds a lock for it, which it can hand over to the next; any number may read. A full map
grows by doubling. LMDB allows that only while the process has no transaction open, so a lock keeps readers and growth
apart. A read must therefore never begin inside another read of the same thread. When another process has grown the map,
the next transaction adopts it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lmdb

from penstock.gateway.tape.store.codec import DECODE_ERRORS
from penstock.gateway.tape.store.directory import (
    FILE_MODE,
    OPEN_WORDING,
    ErrorWording,
    TapeError,
    allocate,
    explain_failure,
    lock_directory,
    set_close_on_exec,
)
from penstock.gateway.tape.store.keys import HIGHEST_NUMBER

FORMAT = b"4"
DATABASES = (
    "meta", "rollouts", "tasks", "order", "attempts", "index", "open", "styles", "log", "bodies",
    "queue", "live", "unclaimed", "rewards", "workers", "resources", "stable", "releases", "audit", "assigned", "seen",
    "pins", "runs", "run_order", "run_configs", "run_metrics", "run_events", "run_trees",
    "definitions", "audit_log", "coverage", "units", "told", "deliveries", "uses", "holes", "forgotten", "held",
    "budgets", "reservations", "reservers", "background", "guesses", "batches",
    "hosted", "lightning",
)  # fmt: skip
ORDER = b"order"
"""The only key of `order`."""
READERS = 512
_LOCK_BYTES = (READERS + 2) * 64
"""Size of the file in which LMDB lists its readers."""
_OPENINGS, _OPENING_S = 100, 0.1
"""Tries to reopen a tape, and seconds between two of them."""
_GROW_AT = 0.8
_LOOK_EVERY = 16
"""Transactions between two checks of how full the map is."""
REMAP_BYTES = 16 << 20
"""Growth of the file after which the map is made anew."""

Txn: TypeAlias = "lmdb.Transaction[bytes]"
Cursor: TypeAlias = "lmdb.Cursor[bytes]"
T = TypeVar("T")


class ReadersWriterLock:
    """Admits many readers, or one thread that resizes the map."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._closing = 0

    def acquire_read(self) -> None:
        """Begin a read; wait while another thread resizes the map or is about to."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closing)
            self._readers += 1

    def release_read(self) -> None:
        """End a read; the last one lets a waiting resize begin."""
        with self._condition:
            self._readers -= 1
            if not self._readers:
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Wait until all reads have ended, and let no new one begin."""
        with self._condition:
            self._closing += 1
            try:
                self._condition.wait_for(lambda: not self._readers)
                yield
            finally:
                self._closing -= 1
                self._condition.notify_all()


class Environment:
    """An open tape and its transactions."""

    def __init__(
        self, path: Path, *, readonly: bool, map_bytes: int, lock: int | None = None, words: ErrorWording = OPEN_WORDING
    ) -> None:
        """`lock`: the descriptor of the writer's lock, if another process has handed it over. `words`: used in
        errors."""
        self.path, self._words = path, words
        self.file = path / "tape" / "data.mdb"
        self._gate = ReadersWriterLock()
        self._writing = threading.Lock()
        """Held by the thread that has a write transaction, or that must keep others from having one."""
        self._map_bytes = map_bytes
        self._shut = False
        """True between closing and reopening (`reopen`)."""
        self.lock = None if readonly else lock_directory(path, words) if lock is None else lock
        """The descriptor of the writer's lock; None for a tape that is opened only for reading."""
        try:
            self._env = _open(path / "tape", readonly, map_bytes, words)
            self.dbs = self._databases(readonly)
        except BaseException:
            self._unlock()
            raise
        self._page_bytes = self._env.stat()["psize"]
        self._mapped_at = self.sizes()[1]
        self._looked = 0

    def close(self) -> None:
        """Close it; no call may follow."""
        self._env.close()
        self._unlock()

    def _unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)

    def _databases(self, readonly: bool) -> dict[str, Any]:
        try:
            databases = self._opened(readonly)
        except lmdb.Error as error:
            self._env.close()
            if not readonly:
                raise TapeError(f"cannot write the tape in {self.path}: {error}; free or remount the disk") from None
            raise TapeError(
                f"{self.path} holds no tape ({error}); start `penstock serve --data {self.path}` once"
            ) from None
        except TapeError:
            self._env.close()
            raise
        if not readonly:
            # Readers that were killed keep pages from being used again.
            self._env.reader_check()
        return databases

    def _opened(self, readonly: bool) -> dict[str, Any]:
        while True:
            try:
                databases = self._read_databases() if readonly else self._made_databases()
                self._check_format(databases["meta"], readonly)
                return databases
            except lmdb.MapResizedError:
                # A running gateway has enlarged the file since it was opened here.
                self._env.set_mapsize(0)

    def _made_databases(self) -> dict[str, Any]:
        # In one transaction: a new tape waits for the disk once, not once a database.
        with self._env.begin(write=True) as txn:
            return {name: self._open_database(name, txn) for name in DATABASES}

    def _read_databases(self) -> dict[str, Any]:
        # Each in a transaction of its own: a database that is opened in a read transaction closes with it.
        found = {"meta": self._open_database("meta")}
        for name in DATABASES:
            try:
                found[name] = self._open_database(name)
            except lmdb.NotFoundError:
                self._check_format(found["meta"], True)
                raise TapeError(
                    f"the tape in {self.path} is of an older penstock and cannot be read yet: it has no database "
                    f"{name!r}; start `penstock serve --data {self.path}` once, which adds that"
                ) from None
        return found

    def _open_database(self, name: str, writes: Txn | None = None) -> Any:
        # Numbers below one key are stored in eight bytes each, without overhead.
        sorted_ = name == "order"
        create = writes is not None
        return self._env.open_db(name.encode(), writes, create=create, dupsort=sorted_, dupfixed=sorted_)

    def _check_format(self, meta: Any, readonly: bool) -> None:
        with self._env.begin(write=not readonly) as txn:
            found = txn.get(b"format", db=meta)
            if found is None and not readonly:
                txn.put(b"format", FORMAT, db=meta)
            elif found != FORMAT:
                name = (found or b"?").decode("ascii", "replace")
                raise TapeError(
                    f"the tape in {self.path} has format {name}, this penstock reads {FORMAT.decode()}; "
                    "open it with the penstock that wrote it, or choose another --data"
                )

    @contextmanager
    def read(self) -> Generator[Txn]:
        """Yield a read transaction; keep it short. Raises `TapeError` when a record makes no sense."""
        txn = self._begin()
        try:
            yield txn
        except (lmdb.Error, *DECODE_ERRORS) as error:
            raise TapeError(f"cannot read the tape in {self.path}: {error}; run `penstock check`") from error
        finally:
            txn.abort()
            self._gate.release_read()

    def _begin(self) -> Txn:
        while True:
            self._enter()
            try:
                return self._env.begin()
            except lmdb.MapResizedError:
                self._gate.release_read()
                self._resize(0)
            except lmdb.Error as error:
                self._gate.release_read()
                raise TapeError(f"cannot read the tape in {self.path}: {error}") from error

    def _enter(self) -> None:
        """Begin a read in the gate; first reopen the environment if it is shut."""
        self._gate.acquire_read()
        while self._shut:
            self._gate.release_read()
            self._open_again()
            self._gate.acquire_read()

    def write(self, apply: Callable[[Txn], T]) -> T:
        """Run `apply` in one durable transaction and return its result. `apply` is called again, in a new transaction,
        when the map was too small.

        Raises `TapeError` when the disk is full or read-only; then nothing has changed.
        """
        try:
            while True:
                with self._writing:
                    try:
                        if self._shut:
                            self._open_again()
                        self._looked += 1
                        if not self._looked % _LOOK_EVERY:
                            self._grow_ahead()
                        with self._env.begin(write=True) as txn:
                            return apply(txn)
                    except lmdb.MapFullError:
                        self._resize(self._env.info()["map_size"] * 2)
                    except lmdb.MapResizedError:
                        self._resize(0)
        except (lmdb.Error, OSError) as error:
            raise TapeError(f"cannot write the tape in {self.path}: {error}; free or remount the disk") from error

    def _grow_ahead(self) -> None:
        """Grow a nearly full map before a transaction fails and must be repeated. A new map also gives back the pages
        that reading has mapped, which would otherwise count as the process's memory as long as it lives. So the map is
        also made anew whenever the file has grown by `REMAP_BYTES`."""
        info = self._env.info()
        used = (info["last_pgno"] + 1) * self._page_bytes
        if used > info["map_size"] * _GROW_AT:
            self._resize(info["map_size"] * 2)
        elif used - self._mapped_at > REMAP_BYTES:
            self._mapped_at = used
            # A reader that was killed keeps pages from being used again, and so makes the file grow.
            self._env.reader_check()
            self._resize(info["map_size"])

    @contextmanager
    def exclusive(self) -> Generator[int]:
        """Keep everybody from writing; yield the number of the oldest transaction that a reader of any process may see,
        or the highest possible number."""
        with self._writing:
            self._enter()
            try:
                self._env.reader_check()
                txn = self._env.begin(write=True)
                try:
                    yield _oldest_reader(self._env.readers())
                finally:
                    txn.abort()
            except lmdb.Error as error:
                raise TapeError(f"cannot lock the tape in {self.path}: {error}") from error
            finally:
                self._gate.release_read()

    def reopen(self) -> None:
        """Close and reopen the environment, to drop buffers of pages that were written before. If that fails, the next
        read or write tries again."""
        with self._writing:
            self._open_again()
            with self._gate.exclusive():
                self._map_bytes = self._env.info()["map_size"]
                self._shut = True
                self._env.close()
                for left in reversed(range(_OPENINGS)):
                    try:
                        return self._open_shut()
                    except TapeError:
                        # Descriptors or memory were short for a moment.
                        if not left:
                            raise
                        time.sleep(_OPENING_S)

    def _open_again(self) -> None:
        """Reopen the environment if it is shut."""
        if self._shut:
            with self._gate.exclusive():
                if self._shut:
                    self._open_shut()

    def _open_shut(self) -> None:
        self._env = _open(self.path / "tape", False, self._map_bytes, self._words)
        self.dbs.update(self._databases(False))
        self._shut = False

    def _resize(self, size: int) -> None:
        """Resize the map; 0 adopts the size that another process has given it."""
        with self._gate.exclusive():
            self._env.set_mapsize(size)

    def last_transaction(self) -> int:
        """Return the number of the newest transaction of any process."""
        self._enter()
        try:
            return self._env.info()["last_txnid"]
        finally:
            self._gate.release_read()

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of (the map, the used part of the file) in bytes."""
        info = self._env.info()
        return info["map_size"], (info["last_pgno"] + 1) * self._page_bytes


def _open(path: Path, readonly: bool, map_bytes: int, words: ErrorWording) -> lmdb.Environment:
    file = path / "data.mdb"
    try:
        size = file.stat().st_size if file.exists() else 0
        if readonly and not size:
            raise TapeError(
                f"{path.parent} holds no tape; name the directory that `penstock serve --data` was given, or that "
                "`penstock backup` has made"
            )
        allocate(path / "lock.mdb", _LOCK_BYTES, FILE_MODE)
        opened = lmdb.open(
            str(path),
            map_size=max(map_bytes, size),
            max_dbs=len(DATABASES),
            max_readers=READERS,
            readonly=readonly,
            readahead=False,
            # Without it, unused parts of pages would hold old memory of this process: keys and texts.
            meminit=True,
            mode=FILE_MODE,
        )
        # LMDB leaves the descriptor inheritable, and does not tell it.
        set_close_on_exec(file)
        return opened
    except (lmdb.Error, OSError) as error:
        raise TapeError(explain_failure(path.parent, error, readonly, words)) from error


def _oldest_reader(readers: str) -> int:
    """Return the oldest transaction of LMDB's list of readers, which has a line with process, thread and transaction
    for each."""
    ends = (line.rsplit(None, 1)[-1] for line in readers.splitlines()[1:])
    return min((int(end) for end in ends if end.isdigit()), default=HIGHEST_NUMBER)


def last_number(txn: Txn, database: Any) -> bytes | None:
    """Return the highest key of a database, None when it is empty."""
    with txn.cursor(db=database) as cursor:
        return cursor.key() if cursor.last() else None


def scan(txn: Txn, database: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield all records whose key starts with `prefix`."""
    with txn.cursor(db=database) as cursor:
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            yield cursor.item()
            found = cursor.next()


def floor(cursor: Cursor, key: bytes) -> bool:
    """Place the cursor on the highest record that is not beyond the key; return False when there is none."""
    if not cursor.set_range(key):
        return cursor.last()
    return cursor.key() == key or cursor.prev()
