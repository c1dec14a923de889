"""An upstream that does exactly what its script says, byte for byte and step for step.

A script is a list of steps, played for one connection; the scripts are dealt to the connections in order of arrival and
the last one is dealt again to all that follow. What arrives is kept exactly, and the test sees when the peer leaves:

    async with odd([request(), send(events_head()), send(chunk(b"data: 1\\n\\n")), wait("go"), abort()]) as upstream:
        ...
        upstream.go("go")
        assert (await upstream.connection(0)).received == b"POST /v1/..."

When a script is over its connection stays open until the peer leaves or the test ends. A script that breaks (the peer
left early) is the test's to judge: see `Connection.failure`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable

from fakes.raw import Gone, Wire
from fakes.waiting import News

Step = Callable[["Connection"], Awaitable[None]]
Script = Sequence[Step]


class Connection(Wire):
    """One connection to the odd upstream."""

    def __init__(self, upstream: Odd) -> None:
        super().__init__()
        self.upstream = upstream
        self.requests: list[bytes] = []
        """Whole requests taken by `request()` steps, head and body, as they came."""
        self.failure: Gone | None = None
        """Why the script stopped before its end."""
        self.finished = asyncio.Event()
        """Set when the script is over, one way or the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.upstream.arrived(self)

    async def play(self, script: Script) -> None:
        """Take the steps in turn."""
        try:
            for take in script:
                await take(self)
        except Gone as gone:
            self.failure = gone
        finally:
            self.finished.set()


class Odd:
    """The upstream: deals scripts to connections and remembers both."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.connections: list[Connection] = []
        self.url = ""
        self._players: set[asyncio.Task[None]] = set()
        self._arrival = News()
        self._signals: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def arrived(self, connection: Connection) -> None:
        """A connection was made: deal it its script."""
        script = self.scripts[min(len(self.connections), len(self.scripts) - 1)]
        self.connections.append(connection)
        player = asyncio.get_running_loop().create_task(connection.play(script))
        self._players.add(player)
        self._arrival.tell()

    def signal(self, name: str) -> asyncio.Event:
        """The named event that `wait` steps wait for."""
        return self._signals[name]

    def go(self, name: str) -> None:
        """Let the scripts that wait for this name go on."""
        self.signal(name).set()

    async def connection(self, index: int) -> Connection:
        """The connection of this number, from 0, as soon as it is there."""
        await self._arrival.until(lambda: len(self.connections) > index)
        return self.connections[index]

    async def close(self) -> None:
        """Stop the scripts and break off what is still open."""
        for player in self._players:
            player.cancel()
        results = await asyncio.gather(*self._players, return_exceptions=True)
        for connection in self.connections:
            connection.transport.abort()
        broken = [result for result in results if isinstance(result, Exception)]
        if broken:
            raise ExceptionGroup("scripts of the odd upstream broke", broken)


@asynccontextmanager
async def odd(*scripts: Script) -> AsyncGenerator[Odd]:
    """Run an odd upstream on a free port."""
    upstream = Odd(scripts)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(upstream), "127.0.0.1", 0)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        await upstream.close()
        await server.wait_closed()


def step(act: Callable[[Connection], object]) -> Step:
    """Do this, to its end."""

    async def take(connection: Connection) -> None:
        done = act(connection)
        if isawaitable(done):
            await done

    return take


def request() -> Step:
    """Take one whole request."""

    async def take(connection: Connection) -> None:
        connection.requests.append(await connection.message())

    return take


def request_head() -> Step:
    """Take the head of a request and leave its body alone."""
    return step(lambda connection: connection.until(b"\r\n\r\n"))


def send(data: bytes) -> Step:
    """Write these bytes in one go."""
    return step(lambda connection: connection.send(data))


def wait(name: str) -> Step:
    """Wait for the test's `go(name)`."""
    return step(lambda connection: connection.upstream.signal(name).wait())


def gone() -> Step:
    """Wait for the peer to leave."""
    return step(Connection.gone)


def half_close() -> Step:
    """Send no more, go on receiving."""
    return step(Connection.half_close)


def close() -> Step:
    """Close in order."""
    return step(Connection.close)


def abort() -> Step:
    """Break off with a reset."""
    return step(Connection.abort)
