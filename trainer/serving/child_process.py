"""Child processes that end when this process ends, however it ends: an inference server, a runner."""

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
"""Lines of a log's end in an error message."""
TAIL_BYTES: Final = 16_384
"""Most bytes read from a log, which may have grown for weeks."""
DIES_WITH_US: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its parent has died'); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Sets PR_SET_PDEATHSIG, then executes the command. Without it a restarted run would find its port taken."""


class ChildProcess:
    """A process with its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self._process, self.log = process, log

    @property
    def pid(self) -> int:
        """Process id, which is the id of its process group, too."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return await self._process.wait()

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

    def sweep(self) -> None:
        """Kill the rest of its process group: an engine's processes would keep their memory."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Terminate it; kill it if it does not end in `STOP_S`. Processes of its group that are left are killed,
        too."""
        if self.code is None:
            self._process.terminate()
            with suppress(TimeoutError):
                _ = await asyncio.wait_for(self._process.wait(), STOP_S)
        self.sweep()
        _ = await self._process.wait()


async def spawn(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> ChildProcess:
    """Start a command, whose first word is a path; raises OSError. Without a log it writes to this process's stdout and
    stderr."""
    with nullcontext() if log is None else log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DIES_WITH_US, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            start_new_session=True,
        )
    return ChildProcess(process, log)
