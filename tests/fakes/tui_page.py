"""`penstock tui --web`, running, for tests of its page."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from fakes.process import PATIENCE

ROOT = Path(__file__).parents[2]


class Served(NamedTuple):
    """A page that is served."""

    link: str
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        """Without what the link knows."""
        return self.link.partition("/?")[0]

    def tabs(self) -> list[int]:
        """The processes of its tabs."""
        return below(self.process.pid)


def below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    try:
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [found for child in own for found in (child, *below(child))]


def command(pid: int) -> str:
    """With what it was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def gone(pids: Iterable[int]) -> None:
    """Waits until processes have ended."""
    async with asyncio.timeout(PATIENCE):
        for pid in pids:
            try:
                ended = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            loop, told = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(ended, told.set)
            try:
                await told.wait()
            finally:
                loop.remove_reader(ended)
                os.close(ended)


@asynccontextmanager
async def served(*options: str, **environment: str) -> AsyncGenerator[Served]:
    """The page of the recorded demo; it ends with SIGINT."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "tui", "--demo", "--web", *options),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            said = (await process.stdout.readline() + await process.stdout.readline()).decode()
        link = re.search(r"http://\S+", said)
        assert link is not None, said
        yield Served(link[0], process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()
