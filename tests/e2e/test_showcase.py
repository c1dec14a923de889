"""What the showcase promises to show can be read back through the typed client, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from fakes.shell import demo

from examples.demo.showcase import showcase
from examples.demo.showcase_parts import Showcase
from examples.demo.showcase_releases import CANARY
from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import RolloutStatus
from penstock.gateway.model.span import POLICY_VIOLATION, Span

pytestmark = pytest.mark.slow


async def spans(client: Client, rollout: str) -> list[Span]:
    """All spans of a rollout."""
    return [span async for span in client.spans(rollout)]


async def check_rollouts(client: Client) -> None:
    """Groups of which some fail, and rollouts that ended in every way."""
    found = {one.id: one async for one in client.rollouts()}
    ends = Counter(one.status for one in found.values())
    assert ends[RolloutStatus.SUCCEEDED] >= 40
    assert ends[RolloutStatus.RUNNING] >= 3
    assert ends[RolloutStatus.QUEUING] == 4
    tries = [one for one in found.values() if one.group == "refund-1002"]
    assert Counter(one.status for one in tries) == {"succeeded": 5, "failed": 3}
    assert found["withdrawn"].status == "cancelled"
    assert found["too-slow"].attempts[-1].status == "timeout"
    assert found["broken-off"].status == "failed"
    failed = await client.transcript("refund-1002.2")
    assert "refund" in failed.model_dump_json()
    assert failed.violations, "the refund of the whole order was refused"
    (reward,) = [span for span in await spans(client, "refund-1002.2") if span.kind == "reward"]
    assert "the whole order" in str(reward.attributes)


async def check_calls(client: Client) -> None:
    """What went wrong stands at the calls: a busy model, a broken stream, a failed tool, a refusal, a sub-agent."""
    busy = [span.http_status for span in await spans(client, "busy") if span.kind == "llm"]
    assert busy[:2] == [429, 200]
    assert any(span.status not in ("ok", "open") for span in await spans(client, "broken-off"))
    assert any(span.error == POLICY_VIOLATION for span in await spans(client, "refund-1002.2"))
    assert any(span.error == "tool_error" for span in await spans(client, "wrong-order"))
    assert {span.agent for span in await spans(client, "with-helper")} >= {"planner", "clerk"}
    for name, stream, calls in (("by-night-1", True, 2), ("by-night-2", False, 3)):
        night = [span for span in await spans(client, name) if span.kind == "llm"]
        assert [(span.path, span.stream, span.status) for span in night] == [("/v1/messages", stream, "ok")] * calls
    tools = await client.tools("refund-1002.1", "a1")
    assert [tool.tool for tool in tools if tool.grade == "certain"] == ["lookup_order", "refund"]
    (slow,) = [span for span in await spans(client, "too-slow") if span.kind == "llm"]
    assert slow.status not in ("ok", "open")


async def check_releases(made: Showcase) -> None:
    """One is on its way, one was taken back by a person and one by the rules."""
    client = made.client
    stages = {one.id: one.stage for one in await client.releases()}
    assert stages == {made.release: "canary", "parcels-1": "rolled_back", "greeting-1": "rolled_back"}
    view = await client.release(made.release)
    assert view.release.counted >= CANARY
    assert view.figures["non_inferiority"] != 1.0
    assert view.figures["candidate.reward"] > view.figures["stable.reward"]
    harmed = await client.audit("parcels-1")
    assert (harmed[-1].who, harmed[-1].after) == ("gateway", "rolled_back")
    kinds = {one.name: (one.kind, len(one.versions)) for one in await client.resources()}
    assert kinds == {
        "clerk": ("model", 2),
        "desk": ("prompt", 2),
        "greeting": ("prompt", 2),
        "parcels": ("prompt", 2),
    }


async def check_runs(client: Client) -> None:
    """One has ended and made weights, one goes on."""
    first, second = await client.run("grpo-1"), await client.run("grpo-2")
    assert (first.status, first.step, len(first.made)) == ("succeeded", 59, 2)
    assert (second.status, second.step, second.message) == ("running", 33, "collecting step 34")
    (reward,) = await client.curves("grpo-1", ["reward"])
    means = [value for value in reward.mean if value is not None]
    assert len(means) == 60
    assert sum(means[-10:]) > sum(means[:10]) + 2.0
    assert len(first.metrics) >= 10
    assert {event.level async for event in client.run_events("grpo-1")} == {"info", "warning"}


async def check_operations(client: Client) -> None:
    """Workers, the queue, an upstream that is held, definitions that wait, and who did what."""
    workers = await client.workers()
    assert [(one.id, one.figures.cpu_percent, len(one.attempts)) for one in workers] == [
        ("desk-1", 64.0, 1),
        ("desk-2", 21.5, 1),
    ]
    queue = await client.queue()
    assert (queue.state, queue.waiting, queue.claimed) == ("open", {"train": 4}, 2)
    (spare,) = [one for one in await client.upstreams() if one.name == "spare"]
    assert (spare.paused, spare.waiting) == (True, 1)
    (orders,) = await client.definitions()
    assert orders.pending("tools")
    entries = [entry async for entry in client.audit_log()]
    done = {(one.who, one.action, one.target) for one in entries}
    assert done >= {("anna", "cancel_rollout", "withdrawn"), ("ben", "pause_upstream", "spare")}
    assert all(one.why for one in entries)


async def test_everything_can_be_read_back(tmp_path: Path) -> None:
    async with asyncio.timeout(90), showcase(tmp_path) as made:
        await check_rollouts(made.client)
        await check_calls(made.client)
        await check_releases(made)
        await check_runs(made.client)
        await check_operations(made.client)


async def test_it_is_held_until_it_is_interrupted(tmp_path: Path) -> None:
    place = demo("examples.demo.showcase", tmp_path)
    process = await place.start(stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    async with asyncio.timeout(place.patience):
        url = (await process.stdout.readline()).decode().split()[-1]
        async with Client(url) as client:
            async for change in client.changes((await client.stats(spans=0)).cursor):
                if change.kind == "run":
                    break
    process.send_signal(signal.SIGINT)
    output, _ = await place.end_of(process)
    assert output.decode().strip() == f"penstock tui --gateway {url}"
    assert process.returncode == 0
    assert os.listdir(tmp_path) == []
