"""The sixteen scenarios of the Failover Bench with one spare and nothing else configured: 13 pass, 3 are safe.

*pass*: the caller has the whole answer, and the provider was asked as it should be. *safe*: the answer had begun and
cannot be taken back; the caller sees an error in bounded time. The faults are in `fakes.faulty`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import aiohttp
import pytest
from fakes.faulty import DOWN_S, SPARE, Asked, Faulty, Got, ask, faulty
from fakes.rig import CHAT, Within

from penstock.gateway.model.times import Backoff
from penstock.gateway.traffic.upstreams import health

READ_S = 1.0
"""`read_timeout`, where an upstream says nothing any more."""
SOON_S = 30.0
"""What is bounded has ended by then; an answer stalls twice as long."""
SILENT = ("s06", "s09")
LATE = "s07"


class World(NamedTuple):
    http: aiohttp.ClientSession
    provider: Faulty
    url: str

    async def ask(self, model: str) -> Got:
        return await ask(self.http, self.url + CHAT, model)


@pytest.fixture
def stream() -> str:
    """`stream` of the route."""
    return "live"


@pytest.fixture
def model() -> str:
    """Of the calls, where a test has one; tests may say which."""
    return ""


@pytest.fixture
async def world(within: Within, monkeypatch: pytest.MonkeyPatch, stream: str, model: str) -> AsyncGenerator[World]:
    """A gateway before both. Its rests are short, and its patience where that is to end: elsewhere an upstream has as
    long as a machine that is busy may take."""
    read_s = READ_S if model in SILENT else 2 * SOON_S
    monkeypatch.setattr(health, "LEAST_FIRST_CONTENT_S", 0.5 if model == LATE else SOON_S)
    monkeypatch.setattr(health, "RESTS", Backoff(0.1, 30.0))
    route = {"model": "*", "upstream": ["primary", "spare"], "alias": {"spare": SPARE}, "stream": stream}
    async with faulty() as provider:
        upstreams = [
            {"name": "primary", "base_url": f"{provider.url}/primary/v1", "read_timeout": read_s, "context": 10},
            {"name": "spare", "base_url": f"{provider.url}/spare/v1", "context": 1000},
        ]
        async with within(upstream=upstreams, route=[route]) as rig:
            yield World(rig.tape.http, provider, rig.base.url)


Check = Callable[[Got, list[Asked], list[Asked]], bool]
"""Of what the caller got, what was asked of the primary, and what of the spare."""

PASS: dict[str, Check] = {
    "s01": lambda got, primary, spare: len(primary) == 2 and primary[1].at - primary[0].at >= 0.95 and not spare,
    "s02": lambda got, primary, spare: len(primary) == 1 and len(spare) == 1,
    "s03": lambda got, primary, spare: len(primary) == 2 and not spare,
    "s04": lambda got, primary, spare: len(primary) == 2 and len(spare) == 1,
    "s05": lambda got, primary, spare: len(primary) + len(spare) == 2,
    "s06": lambda got, primary, spare: len(primary) == 1 and got.seconds < SOON_S,
    "s07": lambda got, primary, spare: len(primary) == 1 and got.seconds < SOON_S,
    "s10": lambda got, primary, spare: len(primary) == 1 and not spare,
    "s11": lambda got, primary, spare: len(primary) == 1 and not spare and got.usage and got.seconds < SOON_S,
    "s12": lambda got, primary, spare: len(primary) == 1 and len(spare) == 1,
    "s16": lambda got, primary, spare: len(primary) == 2 and got.model == SPARE and got.usage,
}


@pytest.mark.parametrize("model", PASS)
async def test_the_caller_has_the_whole_answer(world: World, model: str) -> None:
    got = await world.ask(model)
    assert got.complete, got
    primary, spare = world.provider.of(model), world.provider.of(SPARE)
    assert PASS[model](got, primary, spare), (got, primary, spare)


async def test_a_refusal_of_the_content_passes(world: World) -> None:
    got = await world.ask("s13")
    assert (got.outcome, len(world.provider.log)) == ("error", 1)
    assert got.why.startswith("HTTP 400: ")
    assert "content_policy_violation" in got.why


@pytest.mark.parametrize("model", ["s08", "s09", "s14"])
async def test_what_has_begun_ends_with_an_error_in_bounded_time(world: World, model: str) -> None:
    got = await world.ask(model)
    assert got.outcome == "error", got
    assert len(got.content.split()) >= 20
    assert got.seconds < SOON_S
    assert world.provider.of(SPARE) == []
    assert (await world.ask("well")).complete


@pytest.mark.parametrize("stream", ["whole"])
@pytest.mark.parametrize("model", ["s08", "s09", "s14"])
async def test_what_breaks_off_is_made_anew_where_answers_pass_when_they_are_whole(world: World, model: str) -> None:
    got = await world.ask(model)
    assert got.complete, got
    assert got.model == SPARE
    assert [len(world.provider.of(name)) for name in (model, SPARE)] == [1, 1]


async def test_one_that_flaps_costs_nobody_an_answer_and_is_used_again(world: World) -> None:
    got = list[Got]()
    while not any(one.model == "s15" for one in got):
        got.append(await world.ask("s15"))
        await asyncio.sleep(0.05)
    assert all(one.complete for one in got)
    down = [asked for asked in world.provider.of("s15") if asked.at < world.provider.first("s15") + DOWN_S]
    # Two calls ask twice, then it rests for 0.1, 0.2, 0.4 and 0.8 seconds.
    assert len(down) <= 9, "it is asked seldom while it rests"
