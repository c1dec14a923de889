"""Signals, kills and faults before a gateway listens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import sysconfig
import time
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from fakes.gateway_workers import workers
from fakes.handing_over import answers_again, exit_code, logged, next_line
from fakes.mistakes import tells
from fakes.process import PATHS, ROOT, Gateway, running, upstreams
from fakes.provider import Provider
from fakes.raw import post
from fakes.rig import CHAT
from fakes.waiting import PATIENCE_S, until

from penstock.gateway.config import load
from penstock.gateway.process.workers import WorkerProcess, WorkerSupervisor
from penstock.gateway.tape.store import Store

pytestmark = pytest.mark.slow

TWO: Final = ("--workers", "2")
PYTHON: Final = os.path.realpath(sys.executable)
SUCCESSOR: Final = """
import sys
from penstock.console.main import main
sys.executable = "/no/such/python"
main(sys.argv[1:])
"""


class Starting:
    """A gateway whose processes wait for their configuration, which is a pipe, each in its turn."""

    def __init__(self, home: Path, *flags: str) -> None:
        self._pipe = home / "penstock.toml"
        self._lay()
        self.gateway = Gateway(self._pipe, home / "data", home / "stderr", flags)
        self.started = asyncio.ensure_future(self.gateway.start())
        self._writer = -1

    async def reads(self) -> None:
        """Returns when a process waits for its configuration."""

        async def has_opened() -> bool:
            if self._writer == -1:
                with suppress(OSError):
                    self._writer = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            # It may have come to that before this loop knows that it has been started.
            return self._writer != -1 and self.gateway.process is not None

        await until(has_opened)
        self._lay()

    def _lay(self) -> None:
        """The next one that comes has a pipe of its own."""
        fresh = self._pipe.with_suffix(".fresh")
        os.mkfifo(fresh)
        fresh.rename(self._pipe)

    def go_on(self) -> None:
        """That one has all of its configuration."""
        os.close(self._writer)
        self._writer = -1

    async def next(self) -> None:
        """One that comes has it at once."""
        await self.reads()
        self.go_on()

    async def is_killed(self) -> None:
        """Returns when neither the gateway nor anything that it has started is left."""
        with pytest.raises(AssertionError, match="did not start"):
            await self.started  # the last one that has its output has ended


@asynccontextmanager
async def starting(home: Path, *flags: str) -> AsyncGenerator[Starting]:
    made = Starting(home, *flags)
    try:
        yield made
    finally:
        made.started.cancel()
        with suppress(asyncio.CancelledError, AssertionError):
            await made.started
        if made.gateway.process is not None:
            await made.gateway.kill()
        print(made.gateway.log)


@pytest.mark.parametrize("flags", [(), TWO], ids=["one", "two"])
async def test_a_reload_that_comes_before_it_listens_is_made_then(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The settings may have been read before the change that the signal tells of. Workers that hear of it live on."""
    async with starting(tmp_path, *flags) as start:
        count = 1 + len(flags)
        for number in range(count):
            await start.reads()
            if number > 0:
                os.kill(max(workers(start.gateway.pid).values()), signal.SIGHUP)
            if number == count - 1:
                os.kill(start.gateway.pid, signal.SIGHUP)
            start.go_on()
        await start.started
        for _ in range(count):
            await start.next()
        assert await next_line(start.gateway) == f"penstock listening on {start.gateway.url}"
        assert await start.gateway.terminate() == 0
    assert "another one is started" not in start.gateway.log


@pytest.mark.parametrize("flags", [(), TWO], ids=["one", "two"])
async def test_who_stops_a_gateway_that_starts_leaves_no_process(flags: tuple[str, ...], tmp_path: Path) -> None:
    async with starting(tmp_path, *flags) as start:
        if flags:
            await start.next()
        await start.reads()
        os.kill(start.gateway.pid, signal.SIGTERM)
        start.go_on()
        await start.is_killed()
        assert await exit_code(start.gateway) == -signal.SIGTERM


