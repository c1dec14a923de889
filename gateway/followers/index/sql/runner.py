"""Runs queries for the gateway: starts a process for each, limits it, and kills it at its deadline."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec

from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.index.segments import LINKED, NOW
from penstock.gateway.followers.index.sql.views import READY, Format, SqlFailure, SqlJob, SqlOutcome, SqlResult
from penstock.sidecar.run.agent.process import input_pipe

Sandbox = Literal["landlock", "none", "off"]
MOST_BYTES: Final = 8 << 20
"""Largest answer."""
AT_ONCE: Final = 2
"""Most queries that run at the same time; others wait."""
MOST_WAITING: Final = 16
"""Most queries that run or wait; more are refused."""
INDEX_S: Final = 30.0
"""Longest wait of a query for an index that is starting or catching up."""
START_S: Final = 30.0
"""Longest start of a process; the query's own time begins after it."""
_INHERITED: Final = ("PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables of the gateway's environment that the process gets; others may hold keys."""
_OWN: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Keep allocators from reserving more address space than a query needs."""
_MUCH: Final = "it needed more memory or processor time than it may have"
_ENDS: Final[dict[int | None, str]] = {
    -signal.SIGKILL: _MUCH,
    -signal.SIGXCPU: _MUCH,
    -signal.SIGABRT: _MUCH,
    None: "its process does not say what it should",
}
COMMAND: Final = (sys.executable, "-P", "-m", "penstock.gateway.followers.index.sql.child")


class SqlQueryError(Exception):
    """A query without an answer; `status` is that of HTTP."""

    def __init__(self, status: int, message: str, field: str) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class SqlRunner:
    """The queries of one gateway. On the loop only."""

    def __init__(self, link: IndexLink, path: Path, sandbox: Sandbox) -> None:
        """`path`: the directory of the index."""
        self._link, self._path, self._sandbox = link, path, sandbox
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def run(
        self, query: str, format: Format, rows: int, seconds: float, given: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> bytes:
        """The answer as JSON (`model.state.SqlAnswer`). `given`: rows of the views that are in no file. Raises
        `SqlQueryError`."""
        if self._sandbox == "off":
            raise SqlQueryError(409, 'SQL is turned off ([index] sql = "off")', "index")
        if self._waiting >= MOST_WAITING:
            raise SqlQueryError(503, f"{self._waiting} queries are under way: ask again in a moment", "query")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._answered(query, format, rows, seconds, given)
        finally:
            self._waiting -= 1

    async def _answered(
        self, query: str, format: Format, rows: int, seconds: float, given: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> bytes:
        links = _SnapshotLinks(self._path)
        try:
            files = await self._files(links)
            return _json(await run_job(self._work(query, format, rows, seconds, given, files)))
        finally:
            await asyncio.to_thread(links.delete)

    def _work(
        self, query: str, format: Format, rows: int, seconds: float,
        given: Mapping[str, Sequence[Mapping[str, Any]]], files: dict[str, list[str]],
    ) -> SqlJob:  # fmt: skip
        tables = {name: [dict(row) for row in some] for name, some in given.items()}
        enclosed = self._sandbox == "landlock"
        return SqlJob(query, str(self._path), files, tables, format, rows, MOST_BYTES, seconds, enclosed)

    async def _files(self, links: _SnapshotLinks) -> dict[str, list[str]]:
        """The files of the index, once it has caught up. `links`: makes links to those of a snapshot."""
        loop = asyncio.get_running_loop()
        until = loop.time() + INDEX_S
        while True:
            # Looked at first: an index that becomes ready while the time ends is asked once more.
            is_late = loop.time() > until
            found = await asyncio.to_thread(lambda: links.link_files(self._link.files()))
            if not isinstance(found, str):
                return found
            await asyncio.to_thread(self._link.ensure_running)
            view = await asyncio.to_thread(self._link.view)
            if view.status in ("off", "missing"):
                raise SqlQueryError(409, f"SQL needs the index: {view.reason}", "index")
            if is_late:
                read = f"it has read {view.cursor:,} of {view.newest:,} changes"
                raise SqlQueryError(503, f"SQL waits for the index: {found} ({read}); ask again in a moment", "index")
            await asyncio.sleep(0.1)  # another process's state cannot be awaited


class _SnapshotLinks:
    """Links to the files of a snapshot, which keep them for as long as a query needs them. One thread makes them, and
    another may have to delete them before the first has ended."""

    def __init__(self, index: Path) -> None:
        self._path, self._now = index / LINKED / uuid4().hex, index / NOW
        self._lock, self._deleted = threading.Lock(), False

    def link_files(self, files: dict[str, list[str]] | str) -> dict[str, list[str]] | str:
        """The files under their new names; or why there are none."""
        with self._lock:
            if isinstance(files, str) or self._deleted:
                return files
            try:
                # `mode` holds for the last directory only, so each is made by itself.
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._path.mkdir(mode=0o700, exist_ok=True)
                return {table: [self._link(Path(name)) for name in names] for table, names in files.items()}
            except FileNotFoundError:
                return "a newer snapshot was taken meanwhile"
            except OSError:
                return files  # no hard links on this file system: most often the files stay for long enough

    def _link(self, path: Path) -> str:
        """Links a file of a snapshot. Any other file stays without a link."""
        if self._now not in path.parents:
            return str(path)
        link = self._path / path.name
        link.unlink(missing_ok=True)
        os.link(path, link)
        return str(link)

    def delete(self) -> None:
        """Deletes all links, and makes no further ones."""
        with self._lock:
            self._deleted = True
            shutil.rmtree(self._path, ignore_errors=True)


def _json(outcome: SqlOutcome) -> bytes:
    if isinstance(outcome, SqlResult):
        return outcome.json
    if outcome.kind == "no_sandbox":
        raise SqlQueryError(
            409, f'{outcome.reason}, so that SQL could read any file of the gateway\'s; [index] sql = "none" lets '
            "it, where all who may ask may do that", "index",
        )  # fmt: skip
    raise SqlQueryError(400, outcome.reason, "query")


async def run_job(work: SqlJob) -> SqlOutcome:
    """Runs a query in a process of its own. Raises `SqlQueryError` if that does not start."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | _OWN
    with ExitStack() as theirs:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=await input_pipe(theirs, msgspec.msgpack.encode(work)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
    try:
        answer = await _answer(process, work)
    except TimeoutError:
        return SqlFailure(
            "query", f"it took longer than {work.seconds:g} s; a where on `started` makes it look at less"
        )
    finally:
        ended = process.returncode
        if ended is None:
            process.kill()
        # The loop closes a pipe when it has been read to its end.
        await _rest(process)
        await process.wait()
    try:
        return msgspec.msgpack.decode(answer, type=SqlOutcome)
    except msgspec.MsgspecError:
        return SqlFailure("memory", _ENDS.get(ended, f"its process has ended ({ended})"))


async def _answer(process: asyncio.subprocess.Process, work: SqlJob) -> bytes:
    """The process's output behind `READY`, from which on its time counts. Raises `TimeoutError`, and `SqlQueryError` if
    it is not ready in time."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            beginning = await _beginning(process.stdout)
    except TimeoutError:
        message = f"the process of a query was not ready in {START_S:g} s: the machine is busy; ask again in a moment"
        raise SqlQueryError(503, message, "query") from None
    if beginning != READY:
        # It has ended, or writes something else.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1)
        return b""
    found = bytearray()
    async with asyncio.timeout(work.seconds):
        while piece := await process.stdout.read(1 << 20):
            found += piece
            if len(found) > 3 * MOST_BYTES:
                return b""
        await process.wait()
    return bytes(found)


async def _rest(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.read(1 << 20):
        pass


async def _beginning(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readexactly(len(READY))
    except asyncio.IncompleteReadError as error:
        return error.partial
