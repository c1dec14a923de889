"""python -m bench.tui [--rollouts N] [--seconds S]: how fast the TUI is, what it costs, and does it grow?

A real gateway holds N queued rollouts; the real program runs in a pseudo-terminal of 160 by 48. Measured are

    start      from exec to the first list on the screen
    key        from writing a key to the first byte that is drawn for it
    page       the same for a page of scrolling
    changes    CPU and memory while the tape changes 500 times a second, and the growth of memory
    far        bytes a second over a relay that adds 150 ms each way, while it does

Each figure stands beside its goal. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from statistics import linear_regression, quantiles
from typing import Final

from bench import procfs
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, Event, RolloutSpec
from penstock.gateway.model.settings import ADMIN_KEY

LINES, COLUMNS = 48, 160
BATCH: Final = 1000
STARTS: Final = 5
KEYS: Final = 150
PAGES: Final = 40
CHANGES: Final = 500
"""Changes of the tape a second."""
PATIENCE: Final = 60.0
KEY: Final = "bench"
"""The gateway's key: without one it answers to local names only."""
DELAY_S: Final = 0.15
"""Delay of the relay in seconds, each way."""


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, url: str, folder: Path) -> None:
        self._own, other = os.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        own = {
            "HOME": str(folder),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
            ADMIN_KEY: KEY,
        }
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "tui", "rollouts", "--gateway", url],
            stdin=other, stdout=other, stderr=other, env=own | {"PYTHONPYCACHEPREFIX": str(folder)},
            start_new_session=True,
        )  # fmt: skip
        os.close(other)

    def until(self, wanted: bytes) -> float:
        """Wait until it has drawn `wanted`; return the seconds since its start."""
        seen, end = b"", time.perf_counter() + PATIENCE
        while wanted not in seen:
            if time.perf_counter() > end:
                raise SystemExit(f"the TUI has not drawn {wanted!r} in {PATIENCE:.0f} s: {seen[-300:]!r}")
            seen += self._read(0.5)
        return time.perf_counter() - self.began

    def press(self, key: bytes) -> float:
        """Press a key; return the seconds until something is drawn. Reads until nothing more comes."""
        self.quiet()
        began = time.perf_counter()
        os.write(self._own, key)
        while not self._read(1.0):
            if time.perf_counter() - began > 5:
                raise SystemExit(f"nothing was drawn for {key!r}")
        return time.perf_counter() - began

    def quiet(self) -> None:
        """Read until nothing comes for a moment."""
        while self._read(0.03):
            pass

    def _read(self, seconds: float) -> bytes:
        ready, _, _ = select.select([self._own], [], [], seconds)
        try:
            return os.read(self._own, 1 << 16) if ready else b""
        except OSError:
            return b""

    def close(self) -> None:
        self.process.terminate()
        while self.process.poll() is None:
            self._read(0.1)
        os.close(self._own)


