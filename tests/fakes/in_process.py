"""A gateway in the test's own process, to be spoken to as one in a process of its own (`fakes.process`).

It is there at once, so every test may have one: where processes, signals and logs are not what is tested.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fakes.process import Gateway, write_config

from penstock.gateway import app
from penstock.gateway.config import load


@asynccontextmanager
async def running_here(home: Path, config: str) -> AsyncGenerator[Gateway]:
    """A gateway that keeps everything below `home`; when this ends, it has stopped in order."""
    made = Gateway(write_config(home, config), home / "data", home / "stderr")
    gateway = app.Gateway(load(made.config, data=made.data, port=0))
    host, port = await gateway.start()
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        await gateway.stop()
