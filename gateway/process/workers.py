"""Several processes that serve one port: `penstock serve --workers N`. This is their parent, which serves nothing.

Each worker is a gateway with a socket of its own on the port; the system shares connections out between them. All write
one tape. The first one does the work that only one may do (`process.services`); the others reach it by two
sockets in the directory of the tape (`process.leader_rpc`). The parent holds all sockets and the tape's lock, so a
worker that dies loses none of them: another one is started in its place, and clients that have connected meanwhile
wait in the system's queue.

A parent and a worker have a channel between them, with the messages of two processes that hand over
(`process.handover`):

    parent                              worker
    sends sockets, lock and place       starts; then says `ready`
    says `go on`                        accepts, and says `serves`
    says `leave`: others take over      accepts no more, stops the work that only one may do; then says `left`, serves
                                        the calls that it has to their end, and ends
    says `stop`                         stops as at SIGTERM; the second time it ends every wait
    dies                                ends within a second: nobody could tell it to, and the next gateway waits

Signals are for the parent. A service manager may send them to all of its processes at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from secrets import randbelow
from typing import Final

from penstock.gateway.client.child_process import ChildProcess
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.toml import ConfigError, pluralized
from penstock.gateway.process.handover import (
    GO_ON,
    READY,
    HandoverGrant,
    HandoverOffer,
    ListenSockets,
    WorkerSlot,
    send,
    short_socket_path,
)
from penstock.gateway.process.leader_rpc import INSIDE
from penstock.gateway.process.listeners import address_of, bind_ports, bind_unix, rebind
from penstock.gateway.tape.store.directory import DIRECTORY_MODE, WRITERS, lock_directory

MOST: Final = 64
"""Workers of one gateway at most; their descriptors are in one message, which has room for some 250."""
_BACKLOG: Final = 4096
_LEAVE: Final = b"l"
_STOP: Final = b"s"
"""`_LEAVE` and `_STOP` have one byte each: they may come together."""
_LEFT: Final = b"left"
_SERVES: Final = b"serves"
_LONGEST: Final = 16
"""Bytes of a worker's message; it sends no second one before an answer."""
_AGAIN_S: Final = 1.0
"""Seconds after which a worker that has died before it served is started again."""
_ORPHAN_S: Final = 0.8
"""Seconds that a worker may take to end after its parent has died."""
_log = logging.getLogger("penstock.workers")