@contextmanager
def gateway(folder: Path) -> Generator[str]:
    """Run a gateway process; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--data", folder / "data", "--port", "0"],
        stdout=subprocess.PIPE,
        env=os.environ | {ADMIN_KEY: KEY},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().split()[-1]
    finally:
        process.terminate()
        process.communicate()


async def fill(url: str, rollouts: int) -> None:
    """Queue so many tasks."""
    async with Client(url, KEY) as client:
        for first in range(0, rollouts, BATCH):
            names = range(first, min(first + BATCH, rollouts))
            await client.enqueue([RolloutSpec(id=f"task-{n:06}", input={"n": n}, group=f"g{n // 8}") for n in names])


async def change(url: str, seconds: float) -> int:
    """Change the tape for some seconds; return the number of changes."""
    made, end = 0, time.monotonic() + seconds
    async with Client(url, KEY) as client:
        claims = (await client.claim(ClaimRequest(worker="bench", limit=50, lease_s=3600))).claims
        turn = 0
        while (now := time.monotonic()) < end:
            claim = claims[turn % len(claims)]
            events = [Event(name="note", attributes={"n": n}) for n in range(CHANGES // 10)]
            await client.add_events(claim.rollout.id, claim.attempt.id, events)
            made, turn = made + len(events), turn + 1
            await asyncio.sleep(max(0.0, now + 0.1 - time.monotonic()))
    return made


def p(values: list[float], part: int) -> float:
    """Return a percentile in ms."""
    return quantiles(values, n=100)[part - 1] * 1e3


def said(name: str, value: str, goal: str) -> None:
    """Print a line of the report."""
    print(f"{name:44}{value:>28}   {goal}", flush=True)


def measure_start(url: str, folder: Path, newest: bytes) -> None:
    """Measure the start. The first one compiles the modules, as an installation does, and does not count."""
    times: list[float] = []
    for _ in range(STARTS + 1):
        with closing(Terminal(url, folder)) as terminal:
            times.append(terminal.until(newest))
    best = sorted(times[1:])
    said("start, to the first list", f"{best[len(best) // 2]:.2f} s (least {best[0]:.2f})", "0.6 s")


def measure_keys(url: str, folder: Path, newest: bytes) -> None:
    """Measure keys and pages on a tape that does not change."""
    with closing(Terminal(url, folder)) as terminal:
        terminal.until(newest)
        keys = [terminal.press(b"j" if at % 20 < 15 else b"k") for at in range(KEYS)]
        pages = [terminal.press(b"\x1b[6~" if at % 10 < 8 else b"\x1b[5~") for at in range(PAGES)]
    said("key to paint, p50 / p95", f"{p(keys, 50):.1f} / {p(keys, 95):.1f} ms", "p95 33 ms")
    said("page of scrolling, p50 / p95", f"{p(pages, 50):.1f} / {p(pages, 95):.1f} ms", "50 ms")


async def watched(terminal: Terminal, seconds: float) -> list[tuple[float, float]]:
    """Return (s, MB of memory) while the terminal is drawn; its output is read and dropped."""
    samples: list[tuple[float, float]] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        await asyncio.to_thread(terminal.quiet)
        samples.append((time.monotonic() - began, procfs.memory(terminal.process.pid).anonymous))
        await asyncio.sleep(0.2)
    return samples


async def measure_changes(url: str, folder: Path, newest: bytes, seconds: float) -> None:
    """Measure CPU and memory under load."""
    with closing(Terminal(url, folder)) as terminal:
        terminal.until(newest)
        used, began = procfs.cpu_seconds(terminal.process.pid), time.monotonic()
        samples, made = await asyncio.gather(watched(terminal, seconds), change(url, seconds))
        took = time.monotonic() - began
        share = (procfs.cpu_seconds(terminal.process.pid) - used) / took
        memory = procfs.memory(terminal.process.pid).total
    half = samples[len(samples) // 2 :]
    slope = linear_regression([at for at, _ in half], [mb for _, mb in half]).slope * 60
    said(f"CPU at {made / took:,.0f} changes a second", f"{share:.1%} of a core", "25 %")
    said("memory", f"{memory:.0f} MB", "120 MB")
    said("growth in the second half", f"{slope:+.2f} MB a minute", "0")


@asynccontextmanager
async def relay(url: str, counts: list[int]) -> AsyncGenerator[str]:
    """Yield an address that is far away: every piece arrives later. `counts`: bytes of answers."""
    port = int(url.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool) -> None:
        loop = asyncio.get_running_loop()
        while piece := await reader.read(1 << 16):
            if counted:
                counts.append(len(piece))
            loop.call_later(DELAY_S, writer.write, piece)
        loop.call_later(DELAY_S, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        # The cancellation at the end is no error.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(pump(reader, back, False), pump(there, writer, True), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        # Another name of this machine's loopback, which the TUI takes for another machine.
        yield f"http://0.0.0.0:{server.sockets[0].getsockname()[1]}"


async def measure_far(url: str, folder: Path, newest: bytes, seconds: float) -> None:
    """Measure bytes over a slow link."""
    counts: list[int] = []
    async with relay(url, counts) as far:
        terminal = await asyncio.to_thread(Terminal, far, folder)
        with closing(terminal):
            first = await asyncio.to_thread(terminal.until, newest)
            await asyncio.sleep(2)
            begun = sum(counts)
            await asyncio.gather(watched(terminal, seconds), change(url, seconds))
            keys = [await asyncio.to_thread(terminal.press, b"j") for _ in range(30)]
    said("300 ms away: start", f"{first:.2f} s, {begun / 1024:.0f} KiB", "")
    said("300 ms away: answers while it changes", f"{(sum(counts) - begun) / 1024 / seconds:.1f} KiB/s", "10 KiB/s")
    said("300 ms away: key to paint, p95", f"{p(keys, 95):.1f} ms", "33 ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tui")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    newest = f"task-{asked.rollouts - 1:06}".encode()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-tui-") as home, gateway(Path(home)) as url:
        asyncio.run(fill(url, asked.rollouts))
        print(f"{asked.rollouts:,} rollouts; a terminal of {COLUMNS} by {LINES}\n")
        folder = Path(home)
        measure_start(url, folder, newest)
        measure_keys(url, folder, newest)
        asyncio.run(measure_changes(url, folder, newest, asked.seconds))
        asyncio.run(measure_far(url, folder, newest, asked.seconds))


if __name__ == "__main__":
    main()
