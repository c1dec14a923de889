"""Gateway processes that start in milliseconds (`fakes.forkserver`)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from fakes.forkserver import reporting

from penstock.gateway.app import Gateway
from penstock.gateway.config import GatewayConfig


@contextmanager
def forked(context: ForkServerContext, data: Path, **config: Any) -> Generator[tuple[str, Any]]:
    """A gateway on a free port: its URL and its process, which is killed at the end."""
    with reporting(context, _serve, {"data": str(data), "port": 0} | config) as (process, here):
        yield here.recv(), process


def _serve(report: Connection, config: dict[str, Any]) -> None:
    import uvloop

    uvloop.run(_run(config, report))


async def _run(config: dict[str, Any], report: Connection) -> None:
    host, port = await Gateway(GatewayConfig.model_validate(config)).start()
    report.send(f"http://{host}:{port}")
    await asyncio.Event().wait()
