"""One process hands over to the next: the port, the Unix socket and the tape, so that no connection is refused.

    the next process                    the one that serves
    connects to its socket in <data>    sends its sockets, and the tape's lock, as descriptors
    starts; then says `ready`           accepts no more, stops the work that only one may do, and when every call that
                                        has ended is on the tape, says `go on`
    accepts, and does the rest          serves the calls that it has to their end, and ends

Clients that connect in between wait in the system's queue. If the next process cannot start, the first one has given
nothing away and goes on.

If several processes serve one port (`process.workers`), their parent stands between: it hands over for all of them, and
sends each of them the same messages on a channel of its own.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from penstock.gateway.model.toml import ConfigError
from penstock.gateway.tape.store.directory import WRITERS

_NAME: Final = f"{WRITERS}/handover.sock"
READY: Final = b"ready"
GO_ON: Final = b"go on"
_DESCRIPTORS: Final = 253
"""The most descriptors that Linux sends at once."""
_PATIENCE_S: Final = 60.0
"""Seconds that the next process waits for the one that serves."""
KEEP_SOCKET_FILE: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""Options of a server on a Unix socket whose file the loop leaves alone: it belongs to the process that takes over.
Before Python 3.13 there is no option, and the loop always leaves it alone."""
_log = logging.getLogger("penstock.handover")


@dataclass(slots=True)
class ListenSockets:
    """The sockets of a gateway."""

    host: str
    """The host as configured."""
    port: int
    sockets: list[int]
    """Descriptors of the port: one for each address of the host."""
    path: str | None = None
    """Path of the Unix socket."""
    unix: int | None = None
    """Descriptor of the Unix socket."""

    @property
    def descriptors(self) -> list[int]:
        """All descriptors: those of the port, and that of the Unix socket."""
        return [*self.sockets, *([] if self.unix is None else [self.unix])]


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The place of this process among those that serve one port."""

    number: int
    """From 0. Process 0 does the work that only one may do."""
    of: int
    """Number of processes."""
    epoch_ns: int = 0
    """Start of the clock that all of them share, whatever has happened to the machine's clock since the first one was
    started; 0 where there are no others."""
    inside: tuple[int, int] | None = None
    """Descriptors, for the first process, of the sockets by which the others reach it (`process.leader_rpc`)."""

    def share(self, most: int) -> int:
        """Return this process's share of `most` places."""
        return most // self.of + (self.number < most % self.of)


ALONE: Final = WorkerSlot(0, 1)


@dataclass(slots=True)
class HandoverGrant:
    """The descriptors that the serving process, or a parent, has sent; `ready` ends the service of that process."""

    held: ListenSockets
    lock: int
    pid: int
    """Process id of the process that serves, or of the parent."""
    channel: socket.socket
    place: WorkerSlot = ALONE
    used: set[int] = field(default_factory=set[int])
    """Descriptors that this process listens on."""

    async def ready(self) -> None:
        """Report that everything is started except the work that only one may do; return when the other process has
        stopped that work. Descriptors that are not in `used` are closed, and so is the channel, unless a parent has the
        other end. Raises `ConfigError`."""
        self._close_rest()
        loop = asyncio.get_running_loop()
        self.channel.setblocking(False)
        said = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await loop.sock_sendall(self.channel, READY)
                said = await loop.sock_recv(self.channel, len(GO_ON))
        if said != GO_ON or self.place is ALONE:
            self.channel.close()
        if said == GO_ON:
            return
        if self.place is ALONE:
            raise ConfigError(f"the gateway that serves (process {self.pid}) has not handed over: see its log")
        raise ConfigError(f"worker {self.place.number} ends: its parent (process {self.pid}) ended before they served")

    def _close_rest(self) -> None:
        """Close the descriptors that this process does not listen on."""
        for handle in set(self.held.descriptors) - self.used:
            os.close(handle)


def request_handover(data: Path) -> HandoverGrant | None:
    """Take over from the gateway that writes this tape; None where there is none. Raises `ConfigError`."""
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(_PATIENCE_S)
    try:
        with short_socket_path(data, _NAME) as path:
            channel.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    try:
        return receive_grant(channel)
    except (OSError, ValueError):
        channel.close()
        raise ConfigError(f"the gateway that writes the tape in {data} is busy handing over: try again") from None


def receive_grant(channel: socket.socket) -> HandoverGrant:
    """Return the message of `send` that comes on a channel; raises `OSError` or `ValueError`."""
    told, handles, _, _ = socket.recv_fds(channel, 1 << 16, _DESCRIPTORS)
    for handle in handles:
        # Children of this process must not hold the port or the tape's lock.
        os.set_inheritable(handle, False)
    found = json.loads(told)
    place = ALONE if found["place"] is None else WorkerSlot(*found["place"])
    if found["inside"]:
        place = replace(place, inside=(handles.pop(), handles.pop()))
    unix = None if found["path"] is None else handles.pop()
    lock, *sockets = handles
    return HandoverGrant(
        ListenSockets(found["host"], found["port"], sockets, found["path"], unix), lock, found["pid"], channel, place
    )


def send(channel: socket.socket, held: ListenSockets, lock: int, place: WorkerSlot = ALONE) -> None:
    """Send another process the descriptors that it needs to serve; raises `OSError`."""
    told = {"host": held.host, "port": held.port, "path": held.path, "pid": os.getpid()}
    told |= {
        "place": None if place is ALONE else [place.number, place.of, place.epoch_ns],
        "inside": place.inside is not None,
    }
    handles = [lock, *held.descriptors, *reversed(place.inside or ())]
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))
    _ = channel.sendmsg([json.dumps(told).encode()], [rights])


class HandoverOffer:
    """The serving process's end of a handover."""

    def __init__(self, data: Path, lock: int, held: ListenSockets, let_go: Callable[[], Awaitable[None]]) -> None:
        """`let_go`: stops the work that only one may do; called once, when the next process is ready."""
        self._data, self._lock, self._held, self._let_go = data, lock, held, let_go
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        with short_socket_path(data, _NAME) as path:
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(1)
        self._task: asyncio.Future[None] = asyncio.ensure_future(self._serve())
        self.taken = asyncio.Event()
        """Set when another process has taken over."""

    async def close(self) -> None:
        """Withdraw the offer and its socket."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._withdraw()

    def _withdraw(self) -> None:
        if self._listener.fileno() != -1:
            self._listener.close()
            (self._data / _NAME).unlink(missing_ok=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.taken.is_set():
            channel, _ = await loop.sock_accept(self._listener)
            with channel:
                try:
                    await self._give(channel)
                except OSError as error:
                    _log.error("another process has asked to take over and is gone (%s): this one goes on", error)

    async def _give(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        send(channel, self._held, self._lock)
        if await loop.sock_recv(channel, len(READY)) != READY:
            _log.error("the process that was to take over has not started: this one goes on as it is")
            return
        await self._let_go()
        # The next process has its own descriptors.
        self._withdraw()
        self.taken.set()
        await loop.sock_sendall(channel, GO_ON)


@contextmanager
def short_socket_path(data: Path, name: str) -> Generator[str]:
    """Yield a path of a socket in the directory of the tape that fits into an address, which has room for a hundred
    bytes."""
    path = str(data / name)
    if len(os.fsencode(path)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    handle = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)
