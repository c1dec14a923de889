"""The links between the workers of a gateway: the others have a link each with the first, which does the work that only
one may do.

A gateway that serves its port alone is the first, and has no others. The parent (`process.workers`) holds the sockets
by which links are made: if the first one dies, the others are linked with its successor as soon as that listens.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from penstock.gateway.model.facts import is_rehearsal
from penstock.gateway.process.handover import KEEP_SOCKET_FILE, short_socket_path
from penstock.gateway.tape.store.directory import WRITERS
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest, Tunnel
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection

# Messages between the workers of a gateway, over a Unix socket: msgpack, each with its length in front.
#
# Both ends ask and answer. An answer may take its time, others go on meanwhile. Messages arrive in the order in which
# they were sent, so an end that asks knows that its earlier messages were handled.

_LENGTH: Final = 4


Handler: TypeAlias = "Callable[..., Any]"
"""Takes the arguments of a message; returns the answer, or a future of it."""
_NOTHING: Final[Mapping[str, Handler]] = {}


class LinkLostError(ConnectionError):
    """The other end has died, or has closed the link."""


class WorkerLink(asyncio.Protocol):
    """One end of a link. For the event loop."""

    def __init__(
        self,
        made: Callable[[WorkerLink], None],
        lost: Callable[[WorkerLink], None],
        handlers: Mapping[str, Handler] = _NOTHING,
    ) -> None:
        """`made`, `lost`: called when the link is made, and when it is lost."""
        self.handlers = handlers
        """Handlers of the other end's messages, by name."""
        self._made, self._lost = made, lost
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering = set[asyncio.Future[None]]()
        self.name = ""
        """Name of the other process (`store.directory`), once it has sent it."""
        self.pid = 0
        """Process id of the other process, for people, once it has sent it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the questions that wait for an answer."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(LinkLostError("the other worker has died or has left"))
        self._asked.clear()
        for one in self._answering:
            one.cancel()
        self._lost(self)

    def close(self) -> None:
        self._transport.close()

    def notify(self, name: str, *said: Any) -> None:
        """Send a message that needs no answer."""
        self._send(0, name, said)

    def request(self, name: str, *said: Any) -> asyncio.Future[Any]:
        """Send a question; the future fails with `LinkLostError`, or with `RuntimeError` where the other end cannot
        answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            answer.set_exception(LinkLostError("the other worker has died or has left"))
        else:
            self._asked[number] = answer
            self._send(number, name, said)
        return answer

    def data_received(self, data: bytes) -> None:
        """Handle the messages that are complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH])
            if len(self._buffer) < end:
                return
            number, name, said = msgspec.msgpack.decode(memoryview(self._buffer)[_LENGTH:end])
            del self._buffer[:end]
            if name is None:
                self._is_answered(number, *said)
            else:
                self._is_asked(number, name, said)

    def _send(self, number: int, name: str | None, said: Any) -> None:
        if not self._transport.is_closing():
            made = msgspec.msgpack.encode((number, name, said))
            self._transport.write(len(made).to_bytes(_LENGTH) + made)

    def _is_answered(self, number: int, answer: Any, failure: str | None) -> None:
        waiting = self._asked.pop(number, None)
        if waiting is None or waiting.done():
            return
        if failure is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(RuntimeError(failure))

    def _is_asked(self, number: int, name: str, said: list[Any]) -> None:
        try:
            made = self.handlers[name](*said)
        except Exception as error:
            self._fails(number, name, error)
            return
        if isawaitable(made):
            answering = asyncio.ensure_future(made)
            self._answering.add(answering)
            answering.add_done_callback(partial(self._answer, number, name))
        elif number:
            self._send(number, None, (made, None))

    def _answer(self, number: int, name: str, done: asyncio.Future[Any]) -> None:
        self._answering.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._fails(number, name, error)
        elif number:
            self._send(number, None, (done.result(), None))

    def _fails(self, number: int, name: str, error: BaseException) -> None:
        _log.error("another worker has asked for %r, which failed", name, exc_info=error)
        if number:
            self._send(number, None, (None, f"{name!r} failed in another worker: its log says why"))


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


# The requests that a worker passes on to the first one, and the facts of a call that go with them.
#
# The first worker answers control requests, and calls whose state only it has: of servers of tools (their sessions,
# streams and open questions), of agents in rehearsal, and of exact routes.


class ForwardedCall(msgspec.Struct):
    """The facts of a call that the worker which received it has found out."""

    address: CallAddress
    dialect: str
    path: str
    host: tuple[str, int] | None
    """The host that its agent has called, behind a sidecar."""
    token: bool
    key: str | None


def encode_forwarded_call(client: ClientConnection, call: CallRequest) -> bytes:
    """Return the facts of a call as a header's value."""
    host = client.tunnel.direct_pool.address if isinstance(client.tunnel, Tunnel) else None
    return msgspec.json.encode(ForwardedCall(call.address, call.dialect.name, call.path, host, call.token, call.key))


def needs_leader(shared: ProxyContext, call: CallRequest) -> bool:
    """True if only the first worker can answer a call."""
    if call.dialect.family is MCP:
        return True
    if shared.pins.catalog.rehearses and is_rehearsal(call.address.rollout):
        return True
    if not shared.exact or not call.dialect.generates:
        return False
    if call.encodings is not None:
        # Its body has not been read yet.
        return True
    route = shared.routes.find(call.model or "")
    return route is not None and route.train == "exact"
