"""A gateway that goes away between the doing and the answer: whatever the trainer says, it says again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from fakes.process import Gateway
from fakes.tape import Tape

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import Params
from penstock.gateway.model.base import ActionRequest, SpanKind
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.trainer.runs.supervision import RetryClient, RunReporter
from penstock.trainer.serving.publisher import IMMEDIATE_POLICY, TRAINING, Publisher

POLICY = ReleasePolicy(stages=[CanaryStage(split=0.5)], margin_absolute=0.1, replayed="skip", shadowed="skip")
"""A release that goes on until rewards have come."""


class Forgetful(Client):
    """Does what it is asked, and the answer of everything that changes something is lost the first time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lost: set[tuple[str, str | None]] = set()

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        answer = await super().read(method, path, params, body)
        if method == "POST" and (path, body) not in self.lost:
            self.lost.add((path, body))
            raise ClientError("the gateway went away")
        return answer


class Twice(RetryClient, Forgetful):
    """Says everything twice."""


class Late(Twice):
    """A release has ended before it is known that it began."""

    async def start_release(self, resource: str, new: NewRelease) -> Release:
        try:
            return await super().start_release(resource, new)
        except ClientError:
            with suppress(ClientError):  # the second abort
                (live,) = await self.releases(resource, live=True)
                _ = await self.decide(live.id, "abort", ActionRequest(who="ann", why="it is worse"))
            raise


class Nothing:
    """A display."""

    def phase(self, step: int, text: str) -> None: ...
    def point(self, step: int, values: object) -> None: ...
    def line(self, level: str, text: str) -> None: ...


@pytest.fixture
async def client(served: Gateway) -> AsyncGenerator[Twice]:
    async with Twice(served.url) as made:
        yield made


async def test_versions_are_published_once(client: Twice) -> None:
    publisher = Publisher(client, "policy", "fake-openai", "base", "run")
    await publisher.begin()
    for step in range(2):
        await publisher.register(f"run.{step}", Path(f"/adapters/run.{step}"), None, "")
        await publisher.train_on(f"run.{step}")
    releases = await client.releases("policy")
    assert [(one.candidate, one.stage) for one in releases] == [("run.1", "promoted"), ("run.0", "promoted")]
    assert [one.version for one in (await client.resource("policy")).versions] == ["base", "run.0", "run.1"]
    shown = await publisher.release("run.1", POLICY)
    assert [one.id for one in await client.releases("policy", live=True)] == [shown.id]
    assert len(await client.releases("policy")) == 3
    said = [path for path, _ in client.lost]
    assert sum(path.endswith("/promote") for path in said) == 2
    assert said.count("/api/resources/policy/releases") == 3


async def test_a_release_that_ended_before_its_answer_came_is_found(client: Twice, served: Gateway) -> None:
    publisher = Publisher(client, "policy", "fake-openai", "base", "run")
    await publisher.begin()
    await publisher.register("run.0", Path("/adapters/run.0"), None, "")
    await publisher.train_on("run.0")
    async with Late(served.url) as late:
        publisher = Publisher(late, "policy", "fake-openai", "base", "run")
        shown = await publisher.release("run.0", POLICY)
    found = [(one.id, one.stage) for one in await client.releases("policy")]
    assert found == [(shown.id, "aborted"), ("policy-1", "promoted")]


async def test_what_an_earlier_life_has_left_is_aborted_once(client: Twice) -> None:
    publisher = Publisher(client, "policy", "fake-openai", "base", "run")
    await publisher.begin()
    for step in range(2):
        await publisher.register(f"run.{step}", Path(f"/adapters/run.{step}"), None, "")
    _ = await publisher._start("run.0", TRAINING, IMMEDIATE_POLICY, "the earlier life was killed")
    await publisher.train_on("run.1")
    releases = await client.releases("policy")
    assert [(one.candidate, one.stage) for one in releases] == [("run.1", "promoted"), ("run.0", "aborted")]


async def test_a_run_is_reported_once(client: Twice) -> None:
    await Publisher(client, "policy", "fake-openai", "base", "run").begin()
    lives = [RunReporter(client, "run", Nothing()) for _ in range(2)]
    for reporter in lives:
        await reporter.begin("grpo", {}, 3, 0)
        await reporter.point(1, {"loss": 0.5})
        await reporter.event(1, "something happened")
        await reporter.new_version("policy", "base")
    await lives[-1].end("failed", "no more")
    assert [point.values async for point in client.points("run")] == [{"loss": 0.5}]
    events = [event.text async for event in client.run_events("run")]
    # Of the two lives, what happened in the first is kept, and nothing that was said twice is there twice.
    assert sorted(Counter(events).items()) == sorted({**Counter(set(events)), "something happened": 2}.items())
    run = await client.run("run")
    assert (run.status, run.message, [one.version for one in run.made]) == ("failed", "no more", ["base"])


async def test_rollouts_that_were_not_read_are_asked_for_again(
    served: Gateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        body = {"model": "base", "messages": [{"role": "user", "content": f"hello {number}"}]}
        async with http.post(served.openai(f"r{number}") + "/chat/completions", json=body) as answer:
            assert answer.status == 200
        _ = await Tape(served.url, http).spans(f"r{number}", 1)
    whole = Client.whole_rollouts
    lives = [2, 0, None]
    """After so many rollouts the gateway goes away; then it stays."""

    async def cut(self: Client, ids: Sequence[str], kinds: Sequence[SpanKind] = ()) -> AsyncGenerator[object]:
        left = lives.pop(0)
        async for call in whole(self, ids, kinds):
            if left == 0:
                raise ClientError("the gateway went away")
            left = None if left is None else left - 1
            yield call

    monkeypatch.setattr(Client, "whole_rollouts", cut)
    async with RetryClient(served.url) as client:
        read = [one async for one in client.whole_rollouts(["r0", "r1", "r2"])]
    found = [json.loads(call.request)["messages"][0]["content"] for one in read for call in one.calls]
    assert found == ["hello 0", "hello 1", "hello 2"]
    assert lives == []
