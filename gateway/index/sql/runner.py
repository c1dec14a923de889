"""Runs queries for the gateway: starts a process for each, bounds it, and kills it at its deadline."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from penstock.gateway.index.link import Link
from penstock.gateway.index.sql.questions import Failure, Format, Outcome, Result, Work

Sandbox = Literal["landlock", "none", "off"]
MOST_BYTES: Final = 16 << 20
"""Of an answer."""
AT_ONCE: Final = 2
"""Queries that run at the same time; others wait."""
INDEX_S: Final = 10.0
"""How long a query waits for an index that is starting, or that reads on."""
START_S: Final = 5.0
"""How long its process may take besides the query."""
_INHERITED: Final = ("PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""What the process is told of the gateway's environment, in which there may be keys."""
COMMAND: Final = (sys.executable, "-P", "-m", "penstock.gateway.index.sql.child")


class NotAnswered(Exception):
    """A query that has no answer."""

    def __init__(self, status: int, message: str, field: str) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Queries:
    """Those of one gateway. On the loop only."""

    def __init__(self, link: Link, path: Path, sandbox: Sandbox) -> None:
        """`path`: where the index is."""
        self._link, self._path, self._sandbox = link, path, sandbox
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def run(
        self, query: str, format: Format, rows: int, seconds: float, given: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> bytes:
        """The answer as JSON (`model.sql.SqlAnswer`). `given`: rows of the views that are in no file. Raises
        `NotAnswered`."""
        if self._sandbox == "off":
            raise NotAnswered(409, 'SQL is turned off ([index] sql = "off")', "index")
        files = await self._files()
        tables = {name: [dict(row) for row in some] for name, some in given.items()}
        work = Work(
            query, str(self._path), files, tables, format, rows, MOST_BYTES, seconds, self._sandbox == "landlock"
        )
        async with self._turn:
            outcome = await outcome_of(work)
        if isinstance(outcome, Result):
            return outcome.json
        if outcome.kind == "no_sandbox":
            raise NotAnswered(
                409, f'{outcome.reason}, so that SQL could read any file of the gateway\'s; [index] sql = "none" lets '
                "it, where all who may ask may do that", "index",
            )  # fmt: skip
        raise NotAnswered(400, outcome.reason, "query")

    async def _files(self) -> dict[str, list[str]]:
        """Those of the index, as soon as it has caught up."""
        until = asyncio.get_running_loop().time() + INDEX_S
        while isinstance(found := await asyncio.to_thread(self._link.files), str):
            await asyncio.to_thread(self._link.tend)
            view = await asyncio.to_thread(self._link.view)
            if view.status in ("off", "missing"):
                raise NotAnswered(409, f"SQL needs the index: {view.reason}", "index")
            if asyncio.get_running_loop().time() > until:
                read = f"it has read {view.cursor:,} of {view.newest:,} changes"
                raise NotAnswered(503, f"SQL waits for the index: {found} ({read}); ask again in a moment", "index")
            await asyncio.sleep(0.1)  # another process's state cannot be awaited
        return found


async def outcome_of(work: Work) -> Outcome:
    """What a process of its own makes of a query."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environment
    )
    try:
        async with asyncio.timeout(work.seconds + START_S):
            answer = await _answer(process, msgspec.msgpack.encode(work))
    except TimeoutError:
        return Failure("query", f"it took longer than {work.seconds:g} s; a where on `started` makes it look at less")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return msgspec.msgpack.decode(answer, type=Outcome)
    except msgspec.MsgspecError:
        return Failure("memory", "it needed more memory or processor time than it may have")


async def _answer(process: asyncio.subprocess.Process, work: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(work)
    process.stdin.close()
    found = bytearray()
    while piece := await process.stdout.read(1 << 20):
        found += piece
        if len(found) > 3 * MOST_BYTES:
            return b""  # no answer is so large: it is not what it should be
    await process.wait()
    return bytes(found)
