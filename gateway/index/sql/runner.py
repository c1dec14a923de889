"""Runs queries for the gateway: starts a process for each, bounds it, and kills it at its deadline."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec

from penstock.gateway.index.link import Link
from penstock.gateway.index.snapshots import LINKED, NOW
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
        async with self._turn:
            return await self._answered(query, format, rows, seconds, given)

    async def _answered(
        self, query: str, format: Format, rows: int, seconds: float, given: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> bytes:
        links = self._path / LINKED / uuid4().hex
        try:
            files = await self._files(links)
            return _json(await outcome_of(self._work(query, format, rows, seconds, given, files)))
        finally:
            await asyncio.to_thread(shutil.rmtree, links, True)

    def _work(
        self, query: str, format: Format, rows: int, seconds: float,
        given: Mapping[str, Sequence[Mapping[str, Any]]], files: dict[str, list[str]],
    ) -> Work:  # fmt: skip
        tables = {name: [dict(row) for row in some] for name, some in given.items()}
        enclosed = self._sandbox == "landlock"
        return Work(query, str(self._path), files, tables, format, rows, MOST_BYTES, seconds, enclosed)

    async def _files(self, links: Path) -> dict[str, list[str]]:
        """Those of the index, as soon as it has caught up; `links`: where links to those of a snapshot are made."""
        until = asyncio.get_running_loop().time() + INDEX_S
        while isinstance(found := await asyncio.to_thread(self._linked, links), str):
            await asyncio.to_thread(self._link.tend)
            view = await asyncio.to_thread(self._link.view)
            if view.status in ("off", "missing"):
                raise NotAnswered(409, f"SQL needs the index: {view.reason}", "index")
            if asyncio.get_running_loop().time() > until:
                read = f"it has read {view.cursor:,} of {view.newest:,} changes"
                raise NotAnswered(503, f"SQL waits for the index: {found} ({read}); ask again in a moment", "index")
            await asyncio.sleep(0.1)  # another process's state cannot be awaited
        return found

    def _linked(self, links: Path) -> dict[str, list[str]] | str:
        found = self._link.files()
        if isinstance(found, str):
            return found
        links.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = self._path / NOW
        try:
            return {table: [_link(Path(name), links, now) for name in names] for table, names in found.items()}
        except FileNotFoundError:
            return "a newer snapshot was taken meanwhile"


def _link(path: Path, links: Path, of: Path) -> str:
    """Another name for a file of a snapshot, under which it stays; other files stay anyway."""
    if of not in path.parents:
        return str(path)
    link = links / path.name
    link.unlink(missing_ok=True)
    os.link(path, link)
    return str(link)


def _json(outcome: Outcome) -> bytes:
    if isinstance(outcome, Result):
        return outcome.json
    if outcome.kind == "no_sandbox":
        raise NotAnswered(
            409, f'{outcome.reason}, so that SQL could read any file of the gateway\'s; [index] sql = "none" lets '
            "it, where all who may ask may do that", "index",
        )  # fmt: skip
    raise NotAnswered(400, outcome.reason, "query")


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
