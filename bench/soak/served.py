"""The gateway of a soak: one process, or two during a handover, or workers with their parent; on one core, port and
tape."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from time import monotonic

from bench import procfs
from bench.soak.account import Kill

ROOT = Path(__file__).parents[2]
# As in every bench there is no index: it is another process, with figures of its own. Rollouts end after a quiet time,
# in production after half an hour.
CONFIG = """\
port = {port}
quiet_seconds = 60.0

[index]
when = "never"

[[upstream]]
name = "main"
base_url = "http://127.0.0.1:{provider}/v1"
dialect = "openai"

[[upstream]]
name = "anthropic"
base_url = "http://127.0.0.1:{provider}"
dialect = "anthropic"

[[upstream]]
name = "shaky"
base_url = "http://127.0.0.1:{provider}/shaky/v1"
dialect = "openai"

[[route]]
model = "soak-failover"
upstream = ["shaky", "main"]

[[route]]
model = "soak-messages*"
upstream = "anthropic"

[[route]]
model = "*"
upstream = "main"

[mcp.servers.echo]
url = "http://127.0.0.1:{provider}/mcp"
"""
PATIENCE_S = 60.0


def steady_port() -> int:
    """Return a port that the system never assigns by itself, so that it is free again after a kill."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = SystemRandom().randrange(10_000, lowest)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


class Served:
    """Starts, kills and reloads the gateway."""

    def __init__(self, home: Path, provider: int, core: int, workers: int = 1) -> None:
        self.port = steady_port()
        self.data, self.core, self._workers = home / "data", core, workers
        self._config, self._log = home / "penstock.toml", home / "log"
        self._config.write_text(CONFIG.format(port=self.port, provider=provider))
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Id of the first process, which stays the parent of all later ones."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start it; return when it serves."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", "serve", "--config", self._config, "--data", self.data),
                *(("--workers", str(self._workers)) if self._workers > 1 else ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
            )
        os.sched_setaffinity(self.pid, {self.core})
        await self._address()

    async def _address(self) -> None:
        """Wait for the line that a process prints when it serves. Raises RuntimeError for another one."""
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self.process.stdout.readline()
        if not line.startswith(b"penstock listening on "):
            raise RuntimeError(f"the gateway does not serve: {self.log_end()}")

    def log_end(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-1000:]

    async def reload(self) -> None:
        """Send SIGHUP; return when the next process serves."""
        os.kill(self.pid, signal.SIGHUP)
        await self._address()

    async def kill(self) -> Kill:
        """Kill all its processes at once; return when they are gone."""
        assert self.process is not None
        begin, pids = monotonic(), procfs.tree(self.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.communicate()
        async with asyncio.timeout(PATIENCE_S):
            while any(map(_runs, pids)):  # noqa: ASYNC110 - some may have lost their parent, whom alone the kernel tells
                await asyncio.sleep(0.01)
        return Kill(begin, monotonic())

    async def kill_worker(self, chance: random.Random) -> Kill:
        """Kill one of several workers; return when another one is there."""
        workers = await self._when(lambda workers: len(workers) == self._workers)
        begin = monotonic()
        os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
        await self._when(lambda now: bool(now - workers))
        return Kill(begin, monotonic())

    async def _when(self, right: Callable[[set[int]], bool]) -> set[int]:
        """Return the workers as soon as `right` is true; after a reload those of the process before are there for a
        while."""
        async with asyncio.timeout(PATIENCE_S):
            while not right(now := self._leaves()):  # noqa: ASYNC110 - only /proc tells
                await asyncio.sleep(0.01)
        return now

    def _leaves(self) -> set[int]:
        return {pid for pid in procfs.tree(self.pid) if not procfs.children(pid)}

    async def stop(self) -> None:
        """Terminate it; calls under way may end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await self.process.communicate()

    async def wait(self, seconds: float) -> None:
        """Wait after a failed connection; raises RuntimeError when it has ended though nobody killed it."""
        assert self.process is not None
        returncode = self.process.returncode
        if returncode is not None and returncode != -signal.SIGKILL:
            raise RuntimeError(f"the gateway has ended with {returncode}: {self.log_end()}")
        await asyncio.sleep(seconds)

    def cpu(self) -> float:
        """Return the CPU seconds so far of the processes that run now."""
        return procfs.cpu_seconds(self.pid)

    def memory(self) -> procfs.Memory:
        """Return the memory of the processes that run now."""
        return procfs.memory(self.pid)

    def stored_mb(self) -> float:
        """Return the MB that it has written to disk."""
        return sum(path.stat().st_blocks * 512 for path in self.data.rglob("*") if path.is_file()) / 1e6


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
