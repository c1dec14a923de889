"""Which tests `make test` runs, and fixtures that every test may ask for: a real gateway process, a scripted provider.

`make test` leaves out what is marked `slow`. A test that starts a process is slow, and fails there if it is not marked
so; one whose fixture starts a gateway for it is marked here. What a module shares costs each of its tests little, and
does not count. `smoke` marks the slow tests that `make test` runs all the same: one or two of each package, with real
processes.

What a gateway wrote to stderr is printed when its test is over; pytest shows it for tests that failed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.engine import FakeEngine, engine
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider, serving
from fakes.tape import Tape
from hypothesis import settings

from penstock.gateway.client.client import Client

# Time never decides a test. CI runs the same examples every time, so few are enough: what is new is found on
# developers' machines.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "here")

NEEDS = {
    "deltalake": ["gateway/followers/lake"],
    "duckdb": ["gateway/followers/index", "gateway/api/test_sql.py"],
    "hadolint": ["deploy"],
    "kubernetes": ["sidecar/engines/test_kubernetes.py"],
    "ray": ["sidecar/engines/test_ray.py"],
}
"""Tests of what an extra brings, by a library of it: they are slow, and not collected where it is not installed."""

collect_ignore = [path for library, paths in NEEDS.items() if find_spec(library) is None for path in paths]
NOT_SLOW = "not slow or smoke"
"""What `make test` runs."""
STARTING = "start_gateway"
"""A fixture that starts processes for each test."""


def pytest_configure(config: pytest.Config) -> None:
    """`make test` hears of processes from here on. SIGINT reaches what tests start, although a shell that runs them in
    the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        _ = signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == NOT_SLOW:
        guard = OwnProcesses()
        _ = config.pluginmanager.register(guard)
        sys.addaudithook(guard.hear)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow."""
    needing = [Path(__file__).parent / path for paths in NEEDS.values() for path in paths]
    for item in items:
        starts = STARTING in getattr(item, "fixturenames", ())
        if starts or any(item.path.is_relative_to(path) for path in needing):
            item.add_marker("slow")


class OwnProcesses:
    """Fails a test that starts a process and is marked neither `slow` nor `smoke`, where it starts it."""

    def __init__(self) -> None:
        self._test: pytest.Item | None = None
        self._shared = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """A test begins and ends."""
        self._test = None if item.get_closest_marker("slow") or item.get_closest_marker("smoke") else item
        try:
            return (yield)
        finally:
            self._test = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """What a fixture of a wider scope starts is shared."""
        shared = fixturedef.scope != "function"
        self._shared += shared
        try:
            return (yield)
        finally:
            self._shared -= shared

    def hear(self, event: str, _: tuple[object, ...]) -> None:
        """Of an audit event of the interpreter."""
        if event == "subprocess.Popen" and self._test is not None and not self._shared:
            raise AssertionError(f"{self._test.nodeid} starts a process: share it, or mark the test slow or smoke")


StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    """A scripted provider on a free port."""
    async with serving() as made:
        yield made


@pytest.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    """A session for what a test asks itself."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncGenerator[StartGateway]:
    """Starts gateways: `await start_gateway(config_text, *flags, env={...})`. All are stopped when the test ends."""
    numbers = count()
    async with AsyncExitStack() as stack:

        async def start(config: str, *flags: str, env: dict[str, str] | None = None) -> Gateway:
            home = tmp_path / f"gateway-{next(numbers)}"
            return await stack.enter_async_context(running(home, config, *flags, env=env))

        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway, provider: Provider) -> Gateway:
    """A gateway in front of the provider."""
    return await start_gateway(upstreams(openai=provider.openai_url, anthropic=provider.url))


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[Client]:
    """A client of that gateway."""
    async with Client(gateway.url) as made:
        yield made


@pytest.fixture
async def vllm() -> AsyncGenerator[FakeEngine]:
    """A scripted model server that loads adapters, on a free port."""
    async with engine() as made:
        yield made


@pytest.fixture
async def served(start_gateway: StartGateway, vllm: FakeEngine) -> Gateway:
    """A gateway in front of it."""
    return await start_gateway(upstreams(openai=vllm.openai_url))


@pytest.fixture
def tape(gateway: Gateway, http: aiohttp.ClientSession) -> Tape:
    """What that gateway has recorded."""
    return Tape(gateway.url, http)
