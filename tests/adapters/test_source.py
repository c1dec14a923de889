"""Episodes from a real gateway: what an agent said through it is what samples hold."""

from __future__ import annotations

from itertools import product
from typing import Any

import aiohttp
import pytest
from fakes.formats import Failure
from fakes.process import Gateway
from fakes.provider import Provider
from fakes.tokens import Json, answer, message, streamed

from penstock.adapters import source
from penstock.adapters.samples import samples
from penstock.adapters.source import Query, changed, load
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import Event, RolloutSpec
from penstock.gateway.model.rollout import COMPUTED, Judgement, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span


@pytest.fixture(autouse=True)
def engine(provider: Provider) -> None:
    """Answers with one token more than the prompt, plain and streamed; the prompt's ids are its words."""

    def plain(asked: Json, _: Any) -> Json:
        prompt = [int(word) for sent in asked["messages"] for word in sent["content"].split()]
        return answer(prompt, [(len(prompt), len(prompt) + 1)])

    provider.formats = {"/v1/chat/completions": (plain, lambda asked, _: iter([streamed(plain(asked, _))]))}


async def agent(
    gateway: Gateway, http: aiohttp.ClientSession, rollout: str, turns: int, stream: bool = False, attempt: str = "a1"
) -> None:
    """Asks, and asks on."""
    said = [message("user", [1, 2])]
    for turn in range(turns):
        asked = {"model": "m", "messages": said, "stream": stream}
        async with http.post(f"{gateway.openai(rollout, attempt)}/chat/completions", json=asked) as response:
            assert response.status == 200
            body = await response.read()
        prompt = [int(word) for it in said for word in it["content"].split()]
        assert body
        said = [*said, message("assistant", [len(prompt), len(prompt) + 1]), message("user", [50 + turn])]


async def test_what_went_through_the_gateway_is_one_sample(
    gateway: Gateway, http: aiohttp.ClientSession, provider: Provider, client: Client
) -> None:
    for encoding, stream in product(("", "gzip", "br"), (False, True)):
        provider.encoding, name = encoding, f"r-{encoding}-{stream}"
        await agent(gateway, http, name, 3, stream)
        await client.reward(name, "a1", Judgement(value=0.5, dimensions={"style": 1.0}))
        (episode,) = [one async for one in load(client, [name])]
        (made,), report = samples(episode)
        assert made.prompt.tolist() == [1, 2], name
        assert made.response.tolist() == [2, 3, 50, 5, 6, 51, 8, 9], name
        assert made.mask.tolist() == [True, True, False, True, True, False, True, True], name
        assert (made.reward, made.rewards, made.group, report.dropped) == (0.5, {"style": 1.0}, name, [])
        assert (made.logprobs[made.mask] < 0).all(), name


async def test_episodes_come_in_order_and_whoever_has_enough_leaves(
    gateway: Gateway, http: aiohttp.ClientSession, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"r{number}" for number in range(10)]
    for name in names:
        await agent(gateway, http, name, 1)
        await client.reward(name, "a1", Judgement(value=1.0))
    monkeypatch.setattr(source, "AT_ONCE", 4)
    assert [one.rollout.id async for one in load(client, client.rollouts())] == names[::-1]
    assert [one.rollout.id async for one in load(client, names[3:8])] == names[3:8]
    some = load(client, names)
    assert (await anext(some)).rollout.id == "r0"
    await some.aclose()
    with pytest.raises(ClientError, match="there is no rollout 'r99'"):
        _ = [one async for one in load(client, ["r0", "r99"])]


def recorded(one: RolloutSummary | Span) -> dict[str, Any]:
    """What the tape has of it: costs, and how many tools ran, are computed for lists alone."""
    told = one.model_dump()
    for part in (told, told.get("totals", {}), *(attempt["totals"] for attempt in told.get("attempts", ()))):
        for name in (*COMPUTED, "tool_runs"):
            _ = part.pop(name, None)
    return told


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_a_step_in_one_answer_is_what_single_requests_say(
    gateway: Gateway, http: aiohttp.ClientSession, provider: Provider, client: Client, encoding: str
) -> None:
    """Rollouts of many kinds: no call, several attempts, streams, rewards, events, a task and metadata."""
    provider.encoding = encoding
    spec = RolloutSpec(id="q1", input={"n": [1, None]}, group="g", mode="val", metadata={"a": "b"})
    await client.enqueue([spec])
    for number, stream in ((1, False), (2, True), (5, True)):
        await agent(gateway, http, f"r{number}", number, stream)
        await client.reward(f"r{number}", "a1", Judgement(value=0.5, dimensions={"style": 1.0}, reason="so"))
    await agent(gateway, http, "r2", 1, attempt="a2")
    await client.reward("r2", "a2", Judgement(value=0.0))
    await client.add_events("r1", "a1", [Event(name="said", attributes={"text": "x" * 2000})])
    names = ["r2", "q1", "r5", "r1"]
    whole = [one async for one in client.whole_rollouts(names)]
    assert [recorded(one.rollout) for one in whole] == [recorded(await client.rollout(name)) for name in names]
    for name, one in zip(names, whole, strict=True):
        assert list(map(recorded, one.spans)) == [recorded(span) async for span in client.spans(name)]
        assert one.calls == [call async for call in client.exchanges(name)]
    assert [len(one.calls) for one in whole] == [3, 0, 5, 1]
    rewards = [one async for one in client.whole_rollouts(names, ["reward"])]
    assert {span.kind for one in rewards for span in one.spans} == {"reward"}
    assert not any(one.calls for one in rewards)


