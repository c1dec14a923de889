"""The loop of a runner: claim as many attempts as there are free workers, run them, and leave when there is no more.

There is one claim request at a time, for all free workers. Without `watch` the runner leaves when the queue is open and
empty and no worker, here or elsewhere, holds an attempt whose rollout could return to it. It also leaves when the queue
is draining, after `most` attempts, and on request: `stop` lets the agents finish, `abandon` kills them and gives their
attempts back. And it leaves when its agents cannot work on this machine (`FailureBreaker`); then it hands their
attempts back.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from functools import partial

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.environment import CURRENT_GATEWAY
from penstock.gateway.model.queue import Claim, ClaimAnswer, ClaimRequest, HeartbeatRequest, HeldAttempt, QueueState
from penstock.gateway.model.rollout import WorkerUsage
from penstock.sidecar.run.agent.supervisor import descendants, process_table
from penstock.sidecar.run.attempt import (
    FAULT_PAUSES,
    MOST_FAULTS,
    AttemptRun,
    cancel_on,
    hand_back,
    retry_until_answered,
)
from penstock.sidecar.run.engines.local import AgentEngine
from penstock.sidecar.run.hooks import Hooks
from penstock.sidecar.run.progress import AttemptResult, AttemptTally, LineProgress
from penstock.sidecar.run.reward_judge import RewardJudge
from penstock.sidecar.run.settings import RunnerSettings

WATCH_S, LAST_S = 55.0, 0.5
"""The time that a claim waits for work: when the runner stays (`watch`), and when it leaves as soon as there is none;
s.
"""
MOST_CLAIMS = 100
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Runner:
    """Claims attempts from the queue and runs an agent for each."""

    def __init__(self, settings: RunnerSettings, engine: AgentEngine, progress: LineProgress) -> None:
        """Raises `UsageError` when the settings name a judge or a hook that does not exist."""
        self.tally = AttemptTally()
        self._settings, self._engine, self._progress = settings, engine, progress
        self._judge, self._hooks = RewardJudge(settings.judging), Hooks(settings, progress.say)
        self._works: dict[asyncio.Task[None], AttemptRun] = {}
        self._claimed = 0
        self._breaker = FailureBreaker(settings.keep_going)
        self._faults: Counter[str] = Counter()
        """Number of times that each rollout was handed back because of its agent's surroundings."""
        self._freed, self._stopping, self._abandoned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Take no more work; the agents that run may finish."""
        self._stopping.set()

    def abandon(self) -> None:
        """Take no more work, kill the agents and give their attempts back."""
        self.stop()
        self._abandoned.set()
        for work in self._works.values():
            work.give_back()

    def hand_back(self, reason: str) -> None:
        """Take no more work, and hand back the attempts that run: they count as no tries."""
        self.stop()
        for work in self._works.values():
            work.hand_back(reason)

    async def run(self) -> AttemptTally:
        """Run attempts until there are no more; return the tally. Raises `ClientError` when the gateway refuses the
        runner.
        """
        _ = CURRENT_GATEWAY.set((self._settings.gateway, self._settings.key))
        async with Client(self._settings.gateway, self._settings.key) as client:
            _ = await client.queue()  # a wrong address or key shows at once
            heart = HeartbeatSender(client, self._settings, self._progress, self._hooks)
            beating = asyncio.ensure_future(heart.run())
            try:
                await self._take(client, heart)
                while self._works:
                    _ = await asyncio.wait(self._works)
            finally:
                await self._leave()
                _ = beating.cancel()
                await heart.say_goodbye()
        return self.tally

    async def _leave(self) -> None:
        """Make sure that no agent stays behind, however the loop ended."""
        self.abandon()
        if self._works:
            _ = await asyncio.wait(self._works)

    async def _take(self, client: Client, heart: HeartbeatSender) -> None:
        while (count := await self._room()) > 0 and (self._settings.release or heart.queue != "draining"):
            answer = await cancel_on(self._stopping, self._claim(client, count))
            for claim in [] if answer is None else answer.claims:
                self._begin(claim, answer.waiting if answer else 0, client, heart)
            if answer is None or answer.queue == "draining":
                return
            if not answer.claims and not self._settings.watch and await self._exhausted(client):
                return

    async def _room(self) -> int:
        """The number of attempts that may be claimed; waits until it is at least one. 0 when it is time to leave."""
        while not self._stopping.is_set():
            left = MOST_CLAIMS if self._settings.most is None else self._settings.most - self._claimed
            count = min(self._settings.workers - len(self._works), left, MOST_CLAIMS)
            if count > 0 or left <= 0:
                return count
            self._freed.clear()
            _ = await cancel_on(self._stopping, self._freed.wait())
        return 0

    async def _claim(self, client: Client, count: int) -> ClaimAnswer:
        asked = ClaimRequest(
            worker=self._settings.name,
            limit=count,
            wait_s=WATCH_S if self._settings.watch else LAST_S if self._works else 0.0,
            lease_s=self._settings.lease_s,
            modes=None if self._settings.modes is None else list(self._settings.modes),
        )
        release = self._settings.release
        ask = client.claim if release is None else partial(client.claim_rehearsals, release)
        return await retry_until_answered(lambda: ask(asked), self._progress.report_away)

    async def _exhausted(self, client: Client) -> bool:
        """True if no rollout can return to the queue."""
        if self._works:
            return False
        queue = await retry_until_answered(client.queue, self._progress.report_away)
        waiting = sum(count for mode, count in queue.waiting.items() if mode in (self._settings.modes or queue.waiting))
        if queue.state == "open" and not waiting and not queue.claimed:
            return True
        _ = await cancel_on(self._stopping, asyncio.sleep(LAST_S))
        return False

    def _begin(self, claim: Claim, waiting: int, client: Client, heart: HeartbeatSender) -> None:
        self._claimed += 1
        self._progress.on_begin(claim, waiting)
        excused = self._faults[claim.rollout.id] < MOST_FAULTS
        work = AttemptRun(claim, self._settings, client, self._engine, self._judge, self._progress, excused)
        task = asyncio.ensure_future(self._work(work, client, heart))
        self._works[task] = work
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        _ = self._works.pop(task, None)
        self._freed.set()

    async def _work(self, work: AttemptRun, client: Client, heart: HeartbeatSender) -> None:
        heart.add(work)
        try:
            await self._hooks.before(work)
            result = await work.run()
        except Exception as e:
            # The lease of this attempt ends by itself; the other workers go on.
            reason = f"the runner failed: {type(e).__name__}: {e}"
            result = AttemptResult(*work.key, self._settings.name, "lost", 0.0, None, reason)
        finally:
            heart.drop(work)
        if result.end == "returned":
            await heart.give_back(work)
        self.tally.add(result)
        self._progress.on_end(result, self.tally)
        await self._hooks.after(work, result)
        if result.end == "environment":
            self._faults[result.rollout] += 1
            # Surroundings that failed are tried again, with a longer pause each time.
            _ = await cancel_on(self._stopping, asyncio.sleep(FAULT_PAUSES.after(self._faults[result.rollout])))
            return
        _ = self._faults.pop(result.rollout, None)
        await self._mind(result, client)

    async def _mind(self, result: AttemptResult, client: Client) -> None:
        """Stop when agents cannot work, and hand back attempts that do not count as tries."""
        found = self._breaker.record(result)
        if self._breaker.tripped is result:
            self.stop()
            self.tally.stopped = self._breaker.explanation()
            self._progress.say(self.tally.stopped)
        for one in found:
            handed = await cancel_on(self._abandoned, hand_back(client, one, self._progress.report_away))
            if handed:
                self.tally.hand_back(one)
                self._progress.on_hand_back(self.tally)
            else:
                self._progress.say(f"{one.name} could not be handed back: it counts as failed")


@contextmanager
def signal_handlers(runner: Runner, progress: LineProgress) -> Generator[None]:
    """Pass signals on to the runner inside the `with` block: the first lets agents finish, the second kills them."""
    loop, asked = asyncio.get_running_loop(), False

    def heed() -> None:
        nonlocal asked
        if asked:
            progress.say("killing the agents and giving their attempts back")
            runner.abandon()
        else:
            progress.say("taking no more work; once more kills the agents that run")
            runner.stop()
        asked = True

    for number in SIGNALS:
        loop.add_signal_handler(number, heed)
    try:
        yield
    finally:
        for number in SIGNALS:
            _ = loop.remove_signal_handler(number)


# Decides when a runner stops by itself: agents that cannot work on this machine would fail every task of the queue.
#
# A failure says nothing about its task when it came at once, before any model call, and other tasks have failed in
# the very same way with no success between. After `EQUAL` of them the breaker trips. The runner then takes no more
# work and hands back those attempts, and others that still fail in this way; they do not count as tries. Pure: the
# runner carries out the decisions.
#
# Two failures are equal when they have the same exit code or signal and the same last line on stderr, numbers in that
# line aside. Each rollout counts once, however often it is tried again, because its task may be at fault.

EQUAL = 5
"""Tasks that must fail alike. Fewer may do so by chance, because an agent refuses some tasks in one way; more would
cost more time and money before the user hears of it.
"""
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|[0-9]+")
"""Parts that differ between equal messages: times, ports, process ids, addresses, ids of containers."""


class FailureBreaker:
    """Judges the results of one runner, of all its workers."""

    def __init__(self, keep_going: bool = False) -> None:
        """With `keep_going` it never trips."""
        self.tripped: AttemptResult | None = None
        """The failure that tripped it; None until then."""
        self._keep_going = keep_going
        self._alike: defaultdict[str, list[AttemptResult]] = defaultdict(list)

    def record(self, result: AttemptResult) -> list[AttemptResult]:
        """Record a result; return the attempts to hand back now."""
        if self.tripped is None and (result.end == "succeeded" or result.calls):
            self._alike.clear()
        if not result.at_once or self._keep_going:
            return []
        kind = signature(result)
        if self.tripped is not None:
            return [result] if kind == signature(self.tripped) else []
        self._alike[kind].append(result)
        if len({each.rollout for each in self._alike[kind]}) < EQUAL:
            return []
        self.tripped = result
        return self._alike.pop(kind)

    def explanation(self) -> str:
        """A message for the user: what happened and what to do."""
        assert self.tripped is not None
        said = "\n".join(f"  {line}" for line in self.tripped.last_lines)
        return (
            f"{EQUAL} tasks failed in the same way, at once and before any model call: {self.tripped.reason}\n"
            + (f"the last lines of {self.tripped.name}:\n{said}\n" if said else "")
            + "no more work is taken; these attempts are handed back and do not count. Repair what the agents need and "
            "start again; --keep-going goes on in spite of it"
        )


def signature(result: AttemptResult) -> str:
    """A text that is the same for equal failures."""
    outcome = result.outcome
    how = (None, None) if outcome is None else (outcome.exit_code, outcome.signal)
    return f"{how}: {NUMBERS.sub('#', result.reason or '')}"


# The heartbeat of a runner: it keeps its leases, reports what its agents use, and learns which attempts it has lost.
#
# A beat goes out every third of the lease, and soon after an agent was started, so that its rollout is shown as
# running. A beat without an answer is not repeated: the next one comes in time, and each attempt watches its own
# lease.

SHORTEST_S = 0.5
"""The shortest time between two beats, however many agents are started; s."""
RETURNED_LEASE_S = 1.0
"""The shortest possible lease, so that a returned attempt is soon handed out again; s."""


class HeartbeatSender:
    """Sends the heartbeats for all attempts of a runner."""

    def __init__(self, client: Client, settings: RunnerSettings, progress: LineProgress, hooks: Hooks) -> None:
        self._hooks = hooks
        self._client, self._settings, self._progress = client, settings, progress
        self._held: dict[tuple[str, str], AttemptRun] = {}
        self._meter = Meter()
        self._nudged = asyncio.Event()
        self.queue: QueueState = "open"
        """The state of the queue in the gateway's last answer."""

    def add(self, work: AttemptRun) -> None:
        """Keep the lease of an attempt from now on."""
        self._held[work.key] = work
        self._nudged.set()

    def drop(self, work: AttemptRun) -> None:
        """Stop keeping the lease of an attempt that has ended."""
        _ = self._held.pop(work.key, None)

    async def run(self) -> None:
        """Send a heartbeat every third of the lease, and soon after each nudge, until cancelled."""
        interval = self._settings.lease_s / 3
        while True:
            try:
                await self.beat(interval)
            except Exception as e:
                # If beating ended here, every lease would be lost.
                self._progress.say(f"a heartbeat failed: {type(e).__name__}: {e}")
            await asyncio.sleep(min(SHORTEST_S, interval))
            try:
                async with asyncio.timeout(max(0.0, interval - SHORTEST_S)):
                    _ = await self._nudged.wait()
            except TimeoutError:
                pass

    async def beat(self, patience_s: float) -> None:
        """Report that the runner is alive and learn which attempts it still holds; do nothing when the gateway does not
        answer.
        """
        self._nudged.clear()
        works = list(self._held.values())
        asked = await self._request(works, self._settings.lease_s)
        sent = time.monotonic()
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._client.heartbeat(self._settings.name, asked)
        except (ClientError, TimeoutError):
            return
        self.queue = answer.queue
        left = self._settings.lease_s - (time.monotonic() - sent)
        for work, said in zip(works, answer.attempts, strict=True):
            if said.held:
                work.renew(left)
            elif said.status == "timeout":
                work.time_out("it took longer than its rollout allows")
            else:
                cancelled = said.status == "cancelled"
                work.lose(f"the attempt is {said.status or 'unknown'} at the gateway", wants_events=cancelled)

    async def give_back(self, work: AttemptRun) -> None:
        """Return an attempt whose agent is dead: shorten its lease. If that fails, the lease runs out by itself."""
        held = [HeldAttempt(rollout=work.key[0], attempt=work.key[1])]
        await self._say(HeartbeatRequest(attempts=held, lease_s=RETURNED_LEASE_S, complete=False))

    async def say_goodbye(self) -> None:
        """Report that this worker runs nothing any more, so that its old work is not shown."""
        await self._say(HeartbeatRequest())

    async def _say(self, asked: HeartbeatRequest) -> None:
        """Send one beat. If the gateway does not get it, the leases run out by themselves."""
        with suppress(ClientError, TimeoutError):
            async with asyncio.timeout(self._settings.lease_s / 3):
                _ = await self._client.heartbeat(self._settings.name, asked)

    async def _request(self, works: list[AttemptRun], lease_s: float) -> HeartbeatRequest:
        agents = [work.agent for work in works if work.agent is not None]
        figures = await self._meter.read([agent.pid for agent in agents if agent.pid is not None])
        if own := await self._hooks.figures():
            figures.own = own
        held = [HeldAttempt(rollout=work.key[0], attempt=work.key[1], running=work.agent is not None) for work in works]
        return HeartbeatRequest(attempts=held, lease_s=lease_s, figures=figures)


