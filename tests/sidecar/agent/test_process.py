"""Agents as processes: how they end, and that nothing is left of them, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from fakes.process import alive, gone, nobody_reads
from fakes.runs import AGENTS, PYTHON, spawned_late, written
from fakes.waiting import until

from penstock.sidecar.run.agent import supervisor
from penstock.sidecar.run.agent.process import AgentProcess, ExitStatus, LaunchCommand, output_pipe, start

FAMILY = str(AGENTS / "family.py")


class Output:
    """Collects what an agent prints."""

    def __init__(self) -> None:
        self.streams = {"stdout": b"", "stderr": b""}

    def __call__(self, stream: str, data: bytes) -> None:
        self.streams[stream] += data


async def begin(
    *argv: str, grace_s: float = 5.0, stdin: bytes | None = None, output: Output | None = None
) -> AgentProcess:
    """Start an agent."""
    return await start(LaunchCommand(argv, dict(os.environ), stdin), grace_s, output or Output())


@pytest.mark.slow
async def test_an_agent_reads_writes_and_ends() -> None:
    output = Output()
    process = await begin("sh", "-c", "cat; echo oops >&2; exit 3", stdin=b"hello", output=output)
    ending = await process.wait()
    assert output.streams == {"stdout": b"hello", "stderr": b"oops\n"}
    assert ending == ExitStatus(exit_code=3, duration_ns=ending.duration_ns)
    assert 0 < ending.duration_ns < 10**10


@pytest.mark.slow
async def test_an_agent_may_open_its_streams_by_name() -> None:
    """As scripts do: what is a socket cannot be opened again."""
    output = Output()
    words = "cat /dev/stdin; echo out > /dev/stdout; echo err > /dev/stderr"
    process = await begin("sh", "-c", words, stdin=b"in\n", output=output)
    assert (await process.wait()).exit_code == 0
    assert output.streams == {"stdout": b"in\nout\n", "stderr": b"err\n"}


async def test_output_that_somebody_else_holds_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its pipe left open."""
    monkeypatch.setattr("penstock.sidecar.run.agent.process.DRAIN_S", 0.01)
    with ExitStack() as theirs:
        pipe, writing = await output_pipe(theirs, ExitStack())
        held = os.dup(writing)
    os.set_blocking(held, False)
    ours, warden = socket.socketpair()
    warden.close()
    ours.setblocking(False)
    ending = await AgentProcess(0, {"stdout": pipe}, partial(asyncio.sleep, 0), ours, Output()).wait()
    assert ending.error is not None
    await until(lambda: nobody_reads(held))
    os.close(held)


@pytest.mark.slow
async def test_a_task_larger_than_a_pipe_is_read_to_its_end() -> None:
    output = Output()
    process = await begin("wc", "-c", stdin=b"x" * (5 << 20), output=output)
    assert (await process.wait()).exit_code == 0
    assert output.streams["stdout"] == b"%d\n" % (5 << 20)


@pytest.mark.slow
async def test_an_agent_may_end_before_it_is_given_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned_late(monkeypatch)
    process = await begin("true", stdin=b"x" * (1 << 20))
    assert (await process.wait()).exit_code == 0


@pytest.mark.slow
async def test_more_output_than_a_pipe_holds_is_read_to_its_end() -> None:
    output = Output()
    process = await begin(PYTHON, "-c", "print('x' * (5 << 20))", output=output)
    assert (await process.wait()).exit_code == 0
    assert len(output.streams["stdout"]) == (5 << 20) + 1


@pytest.mark.slow
async def test_an_agent_lives_whose_runner_has_very_many_files_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("too few files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    null = os.open(os.devnull, os.O_RDONLY)
    files = [null, *(os.dup(null) for _ in range(1100))]
    output = Output()
    try:
        process = await begin("sh", "-c", "echo here; sleep 600", output=output)
        ending = asyncio.ensure_future(process.wait())
        await until(lambda: output.streams["stdout"] == b"here\n")
        process.terminate()
        assert (await ending).signal == "SIGTERM"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
async def test_an_agent_that_reads_nothing_is_not_waited_for() -> None:
    process = await begin("true", stdin=b"x" * (5 << 20))
    assert (await process.wait()).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("sh", "-c", "kill -SEGV $$"), ExitStatus(signal="SIGSEGV")),
        (("/no/such/agent",), ExitStatus(error="cannot start '/no/such/agent': No such file or directory")),
        ((str(AGENTS),), ExitStatus(error=f"cannot start {str(AGENTS)!r}: Permission denied")),
    ],
)
async def test_how_an_agent_ended_is_told(argv: tuple[str, ...], expected: ExitStatus) -> None:
    ending = await (await begin(*argv)).wait()
    assert (ending.exit_code, ending.signal, ending.error) == (expected.exit_code, expected.signal, expected.error)


@pytest.mark.slow
async def test_an_agent_that_heeds_term_ends_its_own_way() -> None:
    output = Output()
    ready = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('ready', flush=True)\n"
    process = await begin(PYTHON, "-c", ready + "while True: time.sleep(60)", output=output)
    waiting = asyncio.ensure_future(process.wait())
    await until(lambda: output.streams["stdout"] == b"ready\n")
    process.terminate()
    assert (await waiting).exit_code == 7


@pytest.mark.slow
async def test_one_that_does_not_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = await begin(PYTHON, FAMILY, str(tmp_path / "pids"), "600", grace_s=0.1)
    pids = await written(tmp_path / "pids")
    process.terminate()
    assert (await process.wait()).signal == "SIGTERM"
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
async def test_kill_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    process = await begin(PYTHON, FAMILY, str(tmp_path / "pids"), "600", grace_s=600)
    pids = await written(tmp_path / "pids")
    process.terminate()
    process.kill()
    _ = await process.wait()
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["outer", "inner"])
async def test_nothing_survives_a_warden_that_is_killed(tmp_path: Path, which: str) -> None:
    process = await begin(PYTHON, FAMILY, str(tmp_path / "pids"), "600", grace_s=0.1)
    pids = await written(tmp_path / "pids")
    outer = process.pid
    assert outer is not None
    inner = next(pid for pid, row in supervisor.process_table().items() if row.parent == outer)
    os.kill(outer if which == "outer" else inner, signal.SIGKILL)
    ending = await process.wait()
    for pid in (outer, inner, *pids):
        await gone(pid)
    assert ending.error == "the process that watched it was killed" or ending.signal == "SIGTERM"


@pytest.mark.slow
async def test_leaving_ends_an_agent(tmp_path: Path) -> None:
    process = await begin(PYTHON, FAMILY, str(tmp_path / "pids"), "600", grace_s=0.1)
    pids = await written(tmp_path / "pids")
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.sleep(0)
    _ = waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        _ = await waiting
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.slow
async def test_what_cleans_up_runs_at_the_very_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = LaunchCommand(("sleep", "600"), os.environ, after=("touch", str(done)))
    process = await start(command, 0.1, Output())
    process.close()
    _ = await process.wait()
    assert done.exists()


def test_the_descendants_of_a_process() -> None:
    rows = {1: 0, 5: 1, 6: 5, 7: 6, 8: 1, 9: 8, 10: 5}
    table = {pid: supervisor.ProcStat(parent, 0, 0) for pid, parent in rows.items()}
    assert supervisor.descendants(5, table) == [6, 10, 7]
    assert supervisor.descendants(7, table) == []
