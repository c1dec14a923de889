"""What goes wrong, and when: a script that follows from the seed. Each fault is healed before the next one begins.

The seed gives the faults, their order and how long they last; what they meet is the machine's.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from e2e.chaos.provider import Provider
from e2e.histories.clock import Clock
from e2e.histories.history import History, Operation
from e2e.histories.served import Served
from e2e.histories.tool_server import ToolServer
from e2e.histories.weights import Weights
from fakes.disks import Disk

JUMP_S = 60


@dataclass(slots=True)
class Nemesis:
    """Does it."""

    history: History
    served: Served
    provider: Provider
    tools: ToolServer
    weights: Weights
    clock: Clock | None
    disk: Disk | None
    """The tape's."""
    chance: random.Random
    stop_s: float
    """How long everything stands still: longer than a lease."""

    def possible(self, faults: Iterable[str], processes: int) -> tuple[str, ...]:
        """Those of the faults that can be here, with so many processes of a gateway."""
        left = CLOCK if self.clock is None else frozenset[str]()
        left |= SPACE if self.disk is None else frozenset[str]()
        left |= OF_WORKERS if processes == 1 else frozenset[str]()
        return tuple(fault for fault in faults if fault not in left)

    async def run(self, faults: tuple[str, ...], seconds: float, pause_s: tuple[float, float]) -> None:
        """Each of these once, in any order, and so on until the time is over, but each at least once."""
        until, left = monotonic() + seconds, self.chance.sample(faults, len(faults))
        while left or monotonic() < until:
            left = left or self.chance.sample(faults, len(faults))
            await asyncio.sleep(self.chance.uniform(*pause_s))
            with self.history.doing("fault", "nemesis", what=left[-1]) as fault:
                await FAULTS[left.pop()](self, fault)
                await self.served.back()

    async def _kill(self, fault: Operation) -> None:
        await self.served.kill()

    async def _stop(self, fault: Operation) -> None:
        self.served.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.stop_s)
        finally:
            self.served.send(signal.SIGCONT)

    async def _kill_worker(self, fault: Operation) -> None:
        worker = self._some_worker(fault)
        if worker is not None:
            os.kill(worker, signal.SIGKILL)
            await self.served.has_workers_again(worker)

    async def _stop_worker(self, fault: Operation) -> None:
        worker = self._some_worker(fault)
        if worker is None:
            return
        os.kill(worker, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.stop_s)
        finally:
            os.kill(worker, signal.SIGCONT)

    def _some_worker(self, fault: Operation) -> int | None:
        """Its process; None where they end because their parent was killed."""
        found = self.served.workers
        if not found:
            fault.answer["failed"] = "no worker is there"
            return None
        fault.answer["worker"] = number = self.chance.choice(sorted(found))
        return found[number]

    async def _reload(self, fault: Operation) -> None:
        if not await self.served.hand_over():
            fault.answer["failed"] = "no process took over"

    async def _kill_old(self, fault: Operation) -> None:
        await self._strike((await self.served.reload())[0])

    async def _kill_new(self, fault: Operation) -> None:
        await self._strike((await self.served.reload())[1])

    async def _strike(self, pid: int | None) -> None:
        await asyncio.sleep(self.chance.uniform(0, 2))
        if pid is not None:
            await self.served.strike(pid)

    async def _full(self, fault: Operation) -> None:
        self.served.limit(self.served.size)
        try:
            await asyncio.sleep(self.chance.uniform(1, 3))
        finally:
            self.served.limit(None)

    async def _full_kill(self, fault: Operation) -> None:
        self.served.limit(self.served.size)
        await asyncio.sleep(self.chance.uniform(0.5, 2))
        await self.served.kill()

    async def _full_kill_worker(self, fault: Operation) -> None:
        self.served.limit(self.served.size)
        try:
            await asyncio.sleep(self.chance.uniform(0.5, 1.5))
            worker = self._some_worker(fault)
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(self.chance.uniform(0.5, 1.5))
        finally:
            self.served.limit(None)
        # One that was being started in this moment has what its parent had.
        await self.served.back()
        self.served.limit(None)

    async def _no_space(self, fault: Operation) -> None:
        self._fill()
        try:
            await asyncio.sleep(self.chance.uniform(1, 3))
        finally:
            self._free()

    async def _no_space_kill(self, fault: Operation) -> None:
        self._fill()
        try:
            await asyncio.sleep(self.chance.uniform(0.5, 2))
            await self.served.kill()
        finally:
            self._free()

    def _fill(self) -> None:
        assert self.disk is not None
        self.disk.fill()

    def _free(self) -> None:
        assert self.disk is not None
        self.disk.free()

    async def _jump_kill(self, fault: Operation) -> None:
        self._jump(fault)
        await self.served.kill()

    async def _jump_reload(self, fault: Operation) -> None:
        self._jump(fault)
        await self._reload(fault)

    def _jump(self, fault: Operation) -> None:
        """The machine's clock is set; a gateway looks at it when it starts."""
        assert self.clock is not None
        fault.answer["seconds"] = self.chance.choice((-JUMP_S, 0, JUMP_S))
        self.clock.set(fault.answer["seconds"])

    async def _break_off(self, fault: Operation) -> None:
        self.provider.break_off()
        self.tools.break_off()

    async def _weights_die(self, fault: Operation) -> None:
        self.weights.start_again()


CLOCK: Final = frozenset({"clock, kill", "clock, reload"})
"""Faults that need a clock of ours."""
SPACE: Final = frozenset({"no space", "no space, kill"})
"""Faults that need a disk of ours."""
OF_WORKERS: Final = frozenset({"kill a worker", "stop a worker", "full disk, kill a worker"})
"""Faults of a gateway that has several."""
FAULTS: Final[dict[str, Callable[[Nemesis, Operation], Awaitable[None]]]] = {
    "kill": Nemesis._kill,
    "stop": Nemesis._stop,
    "kill a worker": Nemesis._kill_worker,
    "stop a worker": Nemesis._stop_worker,
    "reload": Nemesis._reload,
    "reload, kill the old one": Nemesis._kill_old,
    "reload, kill the new one": Nemesis._kill_new,
    "full disk": Nemesis._full,
    "full disk, kill": Nemesis._full_kill,
    "full disk, kill a worker": Nemesis._full_kill_worker,
    "no space": Nemesis._no_space,
    "no space, kill": Nemesis._no_space_kill,
    "clock, kill": Nemesis._jump_kill,
    "clock, reload": Nemesis._jump_reload,
    "provider": Nemesis._break_off,
    "weights": Nemesis._weights_die,
}
