"""Which processes write a tape now.

There is one for as long as a gateway lives, and two or more while one hands over to the next. Each holds a lock on a
file of its own below `<data>/writers`; the system lets go of it when the process ends, however it ends. So each can
tell which calls that are open on the tape are those of a process that is gone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.gateway.store.directory import DIRECTORY_MODE, FILE_MODE, TapeError, refusal

WRITERS: Final = "writers"
"""The directory of those files, in that of the tape. Who hands over has its socket there too."""
DEFERRED: Final = "-"
"""Stands for a process where a call is open because another is to fetch its answer: it outlives processes."""
_FILE: Final = re.compile("[0-9a-f]{8}")


class Processes:
    """This process among those that write a tape."""

    def __init__(self, path: Path) -> None:
        """Adds this one; raises `TapeError`. `path`: the directory that has the tape."""
        self._folder = path / WRITERS
        self.own = secrets.token_hex(4)
        """What the calls that this process has open are marked with."""
        try:
            self._folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self._handle = self._hold()
        except OSError as error:
            raise TapeError(refusal(path, error)) from error

    def _hold(self) -> int:
        while True:
            handle = os.open(self._folder / self.own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            # Somebody else who looks holds it for a moment, and may have taken it for one that is left.
            fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.stat(self._folder / self.own).st_ino == os.fstat(handle).st_ino:
                    return handle
            os.close(handle)

    def close(self) -> None:
        """This one writes no more."""
        (self._folder / self.own).unlink(missing_ok=True)
        os.close(self._handle)

    def living(self) -> set[str]:
        """Names of those that write, this one among them. What others have left is removed."""
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