# The resources that a runner's agents use: CPU and memory from /proc, GPUs from `nvidia-smi`, where there are any.

SMI = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
SMI_S = 5.0
KILLED_S = 1.0
"""Time that the end of a killed one may take; s."""


class Meter:
    """Measures process trees between one reading and the next."""

    def __init__(self) -> None:
        self._smi = shutil.which("nvidia-smi")
        self._late: asyncio.subprocess.Process | None = None
        self._ticks: dict[int, int] = {}
        self._at = time.monotonic()

    async def read(self, roots: Iterable[int]) -> WorkerUsage:
        """The figures since the last reading of the trees below `roots`; None for each that cannot be measured here."""
        cpu, memory = self._processes(list(roots))
        busy, used = await self._gpus()
        return WorkerUsage(cpu_percent=cpu, memory_bytes=memory, gpu_percent=busy, gpu_memory_bytes=used)

    def _processes(self, roots: list[int]) -> tuple[float | None, int | None]:
        rows = process_table()
        if not rows:
            return None, None
        trees = {root: [root, *descendants(root, rows)] for root in roots if root in rows}
        ticks = {root: sum(rows[pid].ticks for pid in tree) for root, tree in trees.items()}
        spent = sum(max(0, now - self._ticks.get(root, 0)) for root, now in ticks.items())
        before, self._at, self._ticks = self._at, time.monotonic(), ticks
        seconds = spent / os.sysconf("SC_CLK_TCK")
        pages = sum(rows[pid].pages for tree in trees.values() for pid in tree)
        return round(100 * seconds / max(self._at - before, 1e-3), 1), pages * os.sysconf("SC_PAGE_SIZE")

    async def _gpus(self) -> tuple[float | None, int | None]:
        if self._smi is None or (self._late is not None and self._late.returncode is None):
            return None, None
        process = await asyncio.create_subprocess_exec(
            *(self._smi, *SMI),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SMI_S):
                return gpus((await process.communicate())[0].decode(errors="replace"))
        except TimeoutError:
            return None, None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Where a driver hangs, nvidia-smi cannot be killed. It is not waited for, and no second one is started.
                self._late = process
                with suppress(TimeoutError):
                    _ = await asyncio.wait_for(process.wait(), KILLED_S)


def gpus(text: str) -> tuple[float | None, int | None]:
    """(utilization of the busiest GPU in percent, memory in use on all in bytes), from the output of nvidia-smi (`97,
    1024` for each GPU).
    """
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    busy = [float(row[0]) for row in rows if row[0].strip().isdigit()]
    used = [int(row[1]) << 20 for row in rows if row[1].strip().isdigit()]
    return max(busy, default=None), sum(used) if used else None
