"""The desk of a gateway's queue on a real store, without a gateway; and its clock, which a test may set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.entries import call
from fakes.process import PATIENCE

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.config import TapeSettings
from penstock.gateway.model.base import Mode
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import (
    AttemptEnd,
    ClaimRequest,
    FinishRequest,
    HeartbeatRequest,
    HeldAttempt,
    RolloutSpec,
)
from penstock.gateway.model.rollout import Attempt, Judgement, Outcome, RolloutConfig, RolloutStatus
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.queue import ClaimedAttempt

SECOND = 10**9
AGAIN = RolloutConfig(retry_on=["failed", "timeout", "unresponsive"])


class Clock:
    """Runs with the machine's, unless it stands, and can be set. One that stands decides nothing by itself, however
    busy the machine is."""

    def __init__(self, stands: bool = False) -> None:
        self.stands = stands
        self.ahead = 1_800_000_000 * SECOND - (0 if stands else time.monotonic_ns())

    def __call__(self) -> int:
        return self.ahead if self.stands else time.monotonic_ns() + self.ahead


class Call:
    """A finished call of an agent, as the recorder takes it."""

    weight = 100

    def __init__(self, rollout: str, attempt: str, now: int) -> None:
        self.made = call(rollout, attempt)
        self.made.start_ns = self.made.end_ns = now

    def entry(self, final: bool) -> Any:
        return self.made


class Life:
    """One life of a gateway's queue."""

    def __init__(self, path: Path, clock: Clock, quiet_s: float) -> None:
        self.clock = clock
        self.store = open_store(path, map_bytes=1 << 20)
        self.metrics = Metrics()
        self.recorder = Recorder(self.store, TapeSettings(), self.metrics, lambda cursor, records: None)
        self.dispatcher = Dispatcher(self.recorder, self.metrics, clock, quiet_s=quiet_s)

    async def enqueue(self, *names: str, mode: Mode = "train", config: RolloutConfig = AGAIN) -> None:
        await self.dispatcher.enqueue([RolloutSpec(id=name, mode=mode, config=config) for name in names])

    async def claim(
        self,
        worker: str = "w1",
        wait_s: float = 0,
        lease_s: float = 30,
        limit: int = 1,
        modes: list[Mode] | None = None,
    ) -> list[str]:
        """ROLLOUT/ATTEMPT of each."""
        asked = ClaimRequest(worker=worker, wait_s=wait_s, lease_s=lease_s, limit=limit, modes=modes)
        return list(map(name_of, await self.dispatcher.claim(asked)))

    async def begin(self, *names: str, config: RolloutConfig = AGAIN, worker: str = "w1", lease_s: float = 30) -> None:
        """Rollouts that a worker holds."""
        await self.enqueue(*names, config=config)
        assert await self.claim(worker, lease_s=lease_s, limit=len(names)) == [f"{name}/a1" for name in names]

    async def beat(self, *names: str, worker: str = "w1", lease_s: float = 30, running: bool = False) -> list[bool]:
        held = [HeldAttempt(rollout=name.split("/")[0], attempt=name.split("/")[1], running=running) for name in names]
        return [
            one.held
            for one in await self.dispatcher.heartbeat(worker, HeartbeatRequest(attempts=held, lease_s=lease_s))
        ]

    async def finish(
        self, name: str, status: AttemptEnd = "succeeded", worker: str | None = "w1", rewards: Sequence[Judgement] = ()
    ) -> RolloutStatus:
        asked = FinishRequest(worker=worker, status=status, outcome=Outcome(exit_code=0), rewards=list(rewards))
        rollout, attempt = name.split("/")
        return (await self.dispatcher.finish(rollout, attempt, asked)).rollout.status

    async def agent_calls(self, name: str) -> None:
        rollout, attempt = name.split("/")
        self.recorder.put(Call(rollout, attempt, self.clock()))
        assert await self.recorder.flush()

    def waiting_begin(self, count: int) -> None:
        """So many attempts begin that nobody has claimed, and are fetched."""
        self.dispatcher.queue.unclaimed.extend((f"i-019f5a2b7c1-{number:08x}", "0") for number in range(count))
        self.dispatcher.deadlines._sweep()

    def damage(self, name: str) -> None:
        """Its record makes no sense, and nobody remembers it."""
        rollout, attempt = name.split("/")
        with self.store.view() as view:
            origins = view.origins(rollout)
        assert origins is not None
        key, env = keys.attempt_record_key(origins.number, attempt), self.store._env
        env.write(lambda txn: txn.put(key, b"\xc1", db=env.dbs["attempts"]))
        self.store._writer._tables._memory.clear()

    def attempt(self, name: str) -> Attempt:
        rollout, attempt = name.split("/")
        return next(one for one in self.store.attempts(rollout) if one.id == attempt)

    def status(self, rollout: str) -> RolloutStatus:
        found = self.store.rollout(rollout)
        assert found is not None
        return found.status

    async def later(self, seconds: float) -> None:
        """Sets the clock, which stands, so much ahead; comes back when all that is due by then was looked at."""
        there = self.dispatcher.deadlines
        assert self.clock.stands
        self.clock.ahead += int(seconds * SECOND)
        there._set_timer()
        await self.when(lambda: there._expiring is None and all(at > self.clock() for at in there._watched.values()))

    def sweep_no_more(self) -> None:
        """From now on only its time ends an attempt: nothing looks every few seconds for those that were missed."""
        assert self.dispatcher.deadlines._sweeper is not None
        self.dispatcher.deadlines._sweeper.cancel()

    def sweep(self) -> None:
        """Looks for those that were missed now, and no more."""
        self.dispatcher.deadlines._sweep()
        self.sweep_no_more()

    async def when(self, condition: Callable[[], bool]) -> None:
        """Comes back when it holds; what happens is asked for again after every commit."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():  # noqa: ASYNC110 - the tape has no event for what the clock does
                    await asyncio.sleep(0.01)
        except TimeoutError:
            there = {rollout.id: rollout.status for _, rollout in self.store.rollouts()}
            raise AssertionError(f"it is not so after {PATIENCE} s; on the tape are {there}") from None

    async def waiting(self, count: int) -> None:
        """Comes back when so many wait in the line."""
        await self.when(lambda: len(self.dispatcher._line) == count)


def name_of(claimed: ClaimedAttempt) -> str:
    return f"{claimed.attempt.rollout}/{claimed.attempt.id}"


@asynccontextmanager
async def living(path: Path, clock: Clock | None = None, quiet_s: float = 1800) -> AsyncGenerator[Life]:
    """A desk at work."""
    life = Life(path, clock or Clock(), quiet_s)
    life.recorder.start()
    await life.dispatcher.start()
    try:
        yield life
    finally:
        await life.dispatcher.stop()
        await life.recorder.close()
        assert list(problems(life.store)) == []
        life.store.close()


def patient(step: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(step)
