"""Measures the cost of releases for a call that they do not concern, and the delay of a rollback. `python -m
bench.switching`.

*Cost*: CPU that the search for released resources adds to a call, by the registered resources; the call uses none of
them. It is measured in `PinTable.find`, less an empty function: beside a whole call it would be lost in the noise.
*First* is a text that was not seen before, *again* one that was. *Rollback*: a gateway process with agents at a steady
pace, whose rollouts are three calls long; again and again a release is rolled back, and the provider notes when the
last call with the candidate's text arrived after the answer of the control API. Provider and agents share a process, so
that its times are late rather than early. Figures are written to bench/out/switching.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import aiohttp
import uvloop
from aiohttp import web

from bench.families import similar
from bench.prompts import SIMILAR, cost, request
from bench.replay import gateway, serving
from bench.store import HERE, Figure, report
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Assignment, NewRelease, Pin, Release
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import NewVersion, Resource, StableVersion, Template
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.http.redaction import Redactor

OUT = HERE / "out" / "switching.json"
PACE = 200
"""Calls a second."""
SECOND = 1_000
"""Calls of a second."""
ROLLBACKS = 25
AFTER_S = 1.5
"""Seconds of observation after a rollback."""
OTHER = Template.parse("You review pull requests. Say in one paragraph what {name} should change. {date} {notes}")
STABLE, CANDIDATE = "You are a travel agent. Never refund a basic fare.", "You are careful. Never refund a basic fare."


class Registered:
    """A tape with these resources and no release."""

    def __init__(self, resources: list[Resource]) -> None:
        self._resources = resources

    def resources(self) -> dict[str, tuple[StableVersion, list[Resource]]]:
        return {one.name: (StableVersion(version=one.version), [one]) for one in self._resources}

    def releases(self) -> list[Release]:
        return []

    def pins(self, rollout: str) -> list[Pin]:
        return []

    def rollout(self, rollout: str) -> Rollout | None:
        return None

    def unit(self, release: str, unit: str) -> Assignment | None:
        return None


def resource(name: str, kind: Any, content: dict[str, Any]) -> Resource:
    """Return a resource's only version."""
    return Resource(name=name, version="v1", kind=kind, content=content, created_ns=1, sha256="0" * 64)


def looked(resources: list[Resource], size: int, first: bool) -> Callable[[], object]:
    """Return a function that does `Call`'s check if a call uses any of these resources."""
    pins = PinTable(
        Registered(resources), cast(Recorder, None), Metrics(), Redactor(), asyncio.Future, lambda rollout, pins: None
    )
    asyncio.run(pins.reload())
    call = CallRequest(CallAddress("r1"), by_name("chat"), "/v1/chat/completions", request(OTHER, size, "today"))

    def look() -> object:
        if first:
            pins.catalog.recogniser.forget()
        found = None if pins.catalog.empty else pins.find(call, None)
        assert found is None
        if len(pins.notes.calls) > SECOND:
            # A thread adds up the notes on calls once a second.
            pins.notes.take()
        return found

    return look


def measure_cost() -> Iterator[Figure]:
    """Measure the cost by registered resources."""
    texts = [template.source for template in similar(SIMILAR, 1, 80)]
    prompts = [resource(f"p{at}", "prompt", {"text": text, "sent": True}) for at, text in enumerate(texts)]
    nothing = cost(lambda: None)
    model = [resource("policy", "model", {"upstream": "vllm", "base": "m"})]
    for name, size in (("1 KB", 1_000), ("100 KB", 100_000)):
        yield Figure(f"{name}, nothing registered", (cost(looked([], size, False)) - nothing) * 1e6, "CPU-us")
        yield Figure(f"{name}, another model", (cost(looked(model, size, False)) - nothing) * 1e6, "CPU-us")
        for registered in (prompts[:1], prompts):
            for when, first in (("first", True), ("again", False)):
                taken = (cost(looked(registered, size, first)) - nothing) * 1e6
                yield Figure(f"{name}, {len(registered)} other prompts: {when}", taken, "CPU-us")


class Provider:
    """Answers at once, and notes the time of each call with the candidate's text."""

    def __init__(self) -> None:
        self.candidate: list[float] = []
        """Arrivals of calls with the candidate's text; monotonic seconds."""

    async def answer(self, request: web.Request) -> web.Response:
        at, asked = time.monotonic(), json.loads(await request.read())
        if asked["messages"][0]["content"] == CANDIDATE:
            self.candidate.append(at)
        message = {"role": "assistant", "content": "Hello"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": "1", "object": "chat.completion", "model": "m", "choices": choices})


async def agents(url: str, session: aiohttp.ClientSession) -> None:
    """Run rollouts of three calls at a steady pace, for ever."""
    messages = [{"role": "system", "content": STABLE}, {"role": "user", "content": "Hello"}]

    async def rollout(name: str) -> None:
        for _ in range(3):
            asked = {"model": "m", "messages": messages}
            async with session.post(f"{url}/rollout/{name}/v1/chat/completions", json=asked) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in count():
            await asyncio.sleep(max(0.0, began + number * 3 / PACE - time.monotonic()))
            group.create_task(rollout(f"r{number}"))


async def rolled_back(client: Client, provider: Provider) -> list[float]:
    """Roll a release back; return the seconds after the answer at which calls still got the candidate."""
    skip: Any = {"checked": "skip", "replayed": "skip", "shadowed": "skip"}
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], margin_absolute=0.1, **skip)
    provider.candidate.clear()
    release = await client.start_release("travel", NewRelease(candidate="v2", policy=policy))
    while len(provider.candidate) < PACE // 4:  # noqa: ASYNC110 - as many as the pace brings
        await asyncio.sleep(0.01)
    await client.decide(release.id, "rollback", ActionRequest(who="bench"))
    answered = time.monotonic()
    await asyncio.sleep(AFTER_S)
    return [at - answered for at in provider.candidate if at > answered]


async def measure_rollback() -> list[list[float]]:
    """Return the delays of several rollbacks."""
    provider = Provider()
    async with (
        serving(provider) as base,
        gateway(base) as url,
        aiohttp.ClientSession() as session,
        Client(url) as client,
    ):
        for text, sent in ((STABLE, True), (CANDIDATE, False)):
            await client.add_version("travel", NewVersion(kind="prompt", content={"text": text, "sent": sent}))
        load = asyncio.ensure_future(agents(url, session))
        found = [await rolled_back(client, provider) for _ in range(ROLLBACKS)]
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return found


def figures() -> Iterator[Figure]:
    """Yield all figures, as they are measured."""
    yield from measure_cost()
    found = uvloop.run(measure_rollback())
    last = [max(one, default=0.0) * 1e3 for one in found]
    yield Figure(f"last call with the candidate, {ROLLBACKS} rollbacks: median", statistics.median(last), "ms")
    yield Figure("… latest", max(last), "ms", at_most=1000)
    yield Figure("… calls that got it after the answer, of all", sum(map(len, found)), "calls")


if __name__ == "__main__":
    report(figures(), OUT)
