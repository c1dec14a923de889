"""A terminal for the commands that the documentation shows: one bash that lives as long as somebody reads on.

What a command exports, and where it goes with `cd`, holds for the next one. A command that goes on until it is stopped
(`penstock serve`) runs beside, as in another window, and is waited for until it has printed what it should.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fakes.process import alive
from fakes.waiting import until

PATIENCE = 120.0
"""What one command may take on a machine that is busy; s."""


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command left."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A command of a block, which may have several lines."""

    line: int
    """Of its first line within the block, from 0."""
    text: str


def statements(block: str) -> list[Statement]:
    """The commands of a shell block, in order; comments and empty lines are none."""
    found: list[Statement] = []
    begin, gathered = 0, ""
    for number, line in enumerate(block.splitlines()):
        if not gathered:
            begin = number
        gathered += line + "\n"
        if not gathered.strip() or re.fullmatch(r"(\s*#.*\n|\s*\n)+", gathered):
            gathered = ""
        elif _whole(gathered):
            found.append(Statement(begin, gathered))
            gathered = ""
    assert not gathered, f"a command does not end: {gathered!r}"
    return found


def _whole(text: str) -> bool:
    """Whether bash would run it now, rather than read on."""
    if text.endswith("\\\n"):
        return False
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False)
    if "unexpected end of file" in checked.stderr or "here-document" in checked.stderr:
        return False
    assert checked.returncode == 0, f"bash does not understand {text!r}: {checked.stderr}"
    return True


class Terminal:
    """A bash in a folder."""

    def __init__(self, process: asyncio.subprocess.Process, notes: Path) -> None:
        self._process, self._notes, self._number = process, notes, 0

    async def run(self, statement: str) -> Printed:
        """A command, from its start to its end."""
        out, err = self._files()
        code = await self._say(f"{{ {statement}\n}} >{out} 2>{err} </dev/null; echo $?")
        return Printed(int(code), out.read_text(), err.read_text())

    async def follow(self, statement: str, awaited: str) -> str:
        """Start a command beside, and wait until a pattern stands in what it prints; all that it has printed then."""
        out, err = self._files()
        started = re.sub(r"^((?:\w+=\S*\s+)*)", r"\1exec ", statement, count=1)
        pid = int(await self._say(f"{{ {started}\n}} >{out} 2>{err} </dev/null & echo $!"))
        async with asyncio.timeout(PATIENCE):
            while True:
                lives, printed = alive(pid), _read(out) + _read(err)
                if re.search(awaited, printed):
                    return printed
                assert lives, f"it ended before it printed {awaited!r}: {printed}"
                await asyncio.sleep(0.02)

    def _files(self) -> tuple[Path, Path]:
        self._number += 1
        return self._notes / f"{self._number}.out", self._notes / f"{self._number}.err"

    async def _say(self, text: str) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text.encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            return (await process.stdout.readline()).decode().strip()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@asynccontextmanager
async def terminal(folder: Path, notes: Path, env: Mapping[str, str]) -> AsyncGenerator[Terminal]:
    """One in a folder; everything that it has started is stopped at the end. `notes`: where outputs are kept."""
    await asyncio.to_thread(notes.mkdir)
    process = await asyncio.create_subprocess_exec(
        "bash", "--norc", "--noprofile", "-s", "-o", "pipefail",
        cwd=folder, env=dict(env), start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Terminal(process, notes)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End all processes of its session: politely, then not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        if sign == signal.SIGTERM:
            with suppress(AssertionError):
                await until(lambda: not _group(process.pid) - {process.pid})
    _ = await process.communicate()


def _group(leader: int) -> set[int]:
    """Processes of a group that have not ended."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found
