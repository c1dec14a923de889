"""Retries of real SDKs against a model that fails: one rollout, and spans that say which call they repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from fakes.local import locally
from fakes.process import Gateway, upstreams
from fakes.tape import Tape
from fakes.web_site import everywhere, site

from examples.demo.model import DemoAnswer, chat, chat_events, message
from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.traffic.calls.conversations import (
    COUNTED_S,
    UNCOUNTED_S,
    ConversationMatch,
    FailedCalls,
    RepeatableRequest,
)
from penstock.gateway.wire.http.client_connection import ConnectionHints

SOON = {"retry-after-ms": "5"}


@dataclass
class Model:
    """Fails as it is told, then answers."""

    faults: list[int | str] = field(default_factory=list[int | str])
    bodies: list[bytes] = field(default_factory=list[bytes])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        asked: dict[str, Any] = await request.json()
        fault = self.faults.pop(0) if self.faults else 200
        if fault == "silent":
            await asyncio.sleep(3600)
        if fault == "cut":
            made = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
            await made.prepare(request)
            await made.write(b'{"id": ')
            assert request.transport is not None
            request.transport.close()
            return made
        if fault != 200:
            return web.json_response({"error": {"message": "no"}}, status=int(fault), headers=SOON)
        if request.path.endswith("/messages"):
            return web.json_response(message(asked, DemoAnswer("hi")))
        if not asked.get("stream"):
            return web.json_response(chat(asked, DemoAnswer("hi")))
        body = b"".join(chat_events(asked, DemoAnswer("hi")))
        return web.Response(body=body, content_type="text/event-stream")


@dataclass
class Stage:
    model: Model
    gateway: Gateway
    client: Client
    tape: Tape

    async def rollouts(self, count: int) -> list[RolloutSummary]:
        """All of them; each has ended its calls."""
        await self.tape.written()
        found = [one async for one in self.client.rollouts("")]
        assert len(found) == count, found
        return found


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncGenerator[Stage]:
    model = Model()
    async with site(everywhere(model.handle)) as url:
        config = upstreams(openai=f"{url}/v1", anthropic=url)
        async with locally(tmp_path, config) as gateway, Client(gateway.url) as client, ClientSession() as http:
            yield Stage(model, gateway, client, Tape(gateway.url, http))


async def by_openai(url: str, text: str, **asks: Any) -> None:
    """An agent of its own says one thing."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=2, timeout=asks.pop("s", 5)) as sdk:
        create: Any = sdk.chat.completions.create
        made: Any = await create(model="m", messages=[{"role": "user", "content": text}], **asks)
        if asks.get("stream"):
            async for _ in made:
                pass


async def by_anthropic(url: str, text: str, s: float = 5) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=2, timeout=s) as sdk:
        _ = await sdk.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": text}])


Says = Callable[..., Any]


@pytest.mark.parametrize("address", ["", "/rollout/r1"])
@pytest.mark.parametrize(
    ("says", "faults", "asks"),
    [
        (by_openai, [500, 429], {}),
        (by_openai, [503], {"stream": True}),
        (by_openai, ["cut"], {}),
        (by_openai, ["silent"], {"s": 0.2}),
        (by_anthropic, [529, 500], {}),
        (by_anthropic, ["silent"], {"s": 0.2}),
    ],
)
async def test_retries_are_one_rollout(
    stage: Stage, says: Says, faults: list[int | str], asks: dict[str, Any], address: str
) -> None:
    stage.model.faults = list(faults)
    await says(stage.gateway.url + address, "hello", **asks)
    assert len(set(stage.model.bodies)) == 1, "the SDK sends the same bytes"
    (rollout,) = await stage.rollouts(1)
    spans = await stage.tape.spans(rollout.id, len(faults) + 1)
    assert [span.retry_of for span in spans] == [None, *[1] * len(faults)]
    assert [span.status for span in spans] == [*["error" if it != "silent" else "cancelled" for it in faults], "ok"]
    assert rollout.totals.ambiguous == 0


async def test_agents_that_fail_side_by_side_stay_apart(stage: Stage) -> None:
    stage.model.faults = [429] * 3
    await asyncio.gather(*(by_openai(stage.gateway.url, "hello") for _ in range(3)))
    for rollout in await stage.rollouts(3):
        spans = await stage.tape.spans(rollout.id, 2)
        assert [(span.status, span.retry_of) for span in spans] == [("error", None), ("ok", 1)]


