"""Measures the queue: `python -m bench.queue`.

One gateway process on one core, and clients on another: plain sockets and prepared bytes, so that the clients cost next
to nothing. A *cycle* is one rollout enqueued, claimed and finished, each in a request of its own unless it says
*batches*: there a hundred are enqueued in one. Latency is that of a claim for which there is work, of one client and of
64 that together keep to 500 cycles a second, as on a machine with room. *Idle* workers wait for work in a long poll and
ask again when it ends. Times are wall times, and others use this machine too: the best of three counts.

Figures are printed beside their targets and written to bench/out/queue.json; a missed target is marked, not hidden.
`--profile DIR` writes profiles of the gateway's threads, `loop.prof` and `recorder.prof`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

import uvloop

from bench import procfs
from bench.programs import Cores, pin
from bench.store import Figure, report

HERE = Path(__file__).parent
OUT = HERE / "out" / "queue.json"
CLIENTS = 64
IDLE = 1000
BATCH = 100
WAIT_S = 55
"""Seconds that a runner's claims wait."""
LOAD = 500
"""Cycles a second during the measurement of latency."""
TRIES = 3
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
_CLAIMED = re.compile(rb'"rollout":\{"id":"([^"]+)".*?"attempt":\{"rollout":"[^"]+","id":"([^"]+)"', re.DOTALL)


class Socket(asyncio.Protocol):
    """A keep-alive connection: one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end + 2)
        assert length is not None, self._received
        if len(self._received) < end + 4 + int(length[1]):
            return
        received, self._received = self._received, b""
        if self._answer is None or self._answer.done():
            return
        if received.startswith(b"HTTP/1.1 200"):
            self._answer.set_result(received[end + 4 :])
        else:
            self._answer.set_exception(RuntimeError(f"{received[:12]!r} {received[end + 4 :]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the gateway closed the connection: {exc}"))

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; return the body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer


def post(path: str, body: bytes) -> bytes:
    """Return a request, ready to be sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def enqueue(names: Sequence[str]) -> bytes:
    """Return a request that enqueues rollouts of a small task."""
    task = b'{"id":"%b","input":{"question":"What is the sum of 17 and 25?"},"group":"sums"}'
    return post("/api/rollouts", b'{"rollouts":[%b]}' % b",".join(task % name.encode() for name in names))


def claim(worker: int, wait_s: float = 5) -> bytes:
    """Return a request that claims one attempt."""
    return post("/api/claims", b'{"worker":"w-%d","wait_s":%g}' % (worker, wait_s))


FINISH = (
    b'{"status":"succeeded","outcome":{"exit_code":0,"duration_ns":1000000},'
    b'"rewards":[{"value":1.0,"source":"runner"}]}'
)


@dataclass(frozen=True, slots=True)
class Bench:
    """Process id and port of a running gateway."""

    pid: int
    port: int

    async def sockets(self, number: int) -> list[Socket]:
        """Return new connections to the gateway."""
        loop = asyncio.get_running_loop()
        return [(await loop.create_connection(Socket, "127.0.0.1", self.port))[1] for _ in range(number)]


async def do(socket: Socket, worker: int) -> float:
    """Claim an attempt and finish it; return the seconds of the claim."""
    began = time.perf_counter()
    answer = await socket.ask(claim(worker))
    took = time.perf_counter() - began
    found = _CLAIMED.search(answer)
    assert found is not None, answer
    await socket.ask(post(f"/api/rollouts/{found[1].decode()}/attempts/{found[2].decode()}/finish", FINISH))
    return took


_numbers = count(1)


def names(number: int) -> list[str]:
    """Return new rollout ids, unique over runs."""
    return [f"bench-{os.getpid():x}-{next(_numbers)}" for _ in range(number)]


