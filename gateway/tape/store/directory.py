"""The directory of a tape: only its owner has access, and one writer holds it. An error names the obstacle and the way
out.

LMDB makes a directory with the mode of its files, and only root can open anything in a directory of mode 0600. So this
module makes the directory before LMDB does.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from penstock.gateway.tape.store.codec import CORRUPTION_ERRORS

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ, _WRITE = os.R_OK, os.W_OK
_ORPHANS_S: Final = 3.0
"""Time that the workers of a killed gateway may take to end; they end within a second."""
_LOOK_S: Final = 0.05


class TapeError(Exception):
    """The tape cannot be opened, read or written; the message names the directory and the way out."""


class DamagedRecordError(TapeError):
    """A record is missing or makes no sense. It stops whoever needs it; all else can be written."""


class ErrorWording(NamedTuple):
    """The words of errors about a directory that cannot be used."""

    for_what: str
    way_out: str


OPEN_WORDING: Final = ErrorWording("open the tape in", "choose another --data")


def lock_directory(path: Path, words: ErrorWording = OPEN_WORDING) -> int:
    """Make the directories of a tape if need be, and lock it for one writer. Return the descriptor to close in the
    end."""
    try:
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        (path / "tape").mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise TapeError(explain_failure(path, error, words=words)) from error
    until = time.monotonic() + _ORPHANS_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holders = _holders(handle)
            # Only workers whose parent has died hold it: they are about to end.
            if holders and time.monotonic() < until and all(b"\0worker " in command for command in holders.values()):
                time.sleep(_LOOK_S)
                continue
            os.close(handle)
            who = f" (process {', '.join(map(str, holders))})" if holders else ""
            raise TapeError(f"another gateway{who} writes the tape in {path}; stop it or {words.way_out}") from None
        return handle


def _holders(lock: int) -> dict[int, bytes]:
    """Return the processes that have a file open, with their commands, as far as the system tells."""
    found, own = dict[int, bytes](), os.fstat(lock)
    for process in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        with suppress(OSError):  # the process has ended, or is another user's
            handles = (f"/proc/{process}/fd/{one}" for one in os.listdir(f"/proc/{process}/fd"))
            if process != os.getpid() and any(os.path.samestat(os.stat(one), own) for one in handles):
                found[process] = Path(f"/proc/{process}/cmdline").read_bytes()
    return found


def allocate(path: Path, size: int, mode: int) -> None:
    """Reserve disk space for a file that is written through a map of it: a process that writes to a full disk through a
    map is killed (SIGBUS). An existing file keeps its size and content. Raises `OSError` when the disk is full; any
    other error is left to the code that opens the file."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.posix_fallocate(handle, 0, os.fstat(handle).st_size or size)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in _FULL:
            raise


def set_close_on_exec(path: Path) -> None:
    """Close the file's descriptors in processes that this one starts from now on."""
    found = path.stat()
    for handle in map(int, os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ()):
        with suppress(OSError):  # the descriptor was closed meanwhile
            if os.path.samestat(os.fstat(handle), found):
                os.set_inheritable(handle, False)