class WorkerProcess:
    """A worker, as its parent sees it."""

    def __init__(self, place: WorkerSlot, sockets: list[int]) -> None:
        self.place = place
        self.sockets = sockets
        """The sockets that it listens on; this process holds them as well."""
        self._process: ChildProcess | None = None
        self._channel: socket.socket | None = None
        self._reading: asyncio.Future[None] | None = None
        self._said: dict[bytes, asyncio.Event] = {}
        """An event for each message of the worker, set when it was received or the worker has died."""
        self._told = set[bytes]()

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], held: ListenSockets, lock: int
    ) -> bool:
        """Wait until the worker is ready for `go_on`; False where it has died before. Raises `ConfigError` where no
        process can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            send(ours, ListenSockets(held.host, held.port, self.sockets, held.path, held.unix), lock, self.place)
            try:
                # It gets the terminal's signals by its parent only. Its number is for people who look at processes.
                process = await asyncio.create_subprocess_exec(
                    *command, str(theirs.fileno()), f"worker {self.place.number} of {self.place.of}",
                    pass_fds=(theirs.fileno(),), env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"worker {self.place.number} cannot be started: {command[0]} cannot be executed ({error.strerror})"
                ) from None
        ours.setblocking(False)
        self._process = ChildProcess(process)
        self._channel, self._told = ours, set[bytes]()
        self._said = {words: asyncio.Event() for words in (READY, _SERVES, _LEFT)}
        self._reading = asyncio.ensure_future(self._read(ours))
        await self._said[READY].wait()
        return not self._reading.done()

    async def go_on(self) -> bool:
        """Wait until the worker accepts; False where it has died before."""
        assert self._reading is not None
        self._say(GO_ON)
        await self._said[_SERVES].wait()
        return not self._reading.done()

    async def leave(self) -> None:
        """Wait until the worker accepts no more, and has stopped the work that only one may do."""
        if GO_ON not in self._told:
            # The worker was being started in the place of one that had died.
            self.kill()
            return
        await self._said[_SERVES].wait()
        self._say(_LEAVE)
        await self._said[_LEFT].wait()

    def stop(self) -> None:
        """Tell the worker to end; a second call makes it end at once."""
        if GO_ON in self._told:
            self._say(_STOP)
        else:
            self.kill()

    def kill(self) -> None:
        """Kill a worker that has not served yet."""
        if self._process is not None:
            self._process.kill()

    async def ended(self) -> int:
        """Wait for the worker's end and return its exit status."""
        assert self._process is not None
        assert self._reading is not None
        status = await self._process.wait()
        await self._reading
        return status

    def _say(self, words: bytes) -> None:
        assert self._channel is not None
        self._told.add(words)
        with suppress(OSError):
            self._channel.send(words)

    async def _read(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with channel, suppress(OSError):
            while words := await loop.sock_recv(channel, _LONGEST):
                self._said[words].set()
        for said in self._said.values():
            said.set()


class WorkerSupervisor:
    """The parent of several gateways. `start`, then `stop`."""

    def __init__(
        self, config: GatewayConfig, count: int, command: Sequence[str], taken: HandoverGrant | None = None
    ) -> None:
        """`command` starts a worker; the descriptor of its channel is added. Raises `TapeError`."""
        config.refuse_open_door()
        _refuse_scarce_places(config, count)
        self._config, self._command, self._taken = config, command, taken
        # All workers make the same fingerprints of conversations (`calls.conversations`), which nobody can foresee.
        self._environment = {**os.environ, "PYTHONHASHSEED": str(randbelow(1 << 32))}
        self._lock = lock_directory(config.data) if taken is None else taken.lock
        # All workers share a clock: an attempt must not end because two of them have different ones.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        self._workers = [WorkerProcess(WorkerSlot(number, count, epoch_ns), []) for number in range(count)]
        self._held: ListenSockets
        self._inside: list[socket.socket] = []
        self._tending: list[asyncio.Future[None]] = []
        self._stopping = False
        """True if no worker is started any more: they end, or others take over."""
        self._over = asyncio.Event()
        self.offer: HandoverOffer
        """The offer to hand all of them over."""

    async def start(self) -> tuple[str, int]:
        """Start the workers; return host and port. Raises `ConfigError`."""
        self._bind()
        try:
            await self._begin_all()
            if self._taken is not None:
                await self._taken.ready()
        except ConfigError:
            for worker in self._workers:
                worker.kill()
            for name in INSIDE:
                (self._config.data / WRITERS / _own(name)).unlink(missing_ok=True)
            raise
        for name in INSIDE:
            os.rename(*(self._config.data / WRITERS / one for one in (_own(name), name)))
        serve = await asyncio.gather(*(worker.go_on() for worker in self._workers))
        self._tending = [asyncio.ensure_future(self._tend(*one)) for one in zip(self._workers, serve, strict=True)]
        self.offer = HandoverOffer(self._config.data, self._lock, self._held, self._let_go)
        return address_of(self._held.sockets[0])

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """End all workers, when running calls have ended; `hurry` ends every wait."""
        self._stopping = True
        self._over.set()
        if not self.offer.taken.is_set():
            self._stop_all()
        # Connections are refused once the workers listen no more.
        for handle in {handle for worker in self._workers for handle in worker.sockets}:
            os.close(handle)
        hurrying = asyncio.ensure_future(self._hurry(hurry or asyncio.Event()))
        await asyncio.gather(*self._tending)
        hurrying.cancel()
        await self.offer.close()
        for one in self._inside:
            one.close()
        if not self.offer.taken.is_set():
            for path in (*(self._config.data / WRITERS / name for name in INSIDE), self._config.socket):
                if path is not None:
                    path.unlink(missing_ok=True)
        os.close(self._lock)

    # -- starting and watching workers -------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Bind the sockets that the workers listen on."""
        config, taken, count = self._config, self._taken, len(self._workers)
        if taken is not None and config.host == taken.held.host and config.port in (0, taken.held.port):
            port = taken.held.port
            taken.used.update(taken.held.sockets)
            for worker in self._workers:
                # Some of more workers than sockets share one, some of fewer have several: no client is turned away.
                mine = taken.held.sockets[worker.place.number :: count]
                worker.sockets = mine or [os.dup(taken.held.sockets[worker.place.number % len(taken.held.sockets)])]
        else:
            made = bind_ports(config.host, config.port, count)
            port = made[0][0].getsockname()[1]
            for worker, sockets in zip(self._workers, made, strict=True):
                worker.sockets = [one.detach() for one in sockets]
        # Address by address, so that a gateway that takes over shares them out in the same way.
        by_address = zip_longest(*(worker.sockets for worker in self._workers))
        self._held = ListenSockets(config.host, port, [it for it in chain.from_iterable(by_address) if it is not None])
        if config.socket is not None:
            self._held.path, self._held.unix = str(config.socket), self._unix(config.socket)
        self._inside = [_inside(config.data, name) for name in INSIDE]
        relays, links = (one.fileno() for one in self._inside)
        self._workers[0].place = replace(self._workers[0].place, inside=(relays, links))

    def _unix(self, path: Path) -> int:
        taken = self._taken
        if taken is not None and taken.held.unix is not None and taken.held.path == str(path):
            taken.used.add(taken.held.unix)
            return taken.held.unix
        try:
            return bind_unix(path).detach()
        except OSError as error:
            raise ConfigError(f"cannot listen on the socket {path}: {error.strerror or error}") from None

    async def _begin_all(self) -> None:
        first, *others = self._workers
        # The first one makes the tape if need be, and reports errors of the configuration, once.
        if not await self._begin(first) or not all(await asyncio.gather(*map(self._begin, others))):
            raise ConfigError("a worker has not started: its own words are above, unless it was killed")

    async def _begin(self, worker: WorkerProcess) -> bool:
        return await worker.start(self._command, self._environment, self._held, self._lock)

    async def _tend(self, worker: WorkerProcess, served: bool) -> None:
        """Start a worker again whenever it has died."""
        while True:
            status = await worker.ended()
            if self._stopping:
                return
            said = f"was killed by signal {-status}" if status < 0 else f"has ended with status {status}"
            _log.error("worker %d %s: another one is started", worker.place.number, said)
            if not served:
                await self._wait(worker)
            served = await self._begin_again(worker)
            if served and not self._stopping:
                served = await worker.go_on()
            if self._stopping:
                worker.stop()

    async def _begin_again(self, worker: WorkerProcess) -> bool:
        while not self._stopping:
            try:
                return await self._begin(worker)
            except ConfigError as error:
                _log.error("%s", error)
                await self._wait(worker)
        return False

    async def _wait(self, worker: WorkerProcess) -> None:
        """Wait until the next try to start a worker, unless none is started any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):
                await self._over.wait()
        if not self._stopping:
            self._rebind(worker)

    def _rebind(self, worker: WorkerProcess) -> None:
        """Replace the sockets of a worker that cannot be started: its clients must not wait, the other workers get
        them."""
        made = {handle: rebind(handle) for handle in worker.sockets}
        worker.sockets = list(made.values())
        self._held.sockets[:] = [made.get(handle, handle) for handle in self._held.sockets]

    async def _let_go(self) -> None:
        """Called when other workers are ready to take over: each worker leaves. One that has left, or dies meanwhile,
        is not started again."""
        self._stopping = True
        self._over.set()
        await asyncio.gather(*(worker.leave() for worker in self._workers))

    async def _hurry(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self._stop_all()

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.stop()


class ParentChannel:
    """The end of a worker: the counterpart of `handover.HandoverOffer` for its parent."""

    def __init__(self, channel: socket.socket, let_go: Callable[[], Awaitable[None]]) -> None:
        self._channel, self._let_go = channel, let_go
        self.taken = asyncio.Event()
        """Set when another process has taken over."""
        self.stop: Callable[[], None]
        """Called when the worker is to stop; set before anything else is awaited."""
        self._task: asyncio.Future[None] = asyncio.ensure_future(self._serve())

    async def close(self) -> None:
        """Close the channel to the parent."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._channel.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            await loop.sock_sendall(self._channel, _SERVES)
            while said := await loop.sock_recv(self._channel, 1):
                if said == _STOP:
                    self.stop()
                elif said == _LEAVE:
                    await self._let_go()
                    self.taken.set()
                    await loop.sock_sendall(self._channel, _LEFT)
        _log.error("the parent of this worker has died: it stops")
        self.stop()
        # A second stop: no call may keep the tape from the gateway that is started next.
        self.stop()


def end_with_parent(channel: int) -> None:
    """End this worker soon after its parent has died, whatever it is doing. Runs on a thread of its own. `channel`: a
    descriptor of the channel that nobody else closes."""
    hung_up = select.poll()
    hung_up.register(channel, 0)
    hung_up.poll()
    time.sleep(_ORPHAN_S)
    os._exit(1)


def _own(name: str) -> str:
    """Return the name of such a socket until its gateway has taken over."""
    return f"{name}.{os.getpid()}"


def _inside(data: Path, name: str) -> socket.socket:
    """Return a socket by which workers reach the first one. Its name belongs to the gateway that does the work that
    only one may do: workers of a gateway that hands over find the next one there."""
    (data / WRITERS).mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    for left in (data / WRITERS).glob(f"{name}.*"):
        # Left by a gateway that was killed before it had taken over: only the holder of the tape's lock gets here.
        left.unlink(missing_ok=True)
    with short_socket_path(data, f"{WRITERS}/{_own(name)}") as path:
        made.bind(path)
        os.chmod(path, 0o600)
    made.listen(_BACKLOG)
    return made


def _refuse_scarce_places(config: GatewayConfig, count: int) -> None:
    """Refuse a configuration in which an upstream has fewer places than workers: they share its places out, and each
    needs one."""
    for upstream in config.upstreams():
        if upstream.max_concurrent is not None and upstream.max_concurrent < count:
            raise ConfigError(
                f"upstream {upstream.name!r} takes {pluralized(upstream.max_concurrent, 'call')} at a time "
                f"(max_concurrent), which {count} workers cannot share: start fewer workers"
            )
