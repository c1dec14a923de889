"""A chaos run: a gateway, runners, agents, and kills without warning; then the verdict.

Everything is a process of its own and is what a user runs: `penstock serve` with `record = "strict"`, `penstock run`,
and an agent (`agent.py`) that knows nothing of Penstock. Only the provider is faked. Kills are by SIGKILL: agents
alone, runners with all they hold, the gateway in the middle of everything (it comes back on the same port and data).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.chaos.plan import Plan
from e2e.chaos.provider import serving
from e2e.chaos.verdict import Verdict, judge
from fakes.process import ROOT, Gateway, command, running, upstreams

from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client, ClientError

AGENT = Path(__file__).with_name("agent.py")
CONFIG = '[tape]\nrecord = "strict"\n\n'
LOOK_S = 0.05
"""Between two looks at how far it is."""


@dataclass
class Report:
    """How it went."""

    verdict: Verdict
    seconds: float
    kills: Counter[str]
    tape: list[str]
    """What `penstock check` says."""
    figures: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def problems(self) -> list[str]:
        """All that is wrong."""
        return [*self.verdict.problems, *self.tape]

    def __str__(self) -> str:
        found = self.verdict
        lines = [
            f"{sum(found.rollouts.values())} rollouts in {self.seconds:.1f} s: {_counts(found.rollouts)}",
            f"{sum(found.attempts.values())} attempts: {_counts(found.attempts)}",
            f"killed: {_counts(self.kills)}",
            f"{found.seen} calls seen answered, {found.cut} more on the tape that were cut off on their way",
            f"{found.rewards} rewards, {self.figures.get('changes', 0)} changes on the tape",
            f"{len(self.problems)} problems",
        ]
        return "\n".join([*lines, *self.problems[:50]])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"


class Chaos:
    """One run."""

    def __init__(self, plan: Plan, home: Path, gateway: Gateway, client: Client) -> None:
        self.kills: Counter[str] = Counter()
        self._plan, self._home, self._gateway, self._client = plan, home, gateway, client
        self._chance = random.Random(plan.seed)
        self._runners: list[asyncio.subprocess.Process] = []
        self._started = 0
        for name in ("journals", "locks", "overlaps"):
            (home / name).mkdir()

    async def run(self) -> None:
        """From the first task to the last; raises `AssertionError` when it does not come to an end."""
        names = self._plan.names
        for at in range(0, len(names), 1000):
            _ = await self._client.enqueue([self._plan.spec(name) for name in names[at : at + 1000]])
        try:
            for _ in range(self._plan.runners):
                await self._start_runner()
            async with asyncio.timeout(self._plan.patience_s):
                await self._strike()
                await self._reached(1.0)
        except TimeoutError:
            raise AssertionError(f"it does not end: {await self._client.queue()}\n{self._output()}") from None
        finally:
            await self._stop_runners()

    async def _strike(self) -> None:
        unwanted = [name for name in self._plan.names if self._plan.kind(name) == "unwanted"]
        self._chance.shuffle(unwanted)
        cancels = [(self._chance.uniform(0.0, 0.9), name) for name in unwanted]
        strikes = [(at, "cancel", name) for at, name in cancels]
        strikes += [(at, what, "") for at, what in self._plan.strikes()]
        for at, what, name in sorted(strikes):
            await self._reached(at)
            await self._do(what, name)

    async def _do(self, what: str, name: str) -> None:
        if what == "cancel":
            await self._cancel(name)
        elif what == "agent":
            self._kill_agent()
        elif what == "runner":
            await self._kill_runner()
        else:
            self.kills["gateway"] += 1
            _ = await self._gateway.kill()
            await self._gateway.start(self._gateway.port)

    async def _reached(self, share: float) -> None:
        """Returns when so much of the queue is empty; for the whole of it, when nothing is claimed either."""
        while True:
            queue = await self._client.queue()
            left = sum(queue.waiting.values()) + (queue.claimed if share == 1 else 0)
            if left <= self._plan.rollouts * (1 - share):
                return
            await self._keep_runners()
            await asyncio.sleep(LOOK_S)

    async def _cancel(self, name: str) -> None:
        try:
            _ = await self._client.cancel(name)
            self.kills["cancel"] += 1
        except ClientError as error:
            if error.status != 409:  # it had ended already
                raise

    # -- agents and runners --------------------------------------------------------------------------------------------

    def _kill_agent(self) -> None:
        """One of those that run."""
        journals = sorted((self._home / "journals").iterdir(), key=lambda path: path.stat().st_mtime)[-50:]
        self._chance.shuffle(journals)
        for journal in journals:
            pid = int(journal.read_text().partition("\n")[0][4:] or 0)
            if pid and str(AGENT).encode() in command(pid):
                os.kill(pid, signal.SIGKILL)
                self.kills["agent"] += 1
                return

    async def _kill_runner(self) -> None:
        victim = self._chance.randrange(len(self._runners))
        process = self._runners.pop(victim)
        if process.returncode is None:
            process.kill()
            self.kills["runner"] += 1
        _ = await process.wait()
        await self._start_runner()

    async def _keep_runners(self) -> None:
        """One that was started while the gateway was away has left at once; whoever supervises it starts another."""
        for process in [process for process in self._runners if process.returncode is not None]:
            self.kills["runner, by an absent gateway"] += 1
            assert process.returncode == 1, f"a runner ended with {process.returncode}\n{self._output()}"
            self._runners.remove(process)
            await self._start_runner()

    async def _start_runner(self) -> None:
        self._started += 1
        options = [
            *("--gateway", self._gateway.url, "--name", f"runner-{self._started}", "--watch"),
            *("--workers", str(self._plan.workers), "--lease", f"{self._plan.lease_s}s"),
            *("--env", f"CHAOS_DIR={self._home}", "--env", "CHAOS_KIND={kind}"),
            *("--env", "CHAOS_CALLS={calls}", "--env", "CHAOS_REWARD={reward}", "--no-stdin"),
        ]
        with (self._home / "runners").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", "run", *options, "--", sys.executable, "-I", "-S", str(AGENT)),
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._runners.append(process)

    async def _stop_runners(self) -> None:
        for process in self._runners:
            if process.returncode is None:
                process.terminate()
        for process in self._runners:
            _ = await process.wait()

    def _output(self) -> str:
        return (self._home / "runners").read_text(errors="replace")[-4000:]


@asynccontextmanager
async def _gateway(home: Path) -> AsyncGenerator[tuple[Gateway, Client]]:
    async with (
        serving() as provider,
        running(home / "gateway", CONFIG + upstreams(openai=provider.url)) as gateway,
        Client(gateway.url) as client,
    ):
        yield gateway, client


async def run(plan: Plan, home: Path) -> Report:
    """A whole run; everything is left below `home`."""
    began = time.monotonic()
    async with _gateway(home) as (gateway, client):
        chaos = Chaos(plan, home, gateway, client)
        await chaos.run()
        seconds = time.monotonic() - began
        verdict = await judge(plan, client, home)
        data = gateway.data
    figures, problems = examine(data)
    return Report(verdict, seconds, chaos.kills, problems, figures)
