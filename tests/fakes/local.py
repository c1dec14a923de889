"""A gateway in the test's own process, to be spoken to as one in a process of its own (`fakes.process`).

It is there in a twentieth of the time, so every test may have one: where kill -9, signals and exits are not what is
tested.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from fakes.process import Gateway, write_config

from penstock.gateway import app
from penstock.gateway.config import load

KILLED = pytest.mark.parametrize("gateway", ["process"], indirect=True)
"""For a test whose fixture `gateway` must be a process."""


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what it says."""
        self.lines.append(self.format(record))


@dataclass(slots=True)
class Local(Gateway):
    """Such a gateway. It stops in order and starts again on its tape, and cannot be killed."""

    inner: app.Gateway | None = None
    said: _Lines = field(default_factory=_Lines)

    @property
    def gateway(self) -> app.Gateway:
        """What runs."""
        assert self.inner is not None, "the gateway has stopped"
        return self.inner

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return "\n".join(self.said.lines)

    async def start(self, port: int = 0) -> None:
        """Comes back when it serves."""
        logging.getLogger("penstock").addHandler(self.said)
        self.inner = app.Gateway(load(self.config, data=self.data, port=port))
        host, port = await self.inner.start()
        self.url = f"http://{host}:{port}"

    async def terminate(self) -> int:
        """Comes back when it has ended."""
        if self.inner is not None:
            inner, self.inner = self.inner, None
            await inner.stop()
            logging.getLogger("penstock").removeHandler(self.said)
        return 0

    async def kill(self) -> int:
        """Only a process can be."""
        raise NotImplementedError

    async def ask(self, http: ClientSession, rollout: str, attempt: str = "a1", said: str = "hi") -> Any:
        """A chat call, and what it was answered; it is on the tape."""
        body = {"model": "m", "messages": [{"role": "user", "content": said}]}
        async with http.post(self.openai(rollout, attempt) + "/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            answered = await answer.json()
        assert await self.gateway.recorder.flush()
        return answered


@asynccontextmanager
async def locally(home: Path, config: str = "") -> AsyncGenerator[Local]:
    """A gateway that keeps everything below `home`; when this ends, it has stopped in order. Keys it takes from the
    environment."""
    made = Local(write_config(home, config), home / "data", home / "stderr")
    try:
        await made.start()
        yield made
    finally:
        _ = await made.terminate()
