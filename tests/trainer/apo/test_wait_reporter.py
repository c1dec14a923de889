"""A run that waits says for what, on the tape, and asks for a runner where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest
from fakes.process import Gateway

from penstock.console.commands.watch import poll_on_change
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import HeartbeatRequest, QueueState, RolloutSpec
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import Run
from penstock.trainer.apo.session import describe_wait, report_waiting
from penstock.trainer.data.collector import RolloutWaiter
from penstock.trainer.runs.supervision import LogDisplay, RunReporter

MINUTE = 60 * 10**9


@pytest.mark.parametrize(
    ("attempts", "seen", "state", "said"),
    [
        (["shop.a.t1.0/1"], MINUTE, "open", "waits for 1,200 rollouts, and 1 workers run some"),
        (["shop2.a.t1.0/1"], 1, "open", "waits for 1,200 rollouts, and nobody runs one: is there a runner?"),
        ([], MINUTE, "open", "waits for 1,200 rollouts, and the runners that are there take none: have they --mode"),
        ([], MINUTE, "paused", "waits for 1,200 rollouts, and the queue is paused: is that meant?"),
    ],
)
def test_what_is_said_is_so(attempts: list[str], seen: int, state: QueueState, said: str) -> None:
    worker = Worker(id="w", attempts=attempts, last_seen_ns=seen)
    assert describe_wait(1200, "shop", [worker], state, MINUTE).startswith(said)


async def test_a_run_without_a_runner_asks_for_one_and_is_not_silent(gateway: Gateway) -> None:
    async with Client(gateway.url) as client, asyncio.timeout(60):
        reporter, awaited = RunReporter(client, "shop", LogDisplay(40)), RolloutWaiter(client)
        await reporter.begin("apo", {}, 40, 0)
        beside = [asyncio.ensure_future(awaited.run())]
        try:
            beside.append(asyncio.ensure_future(report_waiting(client, reporter, awaited, "shop", every_s=0.05)))
            await awaited.enqueue([RolloutSpec(id="shop.a.t1.0", input="hello")])
            asked = await until(client, lambda run: "is there a runner?" in (run.message or ""))
            later = await until(client, lambda run: run.last_seen_ns > asked.last_seen_ns)
            assert later.message == asked.message
            warned = [one.text async for one in client.run_events("shop") if one.level == "warning"]
            assert warned == [asked.message], "once, not with every look"
            _ = await client.cancel("shop.a.t1.0")
            _ = await until(client, lambda run: not run.message)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


async def test_a_clock_that_is_not_the_gateways_takes_no_runner_for_gone(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    async with Client(gateway.url) as client, asyncio.timeout(60):
        reporter, awaited = RunReporter(client, "shop", LogDisplay(40)), RolloutWaiter(client)
        await reporter.begin("apo", {}, 40, 0)
        _ = await client.heartbeat("w", HeartbeatRequest())
        monkeypatch.setattr(time, "time_ns", lambda: now() + 10 * MINUTE)
        beside = [asyncio.ensure_future(awaited.run())]
        try:
            beside.append(asyncio.ensure_future(report_waiting(client, reporter, awaited, "shop", every_s=0.05)))
            await awaited.enqueue([RolloutSpec(id="shop.a.t1.0", input="hello")])
            asked = await until(client, lambda run: bool(run.message))
            assert "the runners that are there take none" in (asked.message or "")
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


async def until(client: Client, holds: Callable[[Run], bool]) -> Run:
    async with aclosing(poll_on_change(client, lambda: client.run("shop"), lambda _: 0.2)) as looks:
        return await anext(found async for found in looks if holds(found))
