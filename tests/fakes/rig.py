"""A gateway process between the two ends of a test: a raw client in front, an odd upstream behind.

Starting a process takes longer than most of these tests, so one gateway serves a module (`Base`, made without an event
loop) and each test brings its own upstream, which takes over the listening socket for as long as it runs. Tests keep
apart by rollout. `inside` is a gateway in the test's own process, for faults that must be planted in it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import aiohttp
from fakes.odd import Connection, Odd, Script, request, send
from fakes.preloaded import alone
from fakes.process import PATIENCE, ROOT, forget_peak, memory_of, upstream, write_config
from fakes.raw import Headers, Wire, connect, post, reply
from fakes.tape import Tape
from fakes.waiting import when

from penstock.gateway.app import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.answers import SpanPage
from penstock.gateway.model.span import Span

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
GOOD = reply(200, b"{}")
BACKLOG = 4096
"""The kernel tells a connection that finds this full only seconds later that it should try again, and sometimes never.
"""


@dataclass(slots=True)
class Base:
    """A running gateway and the socket that its upstreams listen on."""

    url: str
    data: Path
    log_path: Path
    listener: socket.socket
    pid: int

    @property
    def upstream_host(self) -> str:
        """What the gateway calls its upstream in `Host`."""
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def memory(self) -> int:
        """Resident memory of its process; bytes."""
        return memory_of(self.pid)

    @property
    def peak(self) -> int:
        """The most that it was since `forget_peak`; bytes."""
        return memory_of(self.pid, "VmHWM")

    def forget_peak(self) -> None:
        """From now on the most is what it is now."""
        forget_peak(self.pid)

    @contextmanager
    def grows_less_than(self, most: int) -> Generator[None]:
        """Its memory never grows by so many bytes meanwhile."""
        self.forget_peak()
        before = self.memory
        yield
        grown = self.peak - before
        assert grown < most, f"{grown >> 20} MB"

    @property
    def log(self) -> str:
        """What the gateway has written to stderr so far."""
        return self.log_path.read_text()


@dataclass(slots=True)
class Rig:
    """What one test works with."""

    base: Base
    tape: Tape
    rollout: str

    @property
    def host(self) -> str:
        return self.base.upstream_host

    def path(self, below: str = CHAT) -> str:
        """A path at the test's own rollout."""
        return f"/rollout/{self.rollout}/attempt/a1{below}"

    def call(self, body: bytes = b'{"model":"m"}', headers: Headers = (), below: str = CHAT) -> bytes:
        """A POST at the test's own rollout."""
        return post(self.path(below), body, headers)

    def client(self) -> AbstractAsyncContextManager[Wire]:
        """A client of the gateway."""
        return connect(self.base.url)

    def upstream(self, *scripts: Script) -> AbstractAsyncContextManager[Odd]:
        """An upstream that plays these scripts."""
        return odd_on(self.base.listener, *scripts)

    async def passes(self, sent: bytes | None = None, answer: bytes = GOOD) -> tuple[bytes, bytes]:
        """One call that is answered so: what its client gets, and what the upstream was sent."""
        async with self.upstream([request(), send(answer)]) as upstream, self.client() as client:
            client.send(self.call() if sent is None else sent)
            got = await client.message()
            return got, (await upstream.connection(0)).requests[0]

    async def unaddressed(self, count: int) -> list[Span]:
        """The spans of calls to paths with the test's rollout in the query, oldest first, as soon as there are so
        many."""

        async def ended() -> list[Span]:
            page = SpanPage.model_validate(await self.tape.get("/api/spans?limit=1000"))
            return [span for span in page.spans if self.rollout in span.path and span.status != "open"]

        return sorted(await when(ended, lambda spans: len(spans) >= count), key=lambda span: span.start_ns)

    async def span(self) -> Span:
        """The only span of the test."""
        return (await self.tape.spans(self.rollout, 1))[0]


@asynccontextmanager
async def odd_on(listener: socket.socket, *scripts: Script) -> AsyncGenerator[Odd]:
    """An odd upstream on a socket that goes on listening when it is over."""
    made = Odd(scripts)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(made), sock=listener.dup(), backlog=BACKLOG
    )
    try:
        yield made
    finally:
        server.close()
        await made.close()
        await server.wait_closed()


@contextmanager
def based(
    home: Path, config: str = "", upstream_config: str = "", env: Mapping[str, str] | None = None
) -> Generator[Base]:
    """A running gateway process. `config` goes before the upstreams, `upstream_config` into each of them."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        entries = (upstream("up", url + "/v1", "openai"), upstream("anthropic-up", url, "anthropic"))
        text = config + "\n" + "".join(entry.rstrip("\n") + f"\n{upstream_config}\n\n" for entry in entries)
        command = ("serve", "--config", write_config(home, text), "--data", home / "data", "--port", "0")
        with (home / "stderr").open("wb") as log:
            process = alone(*command, env=dict(os.environ) | {"PYTHONPATH": str(ROOT)} | dict(env or {}), stderr=log)
        try:
            line = process.output.readline().decode()
            assert line.startswith("penstock listening on "), (home / "stderr").read_text()
            yield Base(line.split()[-1], home / "data", home / "stderr", listener, process.pid)
        finally:
            process.terminate()
            process.wait(PATIENCE)
            print((home / "stderr").read_text())


@dataclass(slots=True)
class Inside(Rig):
    """A rig whose gateway runs in the test's own process."""

    gateway: Gateway


@asynccontextmanager
async def inside(
    home: Path,
    http: aiohttp.ClientSession,
    spares: Sequence[Mapping[str, object]] = (),
    first: Mapping[str, object] = MappingProxyType({}),
    **config: object,
) -> AsyncGenerator[Inside]:
    """A gateway with this configuration in this process, stopped at the end. `spares`: more upstreams; `first`: what
    else is said of the first one."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        upstreams: list[Mapping[str, object]] = [
            {"name": "up", "base_url": url + "/v1", "dialect": "openai", **first},
            {"name": "anthropic-up", "base_url": url, "dialect": "anthropic"},
            *spares,
        ]
        gateway = Gateway(
            GatewayConfig.model_validate({"upstream": upstreams, "data": home / "data", "port": 0} | config)
        )
        host, port = await gateway.start()
        base = Base(f"http://{host}:{port}", home / "data", home / "stderr", listener, os.getpid())
        try:
            yield Inside(base, Tape(base.url, http), "inside", gateway)
        finally:
            await gateway.stop()


Within: TypeAlias = Callable[..., AbstractAsyncContextManager[Inside]]
"""`inside`, of a test's own folder and session."""
