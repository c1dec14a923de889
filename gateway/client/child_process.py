"""Children of a process and folders that it does not leave behind, however it ends: child processes, their output and
end (`spawn`), and temporary directories, also for sockets.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

STOP_S: Final = 30.0
"""Time in which a child that is asked to end has to do so."""
TAIL: Final = 15
"""Lines of a log's end in an error message."""
TAIL_BYTES: Final = 16_384
"""Most bytes read from a log, which may have grown for weeks."""
DIES_WITH_US: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its parent has died'); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Sets PR_SET_PDEATHSIG, then executes the command. Without it a restarted run would find its port taken."""


class ChildProcess:
    """A process that this one has started, until its end."""

    def __init__(self, process: Process, group: bool = False, log: Path | None = None) -> None:
        """`group`: it leads a process group, and what is left of that is killed with it. `log`: the file that it writes
        to."""
        self.process, self._group, self.log = process, group, log

    @property
    def pid(self) -> int:
        """Process id; that of its process group, too, if it leads one."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Wait for its end, however long that takes; return the exit code."""
        return await self.process.wait()

    async def output(self, limit_s: float | None = None) -> tuple[bytes, bytes]:
        """Wait for its end; return what it has written to the pipes of stdout and stderr. It is killed if that takes
        longer than `limit_s`, which raises `TimeoutError`, and if the wait is cancelled."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.process.communicate()
        finally:
            self.kill()
            # A process that it has started may hold the pipes for long, and asyncio would wait for their ends. The
            # transport itself is not closed: it would take the exit code away from who waits for it, who gets 255.
            for pipe in map(cast(Any, self.process)._transport.get_pipe_transport, range(3)):
                if pipe is not None:
                    pipe.close()
            _ = await self.process.wait()

    def kill(self) -> None:
        """Kill it, and the rest of its process group: an engine's processes would keep their memory."""
        with suppress(ProcessLookupError):
            if self._group:
                os.killpg(self.pid, signal.SIGKILL)
            elif self.code is None:
                self.process.kill()

    async def end(self, grace_s: float = 0.0) -> int:
        """Wait for its end, and kill it if that takes longer than the grace; return the exit code."""
        if grace_s and self.code is None:
            with suppress(TimeoutError):
                _ = await asyncio.wait_for(self.process.wait(), grace_s)
        self.kill()
        return await self.process.wait()

    async def stop(self) -> None:
        """Ask it to end, and kill it if it has not ended in `STOP_S`."""
        if self.code is None:
            self.process.terminate()
        _ = await self.end(STOP_S)

    def tail(self) -> str:
        """Return the end of its log, with the log's path."""
        if self.log is None:
            return "see above"
        try:
            with self.log.open("rb") as file:
                _ = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        return f"the end of {self.log}:\n" + "\n".join(lines[-TAIL:])


async def spawn(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> ChildProcess:
    """Start a command, whose first word is a path, at the head of a process group: it ends when this process ends.
    Raises OSError. Without a log it writes to this process's stdout and stderr."""
    with nullcontext() if log is None else log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DIES_WITH_US, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            start_new_session=True,
        )
    return ChildProcess(process, group=True, log=log)


# Temporary directories. Those of a killed process (`kill -9`) are removed by the next process that makes one. Each
# contains a file that its process has locked: the kernel releases that lock with the process, however it ended.

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
