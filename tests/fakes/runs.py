"""`penstock run` as its users run it: a process of its own. And the questions that tests ask about attempts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest
from fakes import waiting
from fakes.preloaded import penstock
from fakes.process import PATIENCE, ROOT

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import Attempt, RolloutConfig, RolloutSummary
from penstock.gateway.model.span import Span

LEASE = ("--lease", "10s")
"""Of runners whose leases end in a test, or that must hear of something soon: a beat goes out every third of it, and a
machine that stands still for five seconds costs none of them."""
OVERRUNS = "8s"
"""Time for an agent that is to exceed it, but not before it has begun: on a busy machine it takes seconds to start."""
AGENTS = ROOT / "tests" / "sidecar" / "agents"
PYTHON = sys.executable


@dataclass(slots=True)
class Run:
    """A `penstock run` process."""

    process: asyncio.subprocess.Process
    out: Path
    err: Path

    async def ended(self, patience_s: float = PATIENCE) -> int:
        """Its exit code."""
        try:
            async with asyncio.timeout(patience_s):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"penstock run did not end\n{self.stderr}") from None

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()


class StartRun(Protocol):
    """Starts `penstock run` with these words before and after `--`."""

    async def __call__(
        self, *words: str, agent: tuple[str, ...] = (), env: Mapping[str, str] | None = None, cwd: Path = AGENTS
    ) -> Run: ...


@asynccontextmanager
async def runs(url: str, home: Path) -> AsyncGenerator[StartRun]:
    """Starts runners of a gateway; those that still run at the end are killed."""
    numbers = count()
    async with AsyncExitStack() as stack:

        async def start(
            *words: str, agent: tuple[str, ...] = (), env: Mapping[str, str] | None = None, cwd: Path = AGENTS
        ) -> Run:
            number = next(numbers)
            out, err = home / f"run-{number}.out", home / f"run-{number}.err"
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = await penstock(
                    *("run", "--gateway", url, *words),
                    *(("--", *agent) if agent else ()),
                    env=dict(os.environ) | {"PYTHONPATH": str(ROOT)} | dict(env or {}),
                    cwd=cwd,
                    stdout=stdout,
                    stderr=stderr,
                )
            made = Run(process, out, err)
            stack.push_async_callback(_kill, made)
            return made

        yield start


async def _kill(run: Run) -> None:
    if run.process.returncode is None:
        run.process.kill()
    _ = await run.process.wait()
    print(run.stderr)


async def enqueue(client: Client, *inputs: Any, **config: Any) -> list[str]:
    """Queue tasks; their names."""
    specs = [RolloutSpec(id=f"r{n}", input=given, config=RolloutConfig(**config)) for n, given in enumerate(inputs, 1)]
    return [made.id for made in await client.enqueue(specs)]


async def when(client: Client, rollout: str, condition: Callable[[RolloutSummary], bool]) -> RolloutSummary:
    """The rollout, as soon as the condition holds for it."""
    return await waiting.when(lambda: client.rollout(rollout), condition, rollout)


async def only_attempt(client: Client, rollout: str = "r1") -> Attempt:
    """The attempt of a rollout that has one."""
    (attempt,) = (await client.rollout(rollout)).attempts
    return attempt


async def events(client: Client, rollout: str = "r1", attempt: str = "a1") -> list[Span]:
    """What is no call."""
    return [span async for span in client.spans(rollout, attempt) if span.kind != "llm"]


def said(spans: list[Span], name: str) -> str:
    """The text of the events of a name."""
    return "\n".join(str((span.attributes or {})["text"]) for span in spans if span.name == name)


async def written(path: Path) -> list[int]:
    """The numbers in a file, as soon as they are there: it is made before it is written to."""
    await waiting.until(lambda: path.exists() and path.read_text() != "")
    return list(map(int, path.read_text().split()))  # noqa: ASYNC240 - a few bytes


def spawned_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts a process goes on when it has ended and the loop knows, as on a machine that is busy."""
    spawn = asyncio.create_subprocess_exec

    async def late(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await spawn(*args, **options)
        _ = await process.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)
