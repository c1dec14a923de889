"""The resources that a runner's agents use: CPU and memory from /proc, GPUs from `nvidia-smi`, where there are any."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from penstock.gateway.model.rollout import WorkerUsage
from penstock.sidecar.run.agent.supervisor import descendants, process_table

SMI = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
SMI_S = 5.0


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
                text = (await process.communicate())[0].decode(errors="replace")
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Where a driver hangs, nvidia-smi cannot be killed. It is not waited for, and no second one is started.
            self._late = process
            return None, None
        return gpus(text)


def gpus(text: str) -> tuple[float | None, int | None]:
    """(utilization of the busiest GPU in percent, memory in use on all in bytes), from the output of nvidia-smi (`97,
    1024` for each GPU).
    """
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    busy = [float(row[0]) for row in rows if row[0].strip().isdigit()]
    used = [int(row[1]) << 20 for row in rows if row[1].strip().isdigit()]
    return max(busy, default=None), sum(used) if used else None
