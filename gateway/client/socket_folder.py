"""Temporary directories, and directories for temporary sockets.

Directories of a killed process (`kill -9`) are removed by the next process that makes one. Each directory contains a
file that its process has locked: the kernel releases that lock with the process, however it ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from typing import Final

_ROOM: Final = 100
"""Bytes of a socket's address that are used at most: Linux has room for some more, other systems for a few more."""
_BY_CHANCE: Final = 8
"""Number of random letters in the name of a directory."""
_SHORT: Final = "/tmp"
_OURS: Final = "penstock-"
_LOCKED: Final = ".penstock-lives"


class LockedFolder(tempfile.TemporaryDirectory[str]):
    """A temporary directory of this process, locked while the process lives."""

    def __init__(self, prefix: str, dir: str | None = None) -> None:
        assert prefix.startswith(_OURS), prefix
        super().__init__(prefix=prefix, dir=dir)
        made = os.path.join(self.name, f"{_LOCKED}-soon")
        self._held: int | None = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(
            OSError
        ):  # on a file system without locks other processes leave it alone: the file lacks its name
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(made, os.path.join(self.name, _LOCKED))
        _sweep(os.path.dirname(self.name))

    def cleanup(self) -> None:
        """Releases the lock and removes the directory."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)
        super().cleanup()


@cache
def _sweep(parent: str) -> None:
    """Removes the directories here of processes that have ended; once for each parent."""
    with suppress(OSError), os.scandir(parent) as found:
        for one in found:
            if one.name.startswith(_OURS) and one.is_dir(follow_symlinks=False):
                _remove_left(one.path)


def _remove_left(folder: str) -> None:
    with suppress(OSError):
        file = os.open(os.path.join(folder, _LOCKED), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)


def socket_folder(prefix: str, longest: str) -> LockedFolder:
    """A directory that only this user can enter, for sockets whose names are no longer than `longest`. It lies among
    the temporary files, unless that path is too long for a socket's address."""
    made = len(os.fsencode(os.path.join(tempfile.gettempdir(), prefix))) + _BY_CHANCE + len(f"/{longest}")
    return LockedFolder(prefix, None if made <= _ROOM else _SHORT)
