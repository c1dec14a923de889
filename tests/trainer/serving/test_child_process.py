"""Processes of ours: nothing that they have started outlives them, and their logs may have any size."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fakes.waiting import until

from penstock.trainer.serving import child_process
from penstock.trainer.serving.child_process import ChildProcess, spawn

pytestmark = pytest.mark.slow

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
    await child.stop()
    await until(lambda: gone(child))


async def test_what_a_server_that_stops_left_behind_ends_with_it(tmp_path: Path) -> None:
    child = await started(f"{ENGINE}; import signal; signal.pause()", tmp_path / "log")

    async def there() -> bool:
        return "it is there" in child.tail()

    await until(there)
    await child.stop()
    await until(lambda: gone(child))


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
