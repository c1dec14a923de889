"""What the screens change is changed: each action asks, does it, and stands in the audit with who and why."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fakes.screens import options, running, until

from examples.demo.showcase import showcase
from examples.demo.showcase_parts import PATIENCE, Showcase, wait_for_release
from examples.demo.showcase_releases import SKIP
from penstock.console.commands.watch import poll_on_change
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.rollout import Judgement
from penstock.tui.screens.registry import SCREENS, make_view
from penstock.tui.view import ScreenView

pytestmark = pytest.mark.slow

GREETING = "You greet customers of Acme. Be brief."
MOST = 200
"""Rollouts within which the evidence is enough."""
CARLA = ActionRequest(who="carla", why="the test says so")


class Acting:
    """A person at the screens."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.done: set[str] = set()

    async def look(self, *words: str) -> tuple[ScreenView[Any, Any], Any]:
        """A screen with its rows."""
        view = make_view(words)
        data = await view.load(self.client)
        if (table := view.table(data, 0)) is not None:
            await view.fill(self.client, data, table.ids[:200])
        return view, data

    async def act(self, id: str, row: str | None, *words: str, names: str = "") -> str:
        """Does something; `names`: what its question must name."""
        view, data = await self.look(*words)
        action = next(one for one in view.actions if one.id == id)
        assert action.unavailable(data, row) is None
        assert names in action.question(data, row)
        self.done.add(id)
        return await action.act(self.client, data, row, CARLA)

    async def why_not(self, id: str, row: str | None, *words: str) -> str:
        """Why something cannot be done."""
        view, data = await self.look(*words)
        return next(one for one in view.actions if one.id == id).unavailable(data, row) or ""


async def act_on_work(person: Acting) -> None:
    """Rollouts, the queue, upstreams."""
    assert await person.act("rollout.cancel", "evening-5", "rollouts", names="evening-5") == "evening-5 is cancelled."
    assert await person.act("rollout.requeue", "evening-5", "rollouts", names="evening-5") == "evening-5 is requeuing."
    assert "did not come from the queue" in await person.why_not("rollout.requeue", "busy", "rollout", "busy")
    assert "has ended already" in await person.why_not("rollout.cancel", None, "rollout", "busy")
    for id, state in (("queue.pause", "paused"), ("queue.drain", "draining"), ("queue.open", "open")):
        assert await person.act(id, None, "workers") == f"The queue is {state}."
    assert await person.why_not("queue.open", None, "workers") == "the queue is open already"
    assert "vllm is paused" in await person.act("upstream.pause", "vllm", "upstreams", names="vllm")
    for name in ("vllm", "spare"):
        assert await person.act("upstream.open", name, "upstreams", names=name) == f"{name} is open."
    assert await person.why_not("upstream.open", "vllm", "upstreams") == "vllm is open already"


async def act_on_tools(person: Acting, shown: Showcase) -> None:
    """Definitions, and calls that wait."""
    assert await person.act("definitions.approve", "orders/refund", "tools", names="orders") == (
        "What orders says of its tools is approved."
    )
    assert "approved already" in await person.why_not("definitions.approve", "orders/refund", "tools")
    asked = "orders/shipping_state"
    assert "It runs: shipping_state" in await person.act("question.allow", asked, "tools", names='"1003"')
    assert await person.why_not("question.deny", asked, "tools") == "no call of this tool waits for a person"
    refused = asyncio.ensure_future(shown.agent("asks-again").call_tool("shipping_state", {"order": "1006"}))
    await asked_for(person.client, "asks-again")
    assert "It was refused: shipping_state" in await person.act("question.deny", asked, "tools", names='"1006"')
    assert "the test says so" in json.dumps(await refused), "the agent hears why"


async def asked_for(client: Client, rollout: str) -> None:
    """Waits until a call of a rollout waits for a person."""
    looks = poll_on_change(client, client.waiting, lambda _: 0.2)
    async with asyncio.timeout(PATIENCE), aclosing(looks):
        async for questions in looks:
            if any(one.rollout == rollout for one in questions):
                return