async def test_what_is_new_since_a_cursor(gateway: Gateway, http: aiohttp.ClientSession, client: Client) -> None:
    anything = Query(status=None)
    await agent(gateway, http, "r1", 1)
    await client.enqueue([RolloutSpec(id="q1", input=1, group="g", mode="val")])
    await client.reward("r1", "a1", Judgement(value=1.0))
    found, cursor = await changed(client, 0, anything)
    assert {rollout.id for rollout in found} == {"r1", "q1"}
    assert await changed(client, cursor, anything) == ([], cursor)
    await client.reward("r1", "a1", Judgement(value=0.0))
    found, newer = await changed(client, cursor, anything)
    assert [(rollout.id, rollout.reward) for rollout in found] == [("r1", 0.0)]
    assert newer > cursor
    # A call is a change too; when another rollout's reward is answered it can be read.
    await agent(gateway, http, "r2", 1)
    await client.reward("r2", "a1", Judgement(value=1.0))
    _, cursor = await changed(client, newer, anything)
    await agent(gateway, http, "r1", 1)
    await client.reward("r2", "a1", Judgement(value=0.5))
    assert {rollout.id for rollout in (await changed(client, cursor, anything))[0]} == {"r1", "r2"}
    assert [it.id for it in (await changed(client, 0, Query(mode="val", status=None)))[0]] == ["q1"]
    assert [it.id for it in (await changed(client, 0, Query(group="g", status=None)))[0]] == ["q1"]
    assert (await changed(client, 0))[0] == []
    await client.cancel("q1")
    assert [it.id for it in (await changed(client, 0))[0]] == ["q1"]
    running = Query(status=frozenset({RolloutStatus.RUNNING}))
    assert [it.id for it in (await changed(client, 0, running))[0]] == ["r1", "r2"]


async def test_a_rollout_that_is_not_there_is_an_error(client: Client) -> None:
    with pytest.raises(ClientError, match="there is no rollout 'gone'"):
        _ = [it async for it in load(client, [RolloutSummary(id="gone")] * 3)]


async def test_a_call_that_failed_is_reported(
    gateway: Gateway, http: aiohttp.ClientSession, provider: Provider, client: Client
) -> None:
    await agent(gateway, http, "r1", 1)
    provider.script = [Failure(500)]
    async with http.post(f"{gateway.openai('r1')}/chat/completions", json={"model": "m", "messages": []}) as response:
        assert response.status == 500
        _ = await response.read()
    # When a reward is answered, every earlier call can be read.
    await client.reward("r1", "a1", Judgement(value=1.0))
    (episode,) = [one async for one in load(client, client.rollouts())]
    made, report = samples(episode)
    assert (len(made), [one.reason for one in report.dropped]) == (1, ["error"])


async def test_what_was_forgotten_meanwhile_is_left_out(
    gateway: Gateway, http: aiohttp.ClientSession, client: Client
) -> None:
    """An export may take longer than a rule of `[[retention]]` leaves its last rollouts."""
    for name in ("r1", "r2", "r3"):
        await agent(gateway, http, name, 1)
        await client.reward(name, "a1", Judgement(value=1.0))
    found = [one async for one in client.rollouts()]
    await client.cancel("r2")
    await client.forget("r2")
    gone: list[str] = []
    assert [one.rollout.id async for one in load(client, found, gone.append)] == ["r3", "r1"]
    assert [one.rollout.id async for one in load(client, ["r2"], gone.append)] == []
    assert gone == ["r2", "r2"]
    with pytest.raises(ClientError, match="there is no rollout 'r2'"):
        _ = [one async for one in load(client, found)]