async def test_equal_calls_of_one_attempt_are_linked_one_by_one(stage: Stage) -> None:
    stage.model.faults = [429] * 3
    await asyncio.gather(*(by_openai(f"{stage.gateway.url}/rollout/r1", "hello") for _ in range(3)))
    spans = await stage.tape.spans("r1", 6)
    assert sorted(span.retry_of for span in spans if span.retry_of is not None) == [1, 2, 3]


async def test_who_begins_with_the_same_words_after_a_failure_is_another(stage: Stage) -> None:
    """Whether it counts its retries or not: on a connection of its own it may be anybody."""
    stage.model.faults = [400, 500, 500, 500]
    url, asked = (
        f"{stage.gateway.url}/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    )
    for _ in range(2):
        async with ClientSession() as http, http.post(url, json=asked) as answer:
            await answer.read()
    with pytest.raises(openai.InternalServerError):
        async with openai.AsyncOpenAI(base_url=f"{stage.gateway.url}/v1", api_key="k", max_retries=0) as sdk:
            _ = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    await by_openai(stage.gateway.url, "hi")
    assert sorted(one.totals.calls for one in await stage.rollouts(4)) == [1, 1, 1, 2]


async def test_large_requests_that_differ_in_the_middle_are_two(stage: Stage) -> None:
    stage.model.faults = [500] * 2
    url = f"{stage.gateway.url}/v1/chat/completions"
    for letter, tries, count in (("a", "0", 1), ("b", "1", 2), ("a", "1", 2)):
        said = f"{'x' * 200_000}{letter * 50_000}{'y' * 200_000}"
        asked = {"model": "m", "messages": [{"role": "user", "content": said}]}
        async with (
            ClientSession() as http,
            http.post(url, json=asked, headers={"x-stainless-retry-count": tries}) as answer,
        ):
            await answer.read()
        _ = await stage.rollouts(count)


async def test_who_does_not_count_repeats_on_the_same_connection(stage: Stage) -> None:
    stage.model.faults = [500]
    url = f"{stage.gateway.url}/v1/chat/completions"
    async with ClientSession() as http:
        for text in ("hi", "hi", "hi"):
            asked = {"model": "m", "messages": [{"role": "user", "content": text}]}
            async with http.post(url, json=asked) as answer:
                await answer.read()
    again, first = await stage.rollouts(2)
    assert [span.retry_of for span in await stage.tape.spans(first.id, 2)] == [None, 1]
    assert again.totals.calls == 1, "what was answered is not repeated"


def test_which_call_is_repeated() -> None:
    here, there, far = ConnectionHints("a"), ConnectionHints("a"), ConnectionHints("b")
    calls = FailedCalls()

    def found(key: int, tries: int | None, hints: ConnectionHints, now: float) -> tuple[str | None, bool] | None:
        match = calls.find(RepeatableRequest(key, tries), hints, now)
        assert match is None or (isinstance(match, ConversationMatch) and match.retry)
        return match and (match.rollout, match.ambiguous)

    for at, (tries, hints) in enumerate([(0, here), (0, far), (1, here), (None, here)]):
        calls.remember(RepeatableRequest(1, tries), hints, f"r{at}", 0.0)
    assert found(2, 1, here, 1) is None, "another request"
    assert found(1, 3, here, 1) is None, "another count"
    assert found(1, None, there, 1) is None, "another connection"
    assert found(1, None, here, UNCOUNTED_S + 1) is None
    assert found(1, None, here, 1) == ("r3", False)
    assert found(1, None, here, 1) is None, "each call is repeated once"
    assert found(1, 2, far, 1) == ("r2", False)
    assert found(1, 1, there, 1) == ("r0", True), "the client's address is no proof"
    assert found(1, 1, there, 1) == ("r1", False)
    assert not calls.calls
    calls.remember(RepeatableRequest(1, 0), here, "r4", 0.0)
    assert found(1, 1, here, COUNTED_S + 1) is None
    calls.forget(0.0)
    assert calls.calls
    calls.forget(1.0)
    assert not calls.calls
    short = FailedCalls(remembered=2)
    for key in range(5):
        short.remember(RepeatableRequest(key, 0), here, "r", 0.0)
    assert len(short.calls) == 2
