"""`penstock tui --web`, running, for tests of its page."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from fakes.process import PATIENCE, ROOT, below


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
