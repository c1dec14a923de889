"""A version of weights that several engines serve: what holds for a route's upstreams holds for these, and no other
engine is asked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.engine import CHAT, FakeEngine, Planned, engine
from fakes.experiment import Traffic
from fakes.process import running, upstream
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.attributes import TRIES
from penstock.gateway.model.resource import NewVersion

ROUTE = '[[route]]\nmodel = "policy"\nupstream = ["other"]\nalias = {{ other = "its-own" }}\n{}'


def settings(one: FakeEngine, two: FakeEngine, other: FakeEngine, route: str = "") -> str:
    """Three engines, of which the route names the last only."""
    engines = {"one": one, "two": two, "other": other}
    entries = [upstream(name, made.openai_url, "openai") for name, made in engines.items()]
    entries[0] = entries[0].rstrip("\n") + "\nmax_concurrent = 1\n\n"
    return "".join(entries) + ROUTE.format(route)


def version(**content: Any) -> NewVersion:
    return NewVersion(kind="model", content={"upstream": "one", "base": "base", "adapter": "/adapters/1"} | content)


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


async def loaded(*engines: FakeEngine) -> None:
    """Returns when they hold the version."""

    async def all_hold_it() -> bool:
        return all(one.adapters == {"policy@v1": "/adapters/1"} for one in engines)

    await until(all_hold_it)


async def test_each_engine_that_serves_a_version_is_a_candidate(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        one, two, other = [await stack.enter_async_context(engine()) for _ in range(3)]
        gateway = await stack.enter_async_context(running(tmp_path, settings(one, two, other)))
        async with Client(gateway.url) as client:
            tape, traffic = Tape(gateway.url, http), Traffic(gateway.url, http, client, model="policy")
            with pytest.raises(ClientError, match=r"content\.also: 'nobody' is not configured"):
                await client.add_version("policy", version(also=["nobody"]))
            await client.add_version("policy", version(also=["two"]))

            await loaded(one, two)
            # The first has a place for one call: the second call goes to the other engine, and waits for nobody.
            goes_on = asyncio.Event()
            one.plan(CHAT, Planned(before=goes_on))
            first = asyncio.ensure_future(traffic.call("r1"))
            await one.until(CHAT)
            assert said(await traffic.call("r2")) == "I am policy@v1."
            goes_on.set()
            assert said(await first) == "I am policy@v1."
            # One that fails is asked once more, then the other is.
            one.plan(CHAT, Planned(status=503), Planned(status=503))
            assert said(await traffic.call("r3")) == "I am policy@v1."
            assert traffic.failures == []
            spans = [(await tape.spans(name, 1))[0] for name in ("r1", "r2", "r3")]
            assert [span.upstream for span in spans] == ["one", "two", "two"]
            assert [tried["why"] for tried in (spans[2].attributes or {})[TRIES]] == ["http_503", "http_503"]
            assert [span.versions for span in spans] == [{"policy": "v1"}] * 3
            assert [path for path, _ in other.asked if path == CHAT] == []


async def test_they_share_its_rollouts_by_the_weights_of_the_route(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with engine() as one, engine() as two, engine() as other:
        route = "weights = { other = 1 }\n"
        text = settings(one, two, other, route).replace('["other"]', '["other", "one", "two"]')
        text = text.replace("{ other = 1 }", "{ other = 1, one = 1, two = 1 }")
        async with running(tmp_path, text) as gateway, Client(gateway.url) as client:
            traffic = Traffic(gateway.url, http, client, model="policy")
            await client.add_version("policy", version(also=["two"]))
            await loaded(one, two)
            for number in range(16):
                assert said(await traffic.call(f"r{number}")) == "I am policy@v1."
            assert traffic.failures == []
        calls = [sum(path == CHAT for path, _ in made.asked) for made in (one, two, other)]
        assert min(calls[:2]) > 0
        assert (sum(calls[:2]), calls[2]) == (16, 0)
