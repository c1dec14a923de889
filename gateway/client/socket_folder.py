"""Directories for a while, and where sockets lie that are made for a while.

What a process leaves that is killed (`kill -9`) is removed by the next one. A directory of ours holds a file that its
process has locked: the kernel ends that lock with the process, whatever ended it.
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
"""Bytes of the address of a socket; Linux has room for some more, others for few more."""
_BY_CHANCE: Final = 8
"""Letters that make the name of a directory its own."""
_SHORT: Final = "/tmp"
_OURS: Final = "penstock-"
_LOCKED: Final = ".penstock-lives"


class Folder(tempfile.TemporaryDirectory[str]):
    """A directory of this process."""

    def __init__(self, prefix: str, dir: str | None = None) -> None:
        assert prefix.startswith(_OURS), prefix
        super().__init__(prefix=prefix, dir=dir)
        made = os.path.join(self.name, f"{_LOCKED}-soon")
        self._held: int | None = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: others leave it alone, as it has not its name
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(made, os.path.join(self.name, _LOCKED))
        _sweep(os.path.dirname(self.name))

    def cleanup(self) -> None:
        """Removes it."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)
        super().cleanup()


@cache
def _sweep(parent: str) -> None:
    """Removes what processes have left here that are no more; once."""
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


def socket_folder(prefix: str, longest: str) -> Folder:
    """A directory that only this user can enter, for sockets of names that are no longer than that one. It is where
    temporary files are, unless that lies too deep for an address."""
    made = len(os.fsencode(os.path.join(tempfile.gettempdir(), prefix))) + _BY_CHANCE + len(f"/{longest}")
    return Folder(prefix, None if made <= _ROOM else _SHORT)
