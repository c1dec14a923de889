"""Runs a whole soak: agents call one gateway that is killed and reloaded in the first third of it; then its tape is
read.

So the last process serves two thirds of all calls, and its memory and its speed must stay the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from bench.peers import BUILD, HERE
from bench.programs import Cores
from bench.soak.account import Account, Kill, Recorded, settle
from bench.soak.calls import Calls
from bench.soak.kinds import KINDS, Requests, Seen, episode
from bench.soak.line import Line
from bench.soak.samples import Sample, Sampler, progress
from bench.soak.served import Served
from penstock.gateway.tape.store import Store

FAULTS_BEGIN, FAULTS_END = 0.1, 0.33
"""Shares of all calls between which the gateway is killed and reloaded."""


@dataclass(frozen=True)
class Plan:
    """The numbers of a soak."""

    calls: int = 1_000_000
    agents: int = 48
    """Agents that call at the same time, one call each."""
    kills: int = 3
    reloads: int = 3
    samples: int = 200
    seed: int = 1
    workers: int = 1
    """Workers of the gateway. With several every second kill takes only one of them."""


@dataclass
class Outcome:
    """The results of a soak."""

    plan: Plan
    samples: list[Sample] = field(default_factory=list[Sample])
    faults: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Kind of each fault, and the number of calls before it."""
    account: Account = field(default_factory=Account)


class Soak:
    """One gateway and its callers."""

    def __init__(self, plan: Plan, served: Served, out: Path) -> None:
        self._plan, self._served, self._out = plan, served, out
        self._requests, self._sampler = Requests(plan.seed), Sampler(served)
        self.calls, self.kills = Calls(secrets.randbelow(2**32 - 1) + 1), list[Kill]()
        self.outcome = Outcome(plan)
        self._done = self._rollouts = 0
        self._chance = random.Random(plan.seed)
        self._marks: list[tuple[int, asyncio.Future[None]]] = []
        self._up = asyncio.Event()

    async def run(self) -> None:
        """Make all calls and faults, and end the gateway."""
        await self._served.start()
        self._sampler.begin()
        self._up.set()
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.agents):
                group.create_task(self._agent(random.Random(f"{self._plan.seed} {number}")))
            group.create_task(self._disturb())
            group.create_task(self._measure())
        await self._served.stop()

    async def _agent(self, chance: random.Random) -> None:
        """Run rollouts, one after the other."""
        line = Line(self._served.port, chance)
        while self._done < self._plan.calls:
            rollout, self._rollouts = self._rollouts, self._rollouts + 1
            for kind, conversation, step in episode(chance):
                if self._done >= self._plan.calls:
                    break
                await self._up.wait()
                number = self.calls.begin(kind)
                name = self.calls.name(number)
                request = self._requests.request(kind, (conversation, step), rollout, name)
                seen = await line.call(KINDS[kind], request, name)
                self._over(kind, seen, self.calls.end(number, seen))
                if seen == Seen.UNSENT:
                    await self._served.wait(0.05)
        line.close()

    def _over(self, kind: int, seen: Seen, took: float) -> None:
        if seen == Seen.UNSENT:
            return
        self._sampler.note(kind, seen, took)
        self._done += 1
        while self._marks and self._marks[0][0] <= self._done:
            self._marks.pop(0)[1].set_result(None)

    async def _reached(self, calls: int) -> None:
        """Wait until so many calls are over."""
        if self._done < calls:
            mark = asyncio.get_running_loop().create_future()
            self._marks.append((calls, mark))
            self._marks.sort(key=lambda one: one[0])
            await mark

    async def _disturb(self) -> None:
        for at, fault in schedule(self._plan):
            await self._reached(at)
            self.outcome.faults.append((fault, self._done))
            self._sampler.life += 1
            if fault == "kill" and self._plan.workers > 1 and len(self.kills) % 2:
                self.kills.append(await self._served.kill_worker(self._chance))
            elif fault == "kill":
                self._up.clear()
                self.kills.append(await self._served.kill())
                await self._served.start()
                self._up.set()
            else:
                await self._served.reload()

    async def _measure(self) -> None:
        every = max(1, self._plan.calls // self._plan.samples)
        for at in range(every, self._plan.calls + 1, every):
            await self._reached(at)
            await self._up.wait()
            sample = self._sampler.sample(self._done)
            self.outcome.samples.append(sample)
            with self._out.open("a") as file:
                file.write(json.dumps(sample.row()) + "\n")
            print(progress(sample), flush=True)


def schedule(plan: Plan) -> list[tuple[int, str]]:
    """Return (number of calls, fault): kills and reloads in turn, while either is left."""
    turns = zip_longest(["kill"] * plan.kills, ["reload"] * plan.reloads)
    faults = [fault for turn in turns for fault in turn if fault]
    step = (FAULTS_END - FAULTS_BEGIN) / max(1, len(faults) - 1)
    return [(int(plan.calls * (FAULTS_BEGIN + step * place)), fault) for place, fault in enumerate(faults)]


async def run(plan: Plan, cores: Cores, out: Path) -> Outcome:
    """Run a soak in a directory of its own; samples go to `out` as they come."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=BUILD) as home, _provider(cores.load) as provider:
        served = Served(Path(home), provider, cores.gateway, plan.workers)
        soak = Soak(plan, served, out)
        try:
            await soak.run()
        finally:
            if served.process is not None and served.process.returncode is None:
                _ = await served.kill()
        soak.outcome.account = settle(soak.calls, soak.kills, tape(served.data))
    return soak.outcome


@contextmanager
def _provider(core: int) -> Generator[int]:
    """Run the provider in a process of its own; yield its port."""
    command, root = [sys.executable, "-m", "bench.soak.provider"], HERE.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def tape(data: Path) -> Iterator[Recorded]:
    """Yield every call on a tape, the newest first."""
    with Store(data, readonly=True) as store:
        for _, span in store.recent():
            if span.kind in ("llm", "tool"):
                where = f"{span.rollout}/{span.attempt}#{span.sequence}"
                yield Recorded(span.parent_id, span.status, span.response_id, where)
