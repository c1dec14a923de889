"""The processes of one server: their limit, their idle time, and the wait before the next start."""

from __future__ import annotations

import asyncio
import logging
import secrets as randomness
from collections.abc import Callable, Iterable
from math import ceil
from time import monotonic
from typing import Final, NamedTuple, Protocol

from penstock.gateway.model.known_secrets import Secrets, fingerprint
from penstock.gateway.model.rollout import LIVE
from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.times import Backoff
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.hosted.process import GRACE_S
from penstock.gateway.tools.hosted.session import Owner, ProcessSession
from penstock.gateway.work.queue.dispatcher import Dispatcher

_PAUSES: Final = Backoff(1.0, 60.0)
"""Longest wait between two starts of a server that ends before it has answered anything."""
IDLE_S: Final = 1800.0
"""Time without a request or a stream after which a session ends, and its process."""
_LOOK_S: Final = 5.0
"""Interval at which an unused session checks whether its attempt has ended."""
_log = logging.getLogger("penstock.mcp")


class ProcessStartError(Exception):
    """No process can be started now. `reason`: short; the text says why and what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProcessExit(NamedTuple):
    """A process that has ended, for the tape."""

    server: str
    owner: Owner
    session: str
    exit_reason: str
    stop_requested: bool
    """True if the gateway stopped it."""
    last_lines: str


class ProcessJournal(Protocol):
    """The tape as hosted processes use it."""

    def tell(self, ending: ProcessExit) -> None:
        """Called when a process has ended."""
        ...

    def over(self, owner: Owner) -> bool:
        """True if the attempt that a process belongs to has ended."""
        ...


class ProcessPool:
    def __init__(self, name: str, config: McpServer, secrets: Secrets, rollouts: ProcessJournal) -> None:
        self.name, self._config, self._secrets, self._rollouts = name, config, secrets, rollouts
        self._sessions: dict[str, ProcessSession] = {}
        self._shared: dict[Owner, list[ProcessSession]] = {}
        self._all: set[ProcessSession] = set()
        self._failures, self._not_before, self._why = 0, 0.0, ""

    # Sessions -------------------------------------------------------------------------------------------------------

    def begin(self, owner: Owner) -> ProcessSession:
        """Starts a process for a new session with an id; raises `ProcessStartError`."""
        session = self._start(owner)
        session.id = randomness.token_urlsafe(24)
        self._sessions[session.id] = session
        return session

    def find(self, id: str, rollout: str) -> ProcessSession | None:
        """The session of that id; None if it is unknown or belongs to another rollout."""
        session = self._sessions.get(id)
        return session if session is not None and session.owner[0] == rollout else None

    async def share(self, owner: Owner, ids: Iterable[bytes]) -> ProcessSession:
        """Returns a process in which none of these ids is in use, for revisions without sessions: waits, or starts one;
        raises `ProcessStartError`."""
        while True:
            own = self._shared.get(owner, [])
            holders = [session.holder(ids) for session in own]
            free = next((session for session, holder in zip(own, holders, strict=True) if holder is None), None)
            if free is not None:
                return free
            busy = [holder for holder in holders if holder is not None and not holder.listens]
            if not busy:
                session = self._start(owner)
                self._shared.setdefault(owner, []).append(session)
                return session
            _ = await busy[0].over.wait()

    def shared(self, owner: Owner) -> ProcessSession | None:
        """The first running process of an address, for revisions without sessions; None without one."""
        return next(iter(self._shared.get(owner, ())), None)

    def end(self, session: ProcessSession) -> None:
        """Forgets a session and stops its process."""
        self._forget(session)
        session.process.stop()

    # Processes ------------------------------------------------------------------------------------------------------

    def _start(self, owner: Owner) -> ProcessSession:
        wait = self._not_before - monotonic()
        if wait > 0:
            raise ProcessStartError("mcp_backoff", f"{self._why}. It may start again in {ceil(wait)} s")
        if len(self._all) >= self._config.processes:
            said = f"{len(self._all)} processes of MCP server {self.name!r} run, which is the limit"
            raise ProcessStartError(
                "mcp_processes", f"{said} (mcp.servers.{self.name}.processes): end sessions, or raise it"
            )
        session = ProcessSession(self.name, self._config, self._secrets, owner, self._on_end)
        self._all.add(session)
        return session

    def _on_end(self, session: ProcessSession) -> None:
        self._forget(session)
        self._all.discard(session)
        process = session.process
        if session.answered:
            self._failures = 0
        elif not process.stop_requested:
            self._failures += 1
            self._why = session.exit_summary()
            self._not_before = monotonic() + _PAUSES.after(self._failures)
        if not process.stop_requested:
            _log.warning("a process of MCP server %r %s", self.name, process.exit_reason)
        said = "\n".join(process.last_lines)
        self._rollouts.tell(
            ProcessExit(self.name, session.owner, session.id, process.exit_reason, process.stop_requested, said)
        )

    def _forget(self, session: ProcessSession) -> None:
        self._sessions.pop(session.id, None)
        own = self._shared.get(session.owner, [])
        if session in own:
            own.remove(session)
            if not own:
                del self._shared[session.owner]

    def expire(self, now: float) -> None:
        """Ends sessions that are idle for too long, and within seconds those whose attempt has ended."""
        for session in [one for one in self._all if not (one.in_use or one.process.stop_requested)]:
            unused = now - session.last_active
            if unused > IDLE_S:
                self.end(session)
            elif unused > _LOOK_S and now - session.last_checked > _LOOK_S:
                session.last_checked = now
                if self._over(session.owner):
                    self.end(session)

    def _over(self, owner: Owner) -> bool:
        try:
            return self._rollouts.over(owner)
        except Exception as error:
            # A damaged record must not keep the other sessions from being checked.
            _log.warning("MCP server %r: whether the attempt of a session has ended is not known: %s", self.name, error)
            return False

    async def close(self) -> None:
        """Stops all processes and waits until they are gone, for at most twice the grace time and a second."""
        for session in list(self._all):
            session.process.stop()
        tasks = [session.task for session in self._all]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2 * GRACE_S + 1)
            for task in late:
                task.cancel()
            if late:
                _ = await asyncio.wait(late)


# Links processes with the tape: the end of a process is an event of its rollout; the end of an attempt ends its
# processes.

NAME: Final = "mcp server ended"
SERVER, ENDED, STDERR = "penstock.mcp.server", "penstock.mcp.ended", "penstock.mcp.stderr"
"""Attributes: the server of the process, how it ended, its last lines on stderr."""


class TapeProcessJournal:
    """The tape as hosted processes use it (`process_pool.Rollouts`)."""

    def __init__(self, dispatcher: Dispatcher, tape: StoreReader, now_ns: Callable[[], int]) -> None:
        self._dispatcher, self._tape, self._now_ns = dispatcher, tape, now_ns
        self._telling: set[asyncio.Task[list[int]]] = set()

    def tell(self, ending: ProcessExit) -> None:
        """Writes the end of a process to the tape."""
        entry = _event(ending, self._now_ns())
        if entry is not None:
            task = asyncio.get_running_loop().create_task(self._dispatcher.add([entry]))
            self._telling.add(task)
            task.add_done_callback(self._told)

    def over(self, owner: Owner) -> bool:
        """True if an attempt has ended. False for one that is not yet on the tape."""
        rollout, attempt = owner
        found = [one for one in self._tape.attempts(rollout) if one.id == attempt] if rollout else []
        return any(one.status not in LIVE for one in found)

    def _told(self, task: asyncio.Task[list[int]]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the end of an MCP server could not be recorded: %s", error)


def _event(ending: ProcessExit, now_ns: int) -> SpanEntry | None:
    """The event of an ended process. None if it was stopped and wrote nothing but messages, or if its client named no
    rollout."""
    rollout, attempt = ending.owner
    if not rollout or (ending.stop_requested and not ending.last_lines):
        return None
    entry = SpanEntry(rollout, attempt, kind="event", name=NAME, method="", start_ns=now_ns, end_ns=now_ns)
    entry.status = "ok" if ending.stop_requested else "error"
    entry.error = None if ending.stop_requested else "mcp_process"
    entry.attributes = {SERVER: ending.server, ENDED: ending.exit_reason, STDERR: ending.last_lines}
    if ending.session:
        entry.attributes["mcp.session.id"] = fingerprint(ending.session.encode())
    return entry
