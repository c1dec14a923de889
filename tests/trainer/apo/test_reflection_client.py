"""The reflecting model behind a real gateway: asked once, found again, never paid for twice, and its failures said."""

from __future__ import annotations

import aiohttp
import pytest
from fakes.formats import Failure
from fakes.optimising import Optimising
from fakes.provider import Provider

from examples.demo.model import DemoAnswer
from penstock.trainer.apo import gateway_laboratory
from penstock.trainer.apo.config import ReflectionSettings
from penstock.trainer.apo.gateway_laboratory import ReflectionClient
from penstock.trainer.runs.supervision import RunError

SETTINGS = ReflectionSettings(model="thinker", most_tokens=100, price=(2.0, 10.0))
"""Prices of a million tokens."""


@pytest.fixture
def asking(here: Optimising, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> ReflectionClient:
    monkeypatch.setattr(gateway_laboratory, "PAUSES_S", (0.0,) * 4)
    return ReflectionClient(here.client, http, here.gateway.url, "r.reflections", SETTINGS)


async def test_an_answer_is_found_on_the_tape_by_whoever_asks_the_same(
    asking: ReflectionClient, here: Optimising, provider: Provider
) -> None:
    provider.script = [DemoAnswer("first"), DemoAnswer("second")]
    first, second = await asking.ask("why?", 0), await asking.ask("why?", 1)
    assert (first.text, second.text) == ("first", "second")
    again = ReflectionClient(here.client, here.http, here.gateway.url, "r.reflections", SETTINGS)
    assert [await again.ask("why?", number) for number in (0, 1)] == [first, second]
    assert len(provider.log) == 2
    assert first.tokens > 0
    most_tokens, most_money = asking.most("why?")
    assert first.tokens <= most_tokens
    assert 2 * first.tokens / 1e6 <= first.money <= most_money


@pytest.mark.parametrize("failure", [Failure(429, "slower"), Failure(503, "overloaded")])
async def test_a_model_that_is_busy_is_asked_again(
    asking: ReflectionClient, provider: Provider, failure: Failure
) -> None:
    provider.script = [failure] * 4 + [DemoAnswer("at last")]
    assert (await asking.ask("why?", 0)).text == "at last"


async def test_a_model_that_goes_on_failing_stops_the_run(asking: ReflectionClient, provider: Provider) -> None:
    provider.script = lambda asked: Failure(500, "broken")
    with pytest.raises(RunError, match=r"reflecting model 'thinker' does not answer: 500: .*broken"):
        await asking.ask("why?", 0)


async def test_a_question_that_is_refused_is_not_asked_again(asking: ReflectionClient, provider: Provider) -> None:
    provider.script = lambda asked: Failure(400, "no such model")
    with pytest.raises(RunError, match=r"400: no such model$"):
        await asking.ask("why?", 0)
    assert len(provider.log) == 1


async def test_a_question_that_was_refused_is_asked_by_the_next_run(
    asking: ReflectionClient, provider: Provider
) -> None:
    provider.script = [Failure(400, "no such model"), DemoAnswer("yes")]
    with pytest.raises(RunError):
        await asking.ask("why?", 0)
    assert (await asking.ask("why?", 0)).text == "yes"


async def test_an_error_with_status_200_is_asked_again_as_often_as_others(
    asking: ReflectionClient, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_laboratory, "RECORDED_S", 0.2)
    provider.script = lambda asked: Failure(200, "you have no credit")
    with pytest.raises(RunError, match=r"does not answer: .*on the tape"):
        await asking.ask("why?", 0)
    assert len(provider.log) == 1 + len(gateway_laboratory.PAUSES_S)


async def test_an_error_that_is_no_text_is_told(
    asking: ReflectionClient, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(family: str, failure: Failure) -> bytes:
        return b'{"error": {"message": "broken \xe2"}}'

    monkeypatch.setattr("fakes.provider.error_body", broken)
    provider.script = lambda asked: Failure(400)
    with pytest.raises(RunError, match=r"does not answer: 400: .*broken"):
        await asking.ask("why?", 0)
