"""The processes that write a tape now.

There is one as long as a gateway lives, and two or more while one hands over to the next. Each holds a lock on a file
of its own below `<data>/writers`; the system releases the lock when the process ends, however it ends. So each can tell
which open calls on the tape belong to a process that is gone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.gateway.tape.store.directory import DIRECTORY_MODE, FILE_MODE, TapeError, explain_failure

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
