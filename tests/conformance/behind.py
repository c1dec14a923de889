"""A server of the suite, or ours, behind a gateway: what `--through` takes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fakes.process import running


@asynccontextmanager
async def penstock(url: str) -> AsyncGenerator[str]:
    """The URL of a server below a gateway's address; the gateway records what passes."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        async with running(Path(folder), f'[mcp.servers.suite]\nurl = "{url}"\n') as gateway:
            yield f"{gateway.url.replace('127.0.0.1', 'localhost')}/rollout/suite/mcp/suite"
