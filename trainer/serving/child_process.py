"""Processes of ours that end when we end, in whatever way: an inference server, a runner."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

STOP_S: Final = 30.0
TAIL: Final = 15
"""Lines of a log that are said."""
TAIL_BYTES: Final = 16_384
"""Of a log that may have grown for weeks no more is read."""
DIES_WITH_US: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its parent has died'); os.execv(sys.argv[2], sys.argv[2:])"
)
"""PR_SET_PDEATHSIG, then the command in its place. Otherwise a restarted run would find its port taken."""


class Child:
    """A process with its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self._process, self.log = process, log

    @property
    def pid(self) -> int:
        """Its number, which is that of its group, too."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What it ended with; None while it runs."""
        return self._process.returncode

    async def ended(self) -> int:
        """What it ended with, as soon as it has."""
        return await self._process.wait()

    def tail(self) -> str:
        """The end of its log, with its name."""
        if self.log is None:
            return "see above"
        try:
            with self.log.open("rb") as file:
                _ = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        return f"the end of {self.log}:\n" + "\n".join(lines[-TAIL:])

    def sweep(self) -> None:
        """Kills the processes that it has left behind: an engine's processes would keep their memory."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Asks it to end; when it does not, it is killed. What it has started and left behind is killed, too."""
        if self.code is None:
            self._process.terminate()
            with suppress(TimeoutError):
                _ = await asyncio.wait_for(self._process.wait(), STOP_S)
        self.sweep()
        _ = await self._process.wait()


async def spawn(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> Child:
    """Starts a command, whose first word is a path; raises OSError when that cannot be. Without a log it prints where
    we do."""
    with nullcontext() if log is None else log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DIES_WITH_US, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            start_new_session=True,
        )
    return Child(process, log)