async def cycles(bench: Bench, total: int, batch: int) -> tuple[float, float]:
    """Return (cycles a second by 64 clients that do nothing else, CPU of the gateway per cycle in us)."""
    sockets = await bench.sockets(CLIENTS)
    left = iter(range(total // batch))

    async def client(worker: int, socket: Socket) -> None:
        for _ in left:
            await socket.ask(enqueue(names(batch)))
            for _ in range(batch):
                await do(socket, worker)

    cpu, began = procfs.cpu_seconds(bench.pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for worker, socket in enumerate(sockets):
            group.create_task(client(worker, socket))
    took, cpu = time.perf_counter() - began, procfs.cpu_seconds(bench.pid) - cpu
    close(sockets)
    done = (total // batch) * batch
    return done / took, cpu / done * 1e6


async def alone(bench: Bench, total: int) -> list[float]:
    """Return the time of each claim of a single client, in ms."""
    sockets = await bench.sockets(1)
    await sockets[0].ask(enqueue(names(total)))
    took = [await do(sockets[0], 0) for _ in range(total)]
    close(sockets)
    return [seconds * 1000 for seconds in took]


async def at_load(bench: Bench, total: int) -> list[float]:
    """Return the time of each claim of 64 clients that keep to a pace together, in ms."""
    sockets = await bench.sockets(CLIENTS)
    for first in range(0, total, BATCH):
        await sockets[0].ask(enqueue(names(min(BATCH, total - first))))
    took: list[float] = []
    left, began = iter(range(total)), time.perf_counter()

    async def client(worker: int, socket: Socket) -> None:
        for number in left:
            await asyncio.sleep(began + number / LOAD - time.perf_counter())
            took.append(await do(socket, worker) * 1000)

    async with asyncio.TaskGroup() as group:
        for worker, socket in enumerate(sockets):
            group.create_task(client(worker, socket))
    close(sockets)
    return took


async def idle(bench: Bench, seconds: float) -> float:
    """Return the CPU of the gateway while 1,000 workers wait, in % of a core."""
    sockets = await bench.sockets(IDLE)

    async def worker(number: int, socket: Socket) -> None:
        await asyncio.sleep(WAIT_S * number / IDLE)  # they have come one by one
        while True:
            await socket.ask(claim(number, WAIT_S))

    waiting = [asyncio.ensure_future(worker(number, socket)) for number, socket in enumerate(sockets)]
    await asyncio.sleep(WAIT_S + 1)
    before, began = procfs.cpu_seconds(bench.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    used = 100 * (procfs.cpu_seconds(bench.pid) - before) / (time.perf_counter() - began)
    for one in waiting:
        one.cancel()
    _ = await asyncio.gather(*waiting, return_exceptions=True)
    close(sockets)
    return used


def close(sockets: Sequence[Socket]) -> None:
    for socket in sockets:
        socket.transport.abort()


PROFILED = """
import cProfile, sys, time
from pathlib import Path
from penstock.gateway.tape.store import recorder
from penstock.gateway.process.main import run as serve
folder, run = Path(sys.argv[1]), recorder.Recorder._run
folder.mkdir(parents=True, exist_ok=True)
def profiled(self):
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(run, self)
    profile.dump_stats(folder / "recorder.prof")
recorder.Recorder._run = profiled
profile = cProfile.Profile(time.thread_time)
try:
    config, data = (Path(word) if word else None for word in sys.argv[2:4])
    profile.runcall(serve, config, data, None, 0)
finally:
    profile.dump_stats(folder / "loop.prof")
"""
"""A gateway with a profiler: `-c PROFILED DIRECTORY CONFIG DATA`, of which one of the last two is empty."""


@contextmanager
def gateway(profile: Path | None) -> Generator[Bench]:
    """Run a gateway with a tape of its own, on a core of its own."""
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "penstock", "serve", "--port", "0", "--data", folder]
        command = [sys.executable, *(serve if profile is None else ["-c", PROFILED, str(profile), "", folder])]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=HERE.parent,
                env=os.environ | {"PYTHONPATH": str(HERE.parent)},
                preexec_fn=pin(Cores.choose().gateway),
            )
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            assert line.startswith("penstock listening on"), (Path(folder) / "log").read_text()
            yield Bench(process.pid, int(line.rpartition(":")[2]))
        finally:
            process.terminate()
            _ = process.communicate()


def figures(bench: Bench, total: int, idle_s: float, tries: int) -> Iterator[Figure]:
    """Yield all figures, as they are measured."""
    for name, batch in ((f"in batches of {BATCH}", BATCH), ("singly", 1)):
        number = max(total, CLIENTS * batch)
        found = [uvloop.run(cycles(bench, number, batch)) for _ in range(tries)]
        speed, cpu = max(found)[0], min(cpu for _, cpu in found)
        yield Figure(f"{CLIENTS} clients, enqueued {name}", speed, "cycles/s", at_least=2000)
        yield Figure(f"{CLIENTS} clients, enqueued {name}: CPU", cpu, "us/cycle")
    for name, taken in (
        ("a claim, one client", uvloop.run(alone(bench, total // 4))),
        (f"a claim, {CLIENTS} clients at {LOAD} cycles/s", uvloop.run(at_load(bench, total // 2))),
    ):
        yield Figure(f"{name}: p50", statistics.median(taken), "ms", at_most=5)
        yield Figure(f"{name}: p99", statistics.quantiles(taken, n=100)[98], "ms")
    if idle_s:
        yield Figure(f"{IDLE} idle workers", uvloop.run(idle(bench, idle_s)), "% of a core", at_most=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the queue costs.")
    parser.add_argument("--cycles", type=int, default=8000, help="in each measurement")
    parser.add_argument("--idle-seconds", type=float, default=WAIT_S, help="0 leaves the idle workers out")
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--profile", type=Path, help="where profiles go")
    given = parser.parse_args()
    os.sched_setaffinity(0, {Cores.choose().load})
    with gateway(given.profile) as bench:
        report(figures(bench, given.cycles, given.idle_seconds, given.tries), OUT)


if __name__ == "__main__":
    main()
