"""The gateway of a history: one process, or two while one hands over to the next; and whoever starts it again.

All are processes of `penstock serve`. Whoever is killed, the others are known: children by the kernel's list, those
whose parent has died because they were seen before.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from itertools import chain
from pathlib import Path

import aiohttp
from fakes.gateway_workers import workers
from fakes.process import PATIENCE, Gateway, alive, children, command, limit_files
from fakes.waiting import until

RETRY_S = 0.05
TAKEN, BUSY = "another process has taken over", "another process is taking over already"
ASK = aiohttp.ClientTimeout(total=2)


class Served:
    """The processes."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.started = 0
        """How often it had to be started because no process was left."""
        self._known: list[int] = []

    @property
    def alive(self) -> list[int]:
        """Ids of the processes, oldest first."""
        assert self.gateway.process is not None
        for pid in [self.gateway.process.pid, *self._known]:
            self._known += [one for one in [pid, *children(pid)] if one not in self._known and not _is_hosted(one)]
        self._known = [pid for pid in self._known if alive(pid) and not _is_hosted(pid)]
        return list(self._known)

    async def start(self) -> None:
        """On the same port and the same tape; there must be none."""
        self.started += 1
        assert self.gateway.process is not None
        _ = await self.gateway.process.communicate()
        await self.gateway.start(self.gateway.port)

    def send(self, number: signal.Signals) -> None:
        """A signal to all of them."""
        for pid in self.alive:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        """All at once, as when the machine loses power."""
        self.send(signal.SIGKILL)
        await until(self._is_gone)

    def _is_gone(self) -> bool:
        self.send(signal.SIGKILL)  # what one of them has started in its last moment
        return not self.alive

    @property
    def workers(self) -> dict[int, int]:
        """Those of a gateway that has several, by their numbers."""
        return dict(chain.from_iterable(workers(pid).items() for pid in self.alive))

    async def has_workers_again(self, killed: int) -> None:
        """Returns once another one has taken the place of one that was killed."""
        count = len(self.workers)

        def are_there() -> bool:
            found = self.workers
            return killed not in found.values() and len(found) >= count

        try:
            await until(are_there)
        except AssertionError:
            found = {pid: (_parent(pid), list(children(pid))) for pid in self.alive}
            said = f"worker {killed} is missed, {count} were there; there are {self.workers}, and by parent: {found}"
            raise AssertionError(f"{said}\n{self.gateway.log}") from None

    async def stop(self) -> None:
        """All end as they are asked to. A parent passes that on."""
        alive = self.alive
        for pid in alive:
            if _parent(pid) not in alive:
                os.kill(pid, signal.SIGTERM)

        await until(lambda: not self.alive)
        assert self.gateway.process is not None
        _ = await self.gateway.process.communicate()

    async def reload(self) -> tuple[int, int | None]:
        """SIGHUP: the process that serves, not those that serve for it, and the one that is to take over, as soon as
        that is there; None where one that was started before is about to."""
        before, busy = self.alive, self.gateway.log.count(BUSY)
        old = [pid for pid in before if pid not in self.workers.values()][-1]
        os.kill(before[0], signal.SIGHUP)

        await until(lambda: len(set(self.alive) - set(before)) > 0 or self.gateway.log.count(BUSY) > busy)
        return old, next((pid for pid in self.alive if pid not in before), None)

    async def strike(self, pid: int) -> None:
        """Kills one, and returns when those that have served for it have ended."""
        left = list(workers(pid).values())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

        await until(lambda: not any(map(alive, left)))

    async def hand_over(self) -> bool:
        """SIGHUP, with nobody in its way: whether the next process has taken over, as the old one says."""
        before = self.gateway.log.count(TAKEN)
        _ = await self.reload()

        try:
            await until(lambda: self.gateway.log.count(TAKEN) > before)
        except AssertionError:
            return False
        return True

    async def back(self) -> None:
        """Until it serves; where no process is left, one is started."""
        try:
            await self._back()
        except TimeoutError:
            said = f"the gateway does not come back, and {len(self.alive)} processes run"
            raise AssertionError(f"{said}\n{self.gateway.log}") from None

    async def _back(self) -> None:
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(timeout=ASK) as http:
            while True:
                if not self.alive:
                    await self.start()
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(self.gateway.url + "/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(RETRY_S)

    def limit(self, most: int | None) -> None:
        """No file of theirs may become larger: a disk that is full. None: there is room again."""
        for pid in self.alive:
            limit_files(pid, most)

    @property
    def size(self) -> int:
        """Bytes of the tape's file."""
        return (self.gateway.data / "tape" / "data.mdb").stat().st_size


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_hosted(pid: int) -> bool:
    """Whether it is a server of tools, or who watches over one: whatever becomes of the gateway is theirs to notice."""
    return b"hosted_tools.py" in command(pid)