async def test_what_a_killed_start_has_left_is_removed(tmp_path: Path) -> None:
    killed, again = tmp_path / "killed", tmp_path / "again"
    killed.mkdir()
    async with starting(killed, *TWO) as start:
        await start.next()
        await start.reads()
        os.kill(start.gateway.pid, signal.SIGKILL)
        start.go_on()
        await start.is_killed()
    writers = killed / "data" / "writers"
    left = [writers / f"{name}.{start.gateway.pid}" for name in ("links.sock", "relay.sock")]
    assert all(path.is_socket() for path in left), "the test itself: it was killed too late"
    again.mkdir()
    os.rename(killed / "data", again / "data")
    async with running(again, "", *TWO):
        names = {path.name for path in (again / "data" / "writers").iterdir()}
        assert {name for name in names if "." in name} == {"links.sock", "relay.sock", "handover.sock"}


async def test_an_interpreter_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    process = await create_subprocess_exec(
        *(sys.executable, "-c", SUCCESSOR, "serve", "--data", str(tmp_path / "data"), "--port", "0", *TWO),
        stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=tmp_path,
    )  # fmt: skip
    out, err = await process.communicate()
    told = tells(err.decode(), "worker 0", "/no/such/python", "No such file")
    assert (process.returncode, out, told) == (1, b"", True), err
    assert not [path for path in (tmp_path / "data" / "writers").iterdir() if ".sock" in path.name]


OTHER_TIME = """
import time
real = time.time_ns
time.time_ns = lambda: real() - 2 * 3600 * 10**9
"""


async def test_a_worker_is_started_again_once_the_interpreter_can_be_executed(
    tmp_path: Path, provider: Provider
) -> None:
    """Whoever upgrades it takes it away for a moment. The worker has the clock of the others, also where the machine's
    was set or has gone on while it slept: its calls would be as of long ago, and their attempts end for being quiet."""
    python, other = tmp_path / "python", tmp_path / "other"
    python.symlink_to(PYTHON)
    other.mkdir()
    found = {"PYTHONPATH": os.pathsep.join([str(other), str(ROOT), sysconfig.get_path("purelib")])}
    async with running(tmp_path, upstreams(openai=provider.openai_url), *TWO, env=found, python=python) as gateway:
        away = python.rename(tmp_path / "away")
        os.kill(workers(gateway.pid)[1], signal.SIGKILL)
        await logged(gateway, f"worker 1 cannot be started: {python} cannot be executed")
        (other / "sitecustomize.py").write_text(OTHER_TIME)
        away.rename(python)
        await answers_again(gateway, 1, post(f"/rollout/r1/attempt/a1{CHAT}", b'{"model":"m","messages":[]}'))
        assert await gateway.terminate() == 0
    with Store(tmp_path / "data", readonly=True) as store:
        (span,) = store.spans("r1")
        assert abs(time.time_ns() - span.start_ns) < 600 * 10**9


ENDS_EARLY = f"""
import socket, sys
from penstock.gateway.process.handover import GO_ON, READY, receive_grant
channel = receive_grant(socket.socket(fileno=int(sys.argv[1]))).channel
channel.sendall(READY)
assert channel.recv({len("go on")}) == GO_ON
"""


async def test_a_worker_that_never_serves_is_not_started_again_and_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end after all is handed over to it: what only one may do cannot be done."""
    waits = asyncio.Event()

    async def wait(parent: WorkerSupervisor, _: WorkerProcess) -> None:
        waits.set()
        await parent._over.wait()

    monkeypatch.setattr(WorkerSupervisor, "_wait", wait)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    config = load(None, data=tmp_path, host="127.0.0.1", port=0)
    parent = WorkerSupervisor(config, 1, [sys.executable, "-c", ENDS_EARLY])
    await parent.start()
    async with asyncio.timeout(PATIENCE_S):
        await waits.wait()
    await parent.stop()
