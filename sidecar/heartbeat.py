"""The heartbeat of a runner: it keeps its leases, reports what its agents use, and learns which attempts it has lost.

A beat goes out every third of the lease, and soon after an agent was started, so that its rollout is shown as running.
A beat without an answer is not repeated: the next one comes in time, and each attempt watches its own lease.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import HeartbeatRequest, HeldAttempt, QueueState
from penstock.sidecar.agent.usage import Meter
from penstock.sidecar.attempt import AttemptRun
from penstock.sidecar.progress import LineProgress
from penstock.sidecar.settings import RunnerSettings

SHORTEST_S = 0.5
"""The shortest time between two beats, however many agents are started; s."""
RETURNED_LEASE_S = 1.0
"""The shortest possible lease, so that a returned attempt is soon handed out again; s."""


class HeartbeatSender:
    """Sends the heartbeats for all attempts of a runner."""

    def __init__(self, client: Client, settings: RunnerSettings, progress: LineProgress) -> None:
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
        """Send heartbeats until cancelled."""
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
        held = [HeldAttempt(rollout=work.key[0], attempt=work.key[1], running=work.agent is not None) for work in works]
        return HeartbeatRequest(attempts=held, lease_s=lease_s, figures=figures)
