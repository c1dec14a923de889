"""Links processes with the tape: the end of a process is an event of its rollout; the end of an attempt ends its
processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from penstock.gateway.model.known_secrets import fingerprint
from penstock.gateway.model.lifecycle import LIVE
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.hosted.process_pool import ProcessExit
from penstock.gateway.tools.hosted.session import Owner
from penstock.gateway.work.queue.dispatcher import Dispatcher

NAME: Final = "mcp server ended"
SERVER, ENDED, STDERR = "penstock.mcp.server", "penstock.mcp.ended", "penstock.mcp.stderr"
"""Attributes: the server of the process, how it ended, its last lines on stderr."""
_log = logging.getLogger("penstock.mcp")


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
