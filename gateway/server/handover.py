"""One process hands over to the next: the port, the Unix socket and the tape, so that no connection is refused.

    the next process                    the one that serves
    connects to its socket in <data>    sends what it listens on, and the tape's lock, as descriptors
    starts; then says `ready`           accepts no more, stops what only one may do, and when every call that has ended
                                        is on the tape, says `go on`
    accepts, and does the rest          serves the calls that it has to their end, and ends

Clients that connect in between wait in the system's queue. Where the next process cannot start, the first one has
given nothing away and goes on.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.gateway.model.toml import ConfigError
from penstock.gateway.store.processes import WRITERS

_NAME: Final = f"{WRITERS}/handover.sock"
_READY: Final = b"ready"
_GO_ON: Final = b"go on"
_DESCRIPTORS: Final = 64
_PATIENCE_S: Final = 60.0
"""How long the next process waits for the one that serves."""
_log = logging.getLogger("penstock.handover")


@dataclass(slots=True)
class Held:
    """What a gateway listens on."""

    host: str
    """As it was configured."""
    port: int
    sockets: list[int]
    """Descriptors of the port: one for each address of the host."""
    path: str | None = None
    """Of the Unix socket."""
    unix: int | None = None
    """Its descriptor."""


@dataclass(slots=True)
class Taken:
    """What the process that serves has sent; `ready` ends its time."""

    held: Held
    lock: int
    pid: int
    """The process that serves."""
    channel: socket.socket
    used: set[int] = field(default_factory=set[int])
    """Descriptors that are listened on here."""

    async def ready(self) -> None:
        """All is started but what only one may do: returns when the other does that no more. What is not in `used` is
        closed. Raises `ConfigError`."""
        self._close_rest()
        loop = asyncio.get_running_loop()
        self.channel.setblocking(False)
        said = b""
        with self.channel, suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await loop.sock_sendall(self.channel, _READY)
                said = await loop.sock_recv(self.channel, len(_GO_ON))
        if said != _GO_ON:
            raise ConfigError(f"the gateway that serves (process {self.pid}) has not handed over: see its log")

    def _close_rest(self) -> None:
        """Closes what was sent and is not listened on here."""
        unix = [] if self.held.unix is None else [self.held.unix]
        for handle in {*self.held.sockets, *unix} - self.used:
            os.close(handle)


def take(data: Path) -> Taken | None:
    """What the gateway that writes this tape hands over; None where there is none. Raises `ConfigError`."""
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(_PATIENCE_S)
    try:
        with _short(data) as path:
            channel.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    try:
        told, handles, _, _ = socket.recv_fds(channel, 1 << 16, _DESCRIPTORS)
        held = json.loads(told)
        unix = None if held["path"] is None else handles.pop()
        lock, *sockets = handles
        return Taken(Held(held["host"], held["port"], sockets, held["path"], unix), lock, held["pid"], channel)
    except (OSError, ValueError):
        channel.close()
        raise ConfigError(f"the gateway that writes the tape in {data} is busy handing over: try again") from None


class Offer:
    """The end of the process that serves."""

    def __init__(self, data: Path, lock: int, held: Held, let_go: Callable[[], Awaitable[None]]) -> None:
        """`let_go`: stops what only one may do; called once, when the next process is ready."""
        self._data, self._lock, self._held, self._let_go = data, lock, held, let_go
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        with _short(data) as path:
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(1)
        self._task: asyncio.Future[None] = asyncio.ensure_future(self._serve())
        self.taken = asyncio.Event()
        """Another process serves now."""

    async def close(self) -> None:
        """Hands over nothing any more."""
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
        loop, held = asyncio.get_running_loop(), self._held
        told = {"host": held.host, "port": held.port, "path": held.path, "pid": os.getpid()}
        handles = [self._lock, *held.sockets, *([] if held.unix is None else [held.unix])]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))
        _ = channel.sendmsg([json.dumps(told).encode()], [rights])
        if await loop.sock_recv(channel, len(_READY)) != _READY:
            _log.error("the process that was to take over has not started: this one goes on as it is")
            return
        await self._let_go()
        # The next one has its own.
        self._withdraw()
        self.taken.set()
        await loop.sock_sendall(channel, _GO_ON)


@contextmanager
def _short(data: Path) -> Generator[str]:
    """A path of the socket that fits into an address, which has room for a hundred bytes."""
    path = str(data / _NAME)
    if len(os.fsencode(path)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    handle = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{_NAME}"
    finally:
        os.close(handle)
