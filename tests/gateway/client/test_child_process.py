"""Processes of ours: nothing that they have started outlives them, and their logs may have any size."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes.process import PATIENCE
from fakes.waiting import until

from penstock.gateway.client import child_process
from penstock.gateway.client.child_process import ChildProcess, spawn

pytestmark = pytest.mark.slow

BOTH = "sleep 300 & echo $!; sleep 300"
ENGINE = "import os, subprocess; subprocess.Popen(['sleep', '300'], close_fds=True); print('it is there', flush=True)"


async def gone(child: ChildProcess) -> bool:
    """Whether nothing of it lives any more."""
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return True
    return False


async def started(code: str, log: Path) -> ChildProcess:
    return await spawn([sys.executable, "-c", code], dict(os.environ), log)


async def test_what_a_server_that_has_died_left_behind_ends_with_the_run(tmp_path: Path) -> None:
    child = await started(f"{ENGINE}; os._exit(1)", tmp_path / "log")
    assert await child.wait() == 1
    assert not await gone(child)
    _ = await child.end()
    await until(lambda: gone(child))


async def test_what_a_server_that_stops_left_behind_ends_with_it(tmp_path: Path) -> None:
    child = await started(f"{ENGINE}; import signal; signal.pause()", tmp_path / "log")

    async def there() -> bool:
        return "it is there" in child.tail()

    await until(there)
    await child.stop()
    await until(lambda: gone(child))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nobody_who_waits_for_its_output_leaves_it_behind(cancelled: bool) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "300", stdout=asyncio.subprocess.PIPE)
    waiting = asyncio.ensure_future(ChildProcess(process).output(PATIENCE if cancelled else 0.1))
    if cancelled:
        await asyncio.sleep(0)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
        _ = await waiting
    assert process.returncode == -signal.SIGKILL


async def test_the_exit_code_of_one_that_is_killed_goes_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio reports 255 for a process whose exit code another one has taken."""
    if sys.version_info < (3, 12):  # newer ones have it so by themselves
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        monkeypatch.setattr(asyncio.get_event_loop_policy(), "_watcher", watcher)  # pyright: ignore[reportDeprecated]
    process = await asyncio.create_subprocess_exec("sleep", "300", stdout=asyncio.subprocess.PIPE)
    child = ChildProcess(process)

    def kill() -> None:
        process.kill()
        _ = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(child, "kill", kill)
    with pytest.raises(TimeoutError):
        _ = await child.output(0.01)
    assert process.returncode == -signal.SIGKILL


async def test_the_limit_holds_where_what_it_has_started_holds_its_output() -> None:
    process = await asyncio.create_subprocess_exec("sh", "-c", BOTH, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    held_by = int(await process.stdout.readline())
    try:
        with pytest.raises(TimeoutError):
            _ = await asyncio.wait_for(ChildProcess(process).output(0.1), PATIENCE)
        os.kill(held_by, 0)
    finally:
        os.kill(held_by, signal.SIGKILL)


@pytest.mark.parametrize(("code", "exit_code"), [("exit 3", 3), ("exec sleep 300", -signal.SIGKILL)])
async def test_who_does_not_end_in_the_grace_is_killed(code: str, exit_code: int) -> None:
    child = ChildProcess(await asyncio.create_subprocess_exec("sh", "-c", code))
    assert await child.end(PATIENCE if exit_code == 3 else 0.2) == exit_code
    assert await child.end() == exit_code


async def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await started("print('the end')", log)
    assert await child.wait() == 0
    said = log.read_bytes()
    with log.open("wb") as file:
        _ = file.seek(1 << 40)
        file.write(b"\n" + said)
    assert child.tail().splitlines()[-1] == "the end"
    assert len(child.tail()) <= child_process.TAIL_BYTES + len(f"the end of {log}:\n")
    log.unlink()
    assert "its log cannot be read" in child.tail()
    await child.stop()
