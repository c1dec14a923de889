"""Lives of a training run: whole `penstock train grpo` processes that begin in a moment, forked from one that has
imported torch once.

    async with begun(home / "train.toml", gateway.url) as life:
        await life.said("step 1/3")
        await life.kill()

The runner that a run starts, and its check, do not wait for imports either (`fakes.preloaded`): what the run has
started passes signals on to it, all but SIGKILL. `own_runner`: it is what the run has started itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from fakes.forkserver import forking, reporting
from fakes.preloaded import door
from fakes.process import PATHS, child

PYTHON = f"""#!{sys.executable} -IS
import os, sys
if sys.argv[1:4] != ["-P", "-m", "penstock"]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
del sys.argv[1:4]
"""
"""The head of a Python whose `python -P -m penstock` is a program that knocks at a door."""


def forkserver() -> ForkServerContext:
    """What starts them."""
    return forking("penstock.trainer.runs.session", "penstock.trainer.commands", "penstock.console.main", "fakes.lives")


class Life:
    """One of them."""

    def __init__(self, process: ForkServerProcess, output: asyncio.StreamReader) -> None:
        self._process, self._output = process, output
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def said(self, pattern: str) -> re.Match[str]:
        """The next line that has this in it."""
        while line := await self._output.readline():
            self.lines.append(line.decode())
            if match := re.search(pattern, self.lines[-1]):
                return match
        raise AssertionError(f"it ended without saying {pattern!r}:\n{self.text}")

    async def ended(self) -> int:
        """What it exits with, or minus the signal that killed it."""
        self.lines += [line.decode() async for line in self._output]
        await asyncio.to_thread(self._process.join)
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def text(self) -> str:
        """All that was read of what it said."""
        return "".join(self.lines)

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """`kill -9`, of which it dies."""
        self.signal(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    def child(self, word: bytes) -> int:
        """The process that it has started with this word in its command."""
        return child(self.pid, word)

    def file_limit(self, size: int) -> None:
        """From now on no file of it grows beyond `size` bytes: writing fails as on a disk that is full."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@asynccontextmanager
async def begun(config: Path, gateway: str, *flags: str, own_runner: bool = False) -> AsyncGenerator[Life]:
    """A run with this `train.toml` and these flags, killed at the end if it has not ended."""
    with quick_python() as quick:
        python = Path(sys.executable) if own_runner else quick
        with fork(_live, config, gateway, flags, python) as (process, here):
            output = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), os.fdopen(os.dup(here.fileno()), "rb")
            )
            here.close()
            life = Life(process, output)
            try:
                yield life
            finally:
                process.kill()
                _ = await life.ended()
                transport.close()
                print(life.text)


@contextmanager
def quick_python() -> Generator[Path]:
    """What starts Python, and commands of Penstock as forks of a process that has imported them."""
    with TemporaryDirectory() as home, door(Path(home, "door")) as knocks:
        made = Path(home, "python")
        made.write_text(PYTHON + knocks)
        made.chmod(0o755)
        yield made


def as_its_own() -> None:
    """As in every process of its own: nothing of the one that it is forked from."""
    import torch

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def fork(
    target: Callable[..., None], *arguments: object
) -> AbstractContextManager[tuple[ForkServerProcess, Connection]]:
    """One that runs a function, as `reporting` says."""
    return reporting(forkserver(), target, *arguments)


def _live(output: Connection, config: Path, gateway: str, flags: Sequence[str], python: Path) -> None:
    from penstock.console.main import main

    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    as_its_own()
    os.environ["PYTHONPATH"] = PATHS
    sys.executable = str(python)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    main(["train", "grpo", str(config), "--gateway", gateway, *flags])