async def act_on_releases(person: Acting, shown: Showcase) -> None:
    """Releases through everything that can be done to them."""
    assert await person.act("release.freeze", "desk-1", "releases", names="v1 → v2") == "desk-1 is held."
    assert "held already" in await person.why_not("release.freeze", "desk-1", "releases")
    assert await person.act("release.resume", "desk-1", "releases", names="canary") == "desk-1 is canary."
    assert "does not wait for approval" in await person.why_not("release.approve", "desk-1", "releases")
    assert await person.act("release.promote", "desk-1", "releases", names="50%") == "desk-1 is promoted."
    for id in ("promote", "rollback", "freeze", "resume", "approve", "abort"):
        assert "has ended" in await person.why_not(f"release.{id}", "greeting-1", "releases")
    await started(person.client, "desk", "v1")
    assert await person.act("release.rollback", "desk-2", "releases", names="v2 → v1") == "desk-2 is rolled back."
    await started(person.client, "desk", "v1")
    assert await person.act("release.abort", "desk-3", "releases", names="v2 → v1") == "desk-3 is aborted."
    await started(person.client, "greeting", "v2", CanaryStage(split=0.5, rollouts=1, approval=True))
    for first in range(0, MOST, 4):
        await asyncio.gather(*(greeted(shown, f"greeted-{number:02}") for number in range(first, first + 4)))
        if (await person.client.release("greeting-2")).release.waits == "approval":
            break
    await wait_for_release(person.client, "greeting-2", lambda view: view.release.waits == "approval")
    assert await person.act("release.approve", "greeting-2", "releases", names="v1 → v2") == "greeting-2 is canary."
    await wait_for_release(person.client, "greeting-2", lambda view: view.release.stage == "promoted")


async def greeted(shown: Showcase, name: str) -> None:
    """A rollout of the release of the greeting, which is as good as can be."""
    said = await shown.agent(name, prompt=GREETING).answer("Good morning!", 1, stream=False, tools=False)
    assert said
    await shown.finish(name, True, Judgement(value=1.0, source="judge", reason="polite"))


async def started(client: Client, name: str, candidate: str, *stages: CanaryStage) -> None:
    """A release in its canary."""
    how = {"stages": list(stages) or [CanaryStage(split=0.5, rollouts=60)], "margin_absolute": 0.5, "horizon": 400}
    how |= {"guards": {"margin": 0.5}, "holdback": {"rollouts": 0}, **SKIP}
    new = NewRelease(candidate=candidate, policy=ReleasePolicy.model_validate(how), author="ben")
    release = await client.start_release(name, new)
    await wait_for_release(client, release.id, lambda view: view.release.stage == "canary")


async def test_every_action_does_what_it_asks_and_is_in_the_audit(tmp_path: Path) -> None:
    async with showcase(tmp_path) as shown:
        person = Acting(shown.client)
        await act_on_work(person)
        await act_on_tools(person, shown)
        await act_on_releases(person, shown)
        assert person.done == {action.id for named in SCREENS.values() for action in named.view.actions}
        entries = [entry async for entry in shown.client.audit_log() if entry.who == "carla"]
        assert {entry.why for entry in entries} == {CARLA.why}
        assert [entry.action for entry in reversed(entries)] == [
            "cancel_rollout", "requeue_rollout", "pause_queue", "drain_queue", "open_queue", "pause_upstream",
            "open_upstream", "open_upstream", "approve_definitions", "approve_call", "refuse_call", "hold_release",
            "resume_release", "promote_release", "rollback_release", "abort_release", "approve_release",
        ]  # fmt: skip


async def test_a_key_that_may_only_read_switches_the_keys_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakes.process import running as gateway  # the name is that of an app here

    keys = {"PENSTOCK_ADMIN_KEY": "may-all", "PENSTOCK_READ_KEY": "may-read"}
    async with gateway(tmp_path, "", env=keys) as served:
        monkeypatch.delenv("PENSTOCK_ADMIN_KEY", raising=False)
        monkeypatch.setenv("PENSTOCK_READ_KEY", "may-read")
        async with running(options(served.url, "workers")) as pilot:
            await until(pilot, lambda text: "read-only" in text.splitlines()[0] and "Queue open" in text)
            await pilot.press("P")
            await until(pilot, lambda text: "Nothing is changed: your key may only read." in text)
