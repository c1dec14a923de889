"""Attempts forked from a module that was imported once: each has its own process, variables, output and end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes.process import alive, gone, nobody_reads
from fakes.runs import PATIENCE
from fakes.waiting import until

from penstock.sidecar.run.agent.environment import UNREACHABLE_URL, import_environment
from penstock.sidecar.run.agent.process import ExitStatus, LaunchCommand
from penstock.sidecar.run.engines import local
from penstock.sidecar.run.engines.local import ForkServerClient

pytestmark = pytest.mark.slow

PREPARED = """
import asyncio, json, os, random, subprocess, sys, threading, time
from pathlib import Path

AT_IMPORT = {"pid": os.getpid(), "url": os.environ["OPENAI_BASE_URL"], "key": os.environ.get("PENSTOCK_ADMIN_KEY")}
Path("imports").open("a").write("x")

def facts(task):
    return {
        "at_import": AT_IMPORT, "pid": os.getpid(), "url": os.environ["OPENAI_BASE_URL"], "cwd": os.getcwd(),
        "stdin": sys.stdin.read(), "random": random.random(), "fds": len(os.listdir("/proc/self/fd")), "task": task,
    }

def leaves(task):
    sys.exit(task)

def crashes(task):
    os.kill(os.getpid(), 11)

def at_exit(task):
    import atexit
    atexit.register(lambda: print("bye", flush=True))
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread", flush=True))).start()

