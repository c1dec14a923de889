"""The programs of a run: the mock and the load generator in C, and the gateways, each on its core."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench import procfs
from bench.peers import BUILD, HERE, Peer, Start, environment

NATIVE = HERE / "native"
READY_SECONDS = 90
LOOK_SECONDS = 0.005
"""Seconds between two looks at a peer that is starting."""


@dataclass(frozen=True)
class Cores:
    """The cores of gateways, and of mock and load generator; the same if there is only one."""

    gateway: int
    load: int

    @classmethod
    def choose(cls) -> Cores:
        """Return the first and last core that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1])


def pin(core: int) -> partial[None]:
    """Return a `preexec_fn` that keeps the child on this core."""
    return partial(os.sched_setaffinity, 0, {core})


def build() -> None:
    """Compile mock and load with the system's C compiler, unless they are newer than their sources."""
    BUILD.mkdir(exist_ok=True)
    for name in ("mock", "load"):
        sources, target = [NATIVE / f"{name}.c", NATIVE / "wire.h"], BUILD / name
        newest = max(source.stat().st_mtime for source in sources)
        if not target.exists() or target.stat().st_mtime < newest:
            subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", target, sources[0]], check=True)


@dataclass(frozen=True)
class Mock:
    """Process id and port of the running mock upstream."""

    pid: int
    port: int


@contextmanager
def mock(scripts: Path, cores: Cores) -> Generator[Mock]:
    """Run the mock upstream for the context."""
    command = [str(BUILD / "mock"), str(scripts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pin(cores.load)) as process:
        assert process.stdout
        try:
            yield Mock(process.pid, int(process.stdout.readline()))
        finally:
            process.kill()


def answered(mock_port: int) -> int:
    """Return the number of calls that the mock has answered in full."""
    return int(json.loads(fetch(mock_port, "/"))["answered"])


def load(port: int, core: int, arguments: list[str]) -> dict[str, Any]:
    """Run the load generator against a port and return its result."""
    command = [str(BUILD / "load"), "--port", str(port), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=pin(core))
    return json.loads(done.stdout)


def fetch(port: int, path: str) -> str:
    """Return the answer to a GET over loopback; raises OSError when it fails or the status is not 2xx."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return response.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Gateway:
    """A peer's process, with its scratch directory."""

    def __init__(self, peer: Peer, upstream: int, cores: Cores) -> None:
        self.peer = peer
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=BUILD))
        self.start = Start(free_port(), upstream, self.scratch)
        self._log = (self.scratch / "log").open("wb")
        self._began = time.monotonic()
        self._process = self._spawn(cores.gateway)
        self.ready_seconds = 0.0

    def _spawn(self, core: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.peer.command(self.start),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=HERE.parent,
            env=environment(self.peer),
            preexec_fn=pin(core),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Root of its process tree."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it serves calls; raises RuntimeError with the end of its log when it does not."""
        while time.monotonic() - self._began < READY_SECONDS and self._process.poll() is None:
            if self._answers():
                self.ready_seconds = time.monotonic() - self._began
                return
            time.sleep(LOOK_SECONDS)
        raise RuntimeError(f"did not start: {self.log_end()}")

    def _answers(self) -> bool:
        try:
            fetch(self.start.port, self.peer.ready)
        except (OSError, HTTPException):
            return False
        return True

    def log_end(self) -> str:
        """Return the end of its output."""
        return (self.scratch / "log").read_text(errors="replace").strip()[-400:]

    def settle(self) -> float:
        """Wait until it has nothing more to do, at most 3 s; return its CPU seconds so far."""
        before = procfs.cpu_seconds(self.pid)
        for _ in range(30):
            time.sleep(0.1)
            after = procfs.cpu_seconds(self.pid)
            if after - before < 0.011:
                return after
            before = after
        return before

    def recorded(self) -> int | None:
        """Return the calls that are durably on its tape; None for a peer without this counter."""
        if self.peer.counter is None:
            return None
        lines = fetch(self.start.port, "/metrics").splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(self.peer.counter))

    def stored_bytes(self) -> int:
        """Return the bytes that it has written to disk."""
        files = (path for path in self.scratch.rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)

    def close(self) -> None:
        """End it and its children, and remove its files."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
