"""A connection that ended before it was used: its caller is told once, and not where it has left meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop
from fakes.odd import gone, odd

from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.upstream_settings import UpstreamSettings
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection


class Owner:
    name = "up"

    def __init__(self) -> None:
        self.connections = 0

    def put_back(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


class Caller:
    head_only = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        self.told.append(reason)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_connection_that_ended_before_it_was_used(leaves: bool) -> None:
    caller = Caller()
    async with odd([gone()]) as upstream:
        port = int(upstream.url.rpartition(":")[2])
        make = asyncio.get_running_loop().create_connection
        transport, connection = await make(lambda: UpstreamConnection(Owner()), "127.0.0.1", port)
        transport.close()
        connection.send(cast(Any, caller), b"GET / HTTP/1.1\r\n\r\n", b"")
        # Until then it is its caller: whoever looks for calls that nothing moves on any more must not find it.
        assert connection.caller is caller
        if leaves:
            connection.cancel()
        await (await upstream.connection(0)).gone()
    assert caller.told == ([] if leaves else ["upstream_closed"])
    assert connection.caller is None


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_that_is_given_up_as_it_comes_about_is_not_counted(
    run: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = UpstreamConnection.connection_made

    async def given_up() -> None:
        async with odd([gone()]) as upstream:
            pool = ConnectionPool(UpstreamSettings(name="up", base_url=upstream.url))

            def give_up(connection: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
                made(connection, transport)
                task.cancel()

            monkeypatch.setattr(UpstreamConnection, "connection_made", give_up)
            task = pool.connect(cast(Any, Caller()))
            with pytest.raises(asyncio.CancelledError):
                await task
            await (await upstream.connection(0)).gone()
            assert pool.connections == 0

    run(given_up())