def family(task):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    Path("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


class Output:
    """Collects what an agent prints."""

    def __init__(self) -> None:
        self.streams = {"stdout": b"", "stderr": b""}

    def __call__(self, stream: str, data: bytes) -> None:
        self.streams[stream] += data


class Rig:
    """A directory with a module in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{home}", "OPENAI_BASE_URL": "http://at.run.time"}
        self.made: list[ForkServerClient] = []

    def preloaded(self, function: str) -> ForkServerClient:
        """Its function, ready to be started."""
        made = ForkServerClient(
            f"prepared:{function}", import_environment(self.env | {"PENSTOCK_ADMIN_KEY": "secret"}, "secret")
        )
        self.made.append(made)
        return made

    def command(self, task: str = "null", stdin: bytes | None = None) -> LaunchCommand:
        """One attempt."""
        return LaunchCommand((), self.env | {"PENSTOCK_INPUT": task}, stdin)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Rig]:
    (tmp_path / "prepared.py").write_text(PREPARED)
    rig = Rig(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield rig
    for made in rig.made:
        await made.close()


async def ran(
    rig: Rig, preloaded: ForkServerClient, task: str = "null", stdin: bytes | None = None
) -> tuple[ExitStatus, Output]:
    """One attempt from its start to its end."""
    output = Output()
    process = await preloaded.start(rig.command(task, stdin), 5.0, output)
    assert process.pid is not None
    return await process.wait(), output


def said(output: Output) -> dict[str, Any]:
    """What the function returned."""
    return json.loads(output.streams["stdout"].splitlines()[-1])


async def test_attempts_share_the_import_and_nothing_else(rig: Rig) -> None:
    preloaded = rig.preloaded("facts")
    outcomes = await asyncio.gather(*(ran(rig, preloaded, str(n), stdin=b"%d" % n) for n in range(20)))
    found = [said(output) for _, output in outcomes]
    assert all(ending.exit_code == 0 for ending, _ in outcomes)
    assert [one["task"] for one in found] == list(range(20))
    assert [one["stdin"] for one in found] == [str(n) for n in range(20)]
    assert {one["url"] for one in found} == {"http://at.run.time"}
    assert {one["cwd"] for one in found} == {str(rig.home)}
    assert len({one["pid"] for one in found}) == len({one["random"] for one in found}) == 20
    # stdin, stdout, stderr, and the directory that was listed: nothing of the warden's is left open.
    assert {one["fds"] for one in found} == {4}
    assert (rig.home / "imports").read_text() == "x"


async def test_where_warnings_are_shown_its_end_shows_none(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    rig.env["PYTHONWARNINGS"] = "default"
    preloaded = rig.preloaded("facts")
    ending, output = await ran(rig, preloaded)
    await preloaded.close()
    assert (ending.exit_code, output.streams["stderr"]) == (0, b"")
    assert "socket" not in capfd.readouterr().err


async def test_an_import_without_an_end_keeps_no_runner(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STARTS_S", 0.5)
    (rig.home / "prepared.py").write_text("import time\ntime.sleep(600)\n")
    preloaded = rig.preloaded("facts")
    for _ in range(2):
        with pytest.raises(OSError, match=r"prepared:facts was not imported within 0\.5 s"):
            _ = await ran(rig, preloaded)
    (rig.home / "prepared.py").write_text(PREPARED)
    monkeypatch.setattr(local, "STARTS_S", 30.0)
    assert (await ran(rig, preloaded))[0].exit_code == 0


async def test_a_fork_server_that_still_imports_can_be_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ENDS_S", 0.1)
    (rig.home / "prepared.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    preloaded = rig.preloaded("facts")
    starting = asyncio.ensure_future(ran(rig, preloaded))
    await until((rig.home / "begun").exists)
    starting.cancel()
    async with asyncio.timeout(PATIENCE):
        await preloaded.close()


async def test_pipes_that_a_failed_fork_server_still_holds_are_read_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[int]()

    def ask(orders: socket.socket, told: bytes, fds: list[int]) -> int:
        held.extend(os.dup(fd) for fd in (*fds[1:3], fds[4]))
        raise OSError("it has died")

    monkeypatch.setattr(local, "_ask", ask)
    with pytest.raises(OSError, match="it has died"):
        _ = await ran(rig, rig.preloaded("facts"))
    for pipe in held:
        os.set_blocking(pipe, False)
        await until(lambda pipe=pipe: nobody_reads(pipe))
        os.close(pipe)


async def test_what_is_made_at_import_can_reach_nobody_and_has_no_key(rig: Rig) -> None:
    _, output = await ran(rig, rig.preloaded("facts"))
    at_import = said(output)["at_import"]
    assert (at_import["url"], at_import["key"]) == (UNREACHABLE_URL, None)


@pytest.mark.parametrize(
    ("function", "task", "exit_code", "signal_name"),
    [("leaves", "7", 7, None), ("leaves", '"no"', 1, None), ("crashes", "null", None, "SIGSEGV")],
)
async def test_ends_are_told(
    rig: Rig, function: str, task: str, exit_code: int | None, signal_name: str | None
) -> None:
    ending, _ = await ran(rig, rig.preloaded(function), task)
    assert (ending.exit_code, ending.signal, ending.error) == (exit_code, signal_name, None)


async def test_an_attempt_ends_as_a_python_process_ends(rig: Rig) -> None:
    ending, output = await ran(rig, rig.preloaded("at_exit"))
    assert ending.exit_code == 0
    assert output.streams["stdout"].split() == [b"null", b"thread", b"bye"]


async def test_a_function_that_is_not_there_fails_each_attempt_with_the_reason(rig: Rig) -> None:
    preloaded = rig.preloaded("nobody")
    for _ in range(2):
        ending, output = await ran(rig, preloaded)
        assert ending.exit_code == 1
        assert b"prepared has no 'nobody'" in output.streams["stderr"]


@pytest.mark.parametrize("how", ["kill", "terminate", "close"])
async def test_nothing_of_an_attempt_is_left(rig: Rig, how: str) -> None:
    process = await rig.preloaded("family").start(rig.command(), 0.1, Output())
    waiting = asyncio.ensure_future(process.wait())
    await until(lambda: (rig.home / "pids").exists() and len((rig.home / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (rig.home / "pids").read_text().split()]
    assert all(map(alive, pids))
    getattr(process, how)()
    if how == "close":
        # As when the runner is gone.
        waiting.cancel()
        for pid in pids:
            await gone(pid)
    else:
        assert (await waiting).signal is not None
        assert not any(map(alive, pids))


async def test_a_zygote_that_was_killed_is_started_again(rig: Rig) -> None:
    preloaded = rig.preloaded("facts")
    _, output = await ran(rig, preloaded)
    at_import = said(output)["at_import"]
    os.kill(at_import["pid"], signal.SIGKILL)
    await gone(at_import["pid"])
    ending, output = await ran(rig, preloaded)
    assert ending.exit_code == 0
    assert (rig.home / "imports").read_text() == "xx"
