"""A gateway in the test's own process before two upstreams that share a model, and a client of it."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import aiohttp
from fakes.odd import Odd, Script, Step, step
from fakes.raw import Wire
from fakes.rig import CHAT, Inside, inside, odd_on
from fakes.waiting import until

from penstock.gateway.model.facts import TRIES
from penstock.gateway.model.span import Span

NOTHING: Mapping[str, object] = MappingProxyType({})
PLAIN, STREAM = b'{"model":"m"}', b'{"model":"m","stream":true}'


@dataclass(slots=True)
class Pair:
    """Both, and a client."""

    rig: Inside
    up: Odd
    spare: Odd
    client: Wire

    async def ask(self, body: bytes = PLAIN, below: str = CHAT) -> bytes:
        """What is answered to a call."""
        self.client.send(self.rig.call(body, below=below))
        return await self.client.message()

    async def asked(self) -> None:
        """Returns when the first upstream has come to its step `says_so`."""
        await until(lambda: self.up.signal("asked").is_set())

    async def span(self) -> Span:
        """The only one."""
        return await self.rig.span()

    async def tries(self) -> list[tuple[str, str]]:
        """(upstream, why) of those that were asked before."""
        found = ((await self.span()).attributes or {}).get(TRIES, [])
        assert all(one["after_ms"] >= 0 for one in found)
        return [(one["upstream"], one["why"]) for one in found]


def says_so() -> Step:
    """The upstream has come to this."""
    return step(lambda connection: connection.upstream.go("asked"))


@asynccontextmanager
async def pair(
    home: Path,
    http: aiohttp.ClientSession,
    first: Script,
    second: Script,
    up: Mapping[str, object] = NOTHING,
    spare: Mapping[str, object] = NOTHING,
    route: Mapping[str, object] = NOTHING,
) -> AsyncGenerator[Pair]:
    """`first`, `second`: what the upstreams do; `up`, `spare`, `route`: more settings. Where the first one is to answer
    its patience is long: a machine may keep a process waiting. However a call ends, its place is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spares = [{"name": "spare", "base_url": f"http://127.0.0.1:{listener.getsockname()[1]}/v1", **spare}]
        routes = [{"model": "m", "upstream": ["up", "spare"], "alias": {"spare": "m-of-spare"}, **route}]
        own = {"max_concurrent": 9, "read_timeout": 600.0, **up}
        async with inside(home, http, spares, own, route=routes) as rig:
            async with AsyncExitStack() as stack:
                one = await stack.enter_async_context(rig.upstream(first))
                other = await stack.enter_async_context(odd_on(listener, second))
                yield Pair(rig, one, other, await stack.enter_async_context(rig.client()))
            places = rig.gateway.pools["up"].concurrency_limit
            await until(lambda: (places.running, places.waiting) == (0, 0))


Two: TypeAlias = Callable[..., AbstractAsyncContextManager[Pair]]
"""`pair`, of a test's own folder and session."""