def sync(path: Path) -> None:
    """Make a file, or a rename in a directory, outlast a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain_failure(path: Path, error: Exception, readonly: bool = False, words: ErrorWording = OPEN_WORDING) -> str:
    """Return why the tape in `path` cannot be opened, if that can be seen, else the error; and the way out."""
    said = f"cannot {words.for_what} {path}: "
    for place, wanted in _needed(path.absolute(), readonly):
        if not os.path.exists(place):
            continue
        if wanted & os.X_OK and not place.is_dir():
            return f"{said}{place} is a file where a directory must be; {words.way_out}"
        if not os.access(place, wanted) and not _read_only_disk(place):
            return f"{said}{_forbidden(place, wanted, words.way_out)}"
    full = isinstance(error, OSError) and error.errno in _FULL
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{said}{why}; {'free it, or ' if full else ''}{words.way_out}"


def _needed(path: Path, readonly: bool) -> Iterator[tuple[Path, int]]:
    """Yield the paths that are opened, from the top, each with the rights that it takes."""
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    rights = _READ if readonly else _READ | _WRITE
    yield there, rights | os.X_OK
    if not readonly:
        yield path / "lock", rights
    yield path / "tape", rights | os.X_OK
    yield path / "tape" / "data.mdb", rights
    # Readers write the transaction that they read into it.
    yield path / "tape" / "lock.mdb", _READ | _WRITE


def _read_only_disk(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def _forbidden(place: Path, wanted: int, way_out: str) -> str:
    found, me = place.stat(), os.geteuid()
    verb = "read and write" if wanted & _WRITE else "read"
    owner = "" if found.st_uid == me else f" of {_name(found.st_uid)}"
    means = {0: "", me: f"chmod u+rw{'x' if place.is_dir() else ''} {place}, or "}
    means = means.get(found.st_uid, f"run as {_name(found.st_uid)}, or ")
    return f"{_name(me)} may not {verb} {place} ({stat.filemode(found.st_mode)}{owner}); {means}{way_out}"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# The processes that write a tape now.
#
# There is one as long as a gateway lives, and two or more while one hands over to the next. Each holds a lock on a
# file of its own below `<data>/writers`; the system releases the lock when the process ends, however it ends. So each
# can tell which open calls on the tape belong to a process that is gone.

WRITERS: Final = "writers"
"""The directory of those files, in that of the tape. A process that hands over has its socket there too."""
DEFERRED: Final = "-"
"""Stands for a process in an open call whose answer another call is to fetch: such a call outlives processes."""
_FILE: Final = re.compile("[0-9a-f]{8}")


class WriterRegistry:
    """The process that made it, among those that write a tape."""

    def __init__(self, path: Path) -> None:
        """Add this process; raises `TapeError`. `path`: the directory that has the tape."""
        self._folder = path / WRITERS
        self.own = secrets.token_hex(4)
        """Name of this process; its open calls carry it."""
        try:
            self._folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self._handle = self._hold()
        except OSError as error:
            raise TapeError(explain_failure(path, error)) from error

    def _hold(self) -> int:
        while True:
            handle = os.open(self._folder / self.own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            # Another process that looks holds the lock for a moment, and may have removed the file as left behind.
            fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.stat(self._folder / self.own).st_ino == os.fstat(handle).st_ino:
                    return handle
            os.close(handle)

    def close(self) -> None:
        """Remove this process from those that write."""
        (self._folder / self.own).unlink(missing_ok=True)
        os.close(self._handle)

    def live_writers(self) -> set[str]:
        """Return the names of the processes that write, including this one. Files of processes that have ended are
        removed."""
        found = filter(_FILE.fullmatch, os.listdir(self._folder))
        return {name for name in found if name == self.own or self._lives(name)}

    def _lives(self, name: str) -> bool:
        try:
            handle = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            (self._folder / name).unlink(missing_ok=True)
            return False
        finally:
            os.close(handle)


# Damage on the tape, for readers that go on without the damaged records.

T = TypeVar("T")

DAMAGE_ERRORS: Final[tuple[type[Exception], ...]] = (DamagedRecordError, *CORRUPTION_ERRORS)
"""Errors that a damaged record raises, within a transaction, at every try."""
_TOLD: Final = 1000
"""Damaged places that are remembered, so that each is logged once."""
_CHECK: Final = "; run `penstock check`"
_log = logging.getLogger("penstock.tape")


class DamageLog:
    """Damaged records that long reads leave out. Each is logged once."""

    def __init__(self) -> None:
        self._told = set[str]()

    def __call__(self, what: str, error: Exception) -> None:
        """Log once that `what` is left out, because reading it raised `error`."""
        if what in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(what)
        why = str(error).removesuffix(_CHECK)
        _log.error("left out, because it is damaged: %s: %s%s", what, why, _CHECK)


def is_damage(error: TapeError) -> bool:
    """True if the error would occur at every try: a record makes no sense, while the tape can be read."""
    return isinstance(error, DamagedRecordError) or isinstance(error.__cause__, CORRUPTION_ERRORS)


def unless_damaged(read: Callable[[], T]) -> T | None:
    """Return the result of `read`; None if it meets damage."""
    try:
        return read()
    except TapeError as error:
        if not is_damage(error):
            raise
        return None
