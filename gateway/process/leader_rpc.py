"""The links between the workers of a gateway (`process.worker_link`): the others have a link each with the first, which
does the work that only one may do.

A gateway that serves its port alone is the first, and has no others. The parent (`process.workers`) holds the sockets
by which links are made: if the first one dies, the others are linked with its successor as soon as that listens.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.gateway.process.handover import KEEP_SOCKET_FILE, short_socket_path
from penstock.gateway.process.worker_link import Handler, LinkLostError, WorkerLink
from penstock.gateway.tape.store.processes import WRITERS

RELAY: Final = "relay.sock"
LINKS: Final = "links.sock"
INSIDE: Final = (RELAY, LINKS)
"""Names of the first worker's sockets, in the directory of the tape: for requests that only it answers, and for
links."""
PATIENCE_S: Final = 5.0
"""Seconds that the first one waits for an answer of another. One that is stopped must not stop all."""
_AGAIN_S: Final = 0.5
_log = logging.getLogger("penstock.workers")


class LeaderServer:
    """The first worker's end of all links."""

    def __init__(
        self, joined: Callable[[WorkerLink, dict[str, Any]], None], left: Callable[[WorkerLink], None]
    ) -> None:
        """`joined`: called with the link of a new worker and its hello; `left`: called when that is gone."""
        self.links: list[WorkerLink] = []
        """Links to workers that have sent their hello."""
        self._joined, self._left = joined, left
        self.alone = asyncio.Event()
        """Set while there are no links."""
        self.alone.set()
        self._servers: list[asyncio.Server] = []

    async def start(
        self,
        relays: int,
        links: int,
        inside: Callable[[], asyncio.Protocol],
        handlers: Callable[[WorkerLink], Mapping[str, Handler]],
    ) -> None:
        """Listen on two sockets. `inside`: makes the protocol of a request that another worker passes on; `handlers`:
        makes the handlers of a link's messages."""
        loop = asyncio.get_running_loop()

        def make() -> WorkerLink:
            def hello(said: dict[str, Any]) -> None:
                self._hello(link, said)

            link = WorkerLink(lambda _: None, self._lost)
            link.handlers = {**handlers(link), "hello": hello}
            return link

        for handle, makes in ((relays, inside), (links, make)):
            listener = socket.socket(fileno=handle)
            self._servers.append(await loop.create_unix_server(makes, sock=listener, **KEEP_SOCKET_FILE))

    async def stop(self) -> None:
        """Close all links and sockets."""
        for server in self._servers:
            server.close()
        for link in list(self.links):
            link.close()

    def notify(self, name: str, *said: Any) -> None:
        """Send a message to all others."""
        for link in self.links:
            link.notify(name, *said)

    async def request(self, name: str, *said: Any) -> dict[str, Any]:
        """Return the answers of the others, by the names of their processes. There is none of a worker that dies
        meanwhile, cannot answer, or does not in time."""
        asked = {link: link.request(name, *said) for link in self.links}
        if not asked:
            return {}
        done, late = await asyncio.wait(asked.values(), timeout=PATIENCE_S)
        for one in late:
            one.cancel()
        answers: dict[str, Any] = {}
        for link, one in asked.items():
            if one not in done:
                _log.error(
                    "the worker with process id %d has not answered %r within %g s: it stands still, or has too little "
                    "CPU; what connects to it waits",
                    link.pid, name, PATIENCE_S,
                )  # fmt: skip
            elif (error := one.exception()) is None:
                answers[link.name] = one.result()
            elif not isinstance(error, LinkLostError):
                _log.error("the worker with process id %d: %s", link.pid, error)
        return answers

    def _hello(self, link: WorkerLink, said: dict[str, Any]) -> None:
        # A worker that was restarted after an upgrade may send more than this one knows, or less.
        link.name, link.pid = said["process"], said.get("pid", 0)
        self.links.append(link)
        self.alone.clear()
        self._joined(link, said)

    def _lost(self, link: WorkerLink) -> None:
        if link in self.links:
            self.links.remove(link)
            if not self.links:
                self.alone.set()
            self._left(link)


class LeaderClient:
    """Another worker's end of its link. `start` before use."""

    def __init__(self) -> None:
        self._hello: Callable[[], dict[str, Any]]
        self._handlers: Mapping[str, Handler]
        self._alone: Callable[[], Awaitable[None]]
        self._link: WorkerLink | None = None
        self._there = asyncio.Event()
        self._gone = asyncio.Event()
        self._leaves = False
        self._task: asyncio.Future[None] | None = None

    def start(
        self,
        data: Path,
        hello: Callable[[], dict[str, Any]],
        handlers: Mapping[str, Handler],
        alone: Callable[[], Awaitable[None]],
    ) -> None:
        """Make the link, and make it again whenever it is lost. `hello` makes the first message to each first worker;
        its `process` is this worker's name. `handlers`: of the first worker's messages. `alone`: awaited when the link
        is lost, before it is made again."""
        self._hello, self._handlers, self._alone = hello, handlers, alone
        self._task = asyncio.ensure_future(self._run(data))

    def leave(self) -> None:
        """Make no further link: another gateway takes over, whose first worker knows nothing of this one."""
        self._leaves = True
        self._there.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._link is not None:
            self._link.close()

    def notify(self, name: str, *said: Any) -> None:
        """Send a message to the first worker, if there is one."""
        if self._link is not None:
            self._link.notify(name, *said)

    @property
    def linked(self) -> bool:
        """True if there is a link to a first worker now."""
        return self._link is not None

    async def request(self, name: str, *said: Any) -> Any:
        """Return the first worker's answer, after waiting for a successor that is being started; None where nobody
        answers."""
        if self._link is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._there.wait()
        if self._link is None:
            _log.error("the first worker cannot be asked for %r: it is not there", name)
        return await self.request_now(name, *said)

    async def request_now(self, name: str, *said: Any) -> Any:
        """Return the first worker's answer without waiting for a successor."""
        if self._link is None:
            return None
        try:
            return await self._link.request(name, *said)
        except (LinkLostError, RuntimeError) as error:
            _log.error("the first worker was asked for %r: %s", name, error)
            return None

    async def _run(self, data: Path) -> None:
        loop = asyncio.get_running_loop()
        while not self._leaves:
            try:
                with short_socket_path(data, f"{WRITERS}/{LINKS}") as path:
                    await loop.create_unix_connection(lambda: WorkerLink(self._made, self._lost, self._handlers), path)
            except OSError as error:
                _log.error("the first worker cannot be reached: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                await self._gone.wait()
                await self._alone()

    def _made(self, link: WorkerLink) -> None:
        self._link = link
        self._gone.clear()
        self._there.set()
        link.notify("hello", self._hello())

    def _lost(self, link: WorkerLink) -> None:
        self._link = None
        if not self._leaves:
            self._there.clear()
        self._gone.set()
