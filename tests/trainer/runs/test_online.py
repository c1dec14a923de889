"""`penstock train grpo --online`, a process of its own that learns from agents which nobody queued: it waits for their
rewards, shows production one release after the other, stops itself, and goes on exactly after `kill -9`."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.engine import FakeEngine
from fakes.lives import Life, begun
from fakes.mistakes import tells
from fakes.process import ROOT, Gateway
from fakes.production import PATIENCE, Shop
from fakes.settings import Sections, toml
from fakes.staging import write_tasks
from fakes.workers import finish
from openai import AsyncOpenAI

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, Event
from penstock.gateway.model.release import Release
from penstock.gateway.model.run import Run
from penstock.trainer.config import load
from penstock.trainer.data.production import ConsumedLog
from penstock.trainer.engines.checkpoint import Checkpoints
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.runs.supervision import LogDisplay, RunReporter

# Trainers that start again and again, each with a model to load.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("small_tokens")]

POLICY = 'replayed = "skip"\nshadowed = "skip"\nmargin_absolute = 0.5\n[[stages]]\nsplit = 0.5\nrollouts = 1000\n'


@dataclass
class Story:
    """A trainer and what it meets."""

    shop: Shop
    home: Path
    lives: AsyncExitStack
    """All that it has had, and killed when the test is over."""
    life: Life | None = None

    async def start(self) -> None:
        """Starts the trainer, or starts it again."""
        self.life = await self.lives.enter_async_context(
            begun(self.home / "train.toml", self.shop.gateway.url, "--online")
        )

    async def kill(self) -> None:
        """As a crash would."""
        assert self.life is not None
        self.life.signal(signal.SIGKILL)
        await self.life.ended()

    async def ended(self) -> int:
        """How it ended."""
        assert self.life is not None
        async with asyncio.timeout(PATIENCE):
            return await self.life.ended()

    @property
    def log(self) -> str:
        """What this life has said, as far as it was read."""
        assert self.life is not None
        return self.life.text

    async def run(self) -> Run | None:
        """As it is on the tape."""
        try:
            return await self.shop.client.run("run")
        except ClientError:
            return None

    async def made(self, version: str) -> None:
        """Until it has made a version."""

        async def there() -> bool:
            run = await self.run()
            return run is not None and version in [one.version for one in run.made]

        await self.shop.when(there, "run")

    async def done(self, step: int) -> None:
        """Until a step is reported."""

        async def there() -> bool:
            run = await self.run()
            return run is not None and (run.step or 0) >= step

        await self.shop.when(there, "run")

    async def releases(self) -> list[Release]:
        """Those to production, oldest first."""
        found = await self.shop.client.releases("policy")
        return [one for one in reversed(found) if one.only.modes == ["online"]]

    async def release(self, count: int) -> Release:
        """The newest release to production, as soon as there are so many and its canary has begun."""

        async def there() -> Release | None:
            found = await self.releases()
            return found[-1] if len(found) >= count and found[-1].stage == "canary" else None

        return await self.shop.when(there, "release")

    async def told(self) -> list[str]:
        """Its events, oldest first."""
        return [event.text async for event in self.shop.client.run_events("run")][::-1]

    async def stable(self) -> str:
        """What new rollouts of production get while no release is live."""
        stable = (await self.shop.client.resource("policy")).stable
        rules = [rule.version for rule in stable.rules if rule.only.modes == ["online"]]
        return rules[0] if rules else stable.version

    async def evaluate(self, *rewards: float) -> None:
        """A runner does the next held-out tasks."""
        for reward in rewards:
            asked = ClaimRequest(worker="w", modes=["val"], wait_s=60)
            (claim,) = (await self.shop.client.claim(asked)).claims
            await finish(self.shop.client, claim, reward)

    def taken(self) -> dict[int, list[str]]:
        """The rollouts of each step."""
        book = ConsumedLog(self.home / "run" / "taken")
        steps = (int(path.name[5:]) for path in (self.home / "run" / "taken").iterdir())
        return {step: list(book.rollouts_of(step) or ()) for step in sorted(steps)}


class Begin:
    """Makes stories."""

    def __init__(self, shop: Shop, vllm: FakeEngine, home: Path, model: Path, lives: AsyncExitStack) -> None:
        self.shop, self.vllm, self.home, self.model, self.lives = shop, vllm, home, model, lives

    async def __call__(self, steps: int, evaluate: int = 0, keep: int = 1) -> Story:
        """A trainer that has started. `evaluate`, `keep`: steps between evaluations, and between checkpoints."""
        write_tasks(self.home, "1")
        (self.home / "policy.toml").write_text(POLICY)
        given: Sections = {
            "run": {"name": "run", "directory": self.home / "run", "steps": steps, "checkpoint_every": keep},
            "model": {"path": self.model, "rank": 4},
            "advantage": {"estimator": "reinforce++"},
            "optimiser": {"learning_rate": 0.01},
            "engine": {"batch_tokens": 512},
            "inference": {"urls": [self.vllm.openai_url]},
            "publish": {"release": "auto", "policy": self.home / "policy.toml"},
            "online": {"batch_rollouts": 4, "quiet_seconds": 0.0, "max_drop": 0.1},
            "evaluate": {"every": evaluate, "suite": [{"tasks": self.home / "tasks.jsonl"}]}
            if evaluate
            else {"every": 1000},
        }
        (self.home / "train.toml").write_text(toml(given))
        made = Story(self.shop, self.home, self.lives)
        await made.start()
        await made.made("run.0")
        return made


@pytest.fixture
async def begin(shop: Shop, vllm: FakeEngine, tmp_path: Path, model: Path) -> AsyncGenerator[Begin]:
    async with AsyncExitStack() as lives:
        yield Begin(shop, vllm, tmp_path, model, lives)


def names(word: str, count: int = 4) -> list[str]:
    return [f"{word}-{number}" for number in range(count)]


async def test_it_learns_from_production_and_shows_it_one_release_after_the_other(begin: Begin) -> None:
    story = await begin(steps=4)
    shop, decide = story.shop, story.shop.client.decide
    # An unmodified agent; most of what it does is never judged.
    async with AsyncOpenAI(base_url=shop.gateway.openai("a-0"), api_key="x") as openai:
        await openai.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
    await shop.serve(*names("a")[1:], *names("never"))
    for number, name in enumerate(names("a")):
        await shop.reward(name, number % 2)
    first = await story.release(1)
    assert (first.candidate, first.stable, first.author) == ("run.1", "base", "run")
    # While it is live the run learns on, from both arms, and begins no other.
    for step, word in ((2, "b"), (3, "c")):
        await shop.busy(*names(word))
        await story.done(step)
    assert [one.candidate for one in await story.releases()] == ["run.1"]
    assert not [text for text in await story.told() if "does not see" in text]
    await decide(first.id, "promote", ActionRequest(who="ann"))
    # The newest has its turn.
    second = await story.release(2)
    assert (second.candidate, second.stable) == ("run.3", "run.1")
    # It does harm, which the gateway sees: the run stops itself and production keeps what it had.
    await _violate(story, second)
    assert await story.ended() == 1
    run = await story.run()
    assert run is not None
    assert (run.status, await story.stable()) == ("stopped", "run.1")
    assert run.message is not None
    assert run.message.startswith(f"release {second.id} of run.3 was rolled back: ")
    assert run.message in story.log
    assert story.taken() == {1: names("a"), 2: names("b"), 3: names("c")}
    # Whoever starts it again is told the same.
    await story.start()
    assert await story.ended() == 1
    again = await story.run()
    assert again is not None
    assert (again.status, again.message, again.resumed) == ("stopped", run.message, 1)
    points = [point async for point in shop.client.points("run")]
    assert [(point.step, point.values["rollouts"], point.values["reward"]) for point in points] == [
        (1, 4.0, 0.5), (2, 4.0, 0.5), (3, 4.0, 0.5),
    ]  # fmt: skip
    # The third was served by the base or run.1, when run.2 was the newest.
    assert points[0].values["staleness/max"] == 0
    assert points[2].values["staleness/max"] in (1, 2)


async def _violate(story: Story, release: Release) -> None:
    """A rollout on the candidate that does what must never happen."""
    name = await _on(story, release, "candidate")
    await story.shop.client.add_events(name, "a1", [Event(name="violation", attributes={"hard": True})])
    await story.shop.reward(name, 1.0)


async def _on(story: Story, release: Release, arm: str) -> str:
    """A rollout that was assigned to an arm."""
    for number in range(100):
        name = f"{arm}-{number}"
        await story.shop.serve(name)
        if any((pin.release, pin.arm) == (release.id, arm) for pin in await story.shop.client.pins(name)):
            return name
    raise AssertionError(f"nobody got the {arm}")


async def test_killed_in_the_middle_of_a_step_it_learns_from_each_once(begin: Begin) -> None:
    story = await begin(steps=3, evaluate=2, keep=2)
    shop, run = story.shop, story.home / "run"
    await story.evaluate(0.5)
    await shop.busy(*names("a"))
    await story.done(1)
    await shop.busy(*names("b"))
    # It has learnt from them and published, and waits for its evaluation: no checkpoint yet.
    await story.made("run.2")
    await shop.when(lambda: _waits(story), "rollout")
    await story.kill()
    assert not (run / "checkpoints").exists()
    first, before = (_weights(run / "adapters" / f"run.{step}") for step in (1, 2))
    # Meanwhile somebody changes their mind, and more has come.
    await shop.reward("b-0", 0.7)
    await shop.busy(*names("c"))
    await story.start()
    await story.evaluate(0.5, 0.5)
    assert await story.ended() == 0, story.log
    found = await story.run()
    assert found is not None
    assert (found.status, found.resumed, found.step) == ("succeeded", 1, 3)
    assert story.taken() == {1: names("a"), 2: names("b"), 3: names("c")}
    # What it made of them again is what it had published, and it differs from what came before and after.
    adapters = {step: _adapter(story, step) for step in (2, 3)}
    assert adapters[2] == before
    assert len({first, before, adapters[3]}) == 3


async def _waits(story: Story) -> bool:
    return (await story.shop.client.queue()).waiting.get("val", 0) > 0


def _adapter(story: Story, step: int) -> bytes:
    """The weights that the checkpoint of a step holds."""
    kept = story.home / "run" / "checkpoints" / f"step-{step:08d}"
    alone = story.home / f"alone-{step}"
    shutil.copytree(kept, alone / kept.name)
    found = Checkpoints(alone, 1).latest()
    assert found is not None
    made = TrainingEngine(load(story.home / "train.toml"))
    made.restore(found[1]["engine"])
    made.save_adapter(alone / "adapter")
    return _weights(alone / "adapter")


def _weights(adapter: Path) -> bytes:
    return (adapter / "adapter_model.safetensors").read_bytes()


async def test_it_stops_itself_when_evaluation_falls(begin: Begin) -> None:
    story = await begin(steps=9, evaluate=1)
    shop = story.shop
    await story.evaluate(0.6)
    for word, reward in (("a", 0.8), ("b", 0.75)):
        await shop.busy(*names(word))
        await story.evaluate(reward)
    live = await story.release(1)
    await shop.busy(*names("c"))
    await story.evaluate(0.4)
    await story.done(3)
    # One bad evaluation is borne, but is nothing to show anybody.
    await shop.client.decide(live.id, "promote", ActionRequest(who="ann"))
    await shop.busy(*names("d"))
    await story.evaluate(0.3)
    assert await story.ended() == 1, story.log
    run = await story.run()
    assert run is not None
    assert (run.status, run.step) == ("stopped", 4)
    assert tells(run.message, "evaluation fell", "0.4 after step 3, 0.3 after step 4")
    assert [one.candidate for one in await story.releases()] == [live.candidate]
    assert await story.stable() == live.candidate
    # It remembers, and nothing is learnt any more.
    await story.start()
    assert await story.ended() == 1
    again = await story.run()
    assert again is not None
    assert (again.message, again.step) == (run.message, 4)


async def test_what_is_live_when_evaluation_falls_is_held_for_a_person(begin: Begin) -> None:
    story = await begin(steps=9, evaluate=1)
    await story.evaluate(0.6)
    await story.shop.busy(*names("a"))
    await story.evaluate(0.6)
    live = await story.release(1)
    for word in "bc":
        await story.shop.busy(*names(word))
        await story.evaluate(0.2)
    assert await story.ended() == 1, story.log
    (release,) = await story.releases()
    assert (release.id, release.stage, await story.stable()) == (live.id, "held", "base")
    assert tells(release.reason, "evaluation fell", "0.2 after step 2, 0.2 after step 3")


async def test_when_production_is_too_far_behind_it_waits_for_a_release(begin: Begin) -> None:
    story = await begin(steps=2)
    path = story.home / "train.toml"
    await story.kill()
    path.write_text(path.read_text() + "\n[rollouts]\nstaleness = 0\n")
    await story.start()
    await story.shop.busy(*names("a"))
    live = await story.release(1)
    await story.shop.reward(await _on(story, live, "stable"), 1.0)
    await story.shop.client.decide(live.id, "promote", ActionRequest(who="ann"))

    async def behind() -> bool:
        return any("versions (rollouts.staleness) behind run.1" in text for text in await story.told())

    await story.shop.when(behind, "run")
    await story.shop.busy(*names("b"))
    assert await story.ended() == 0, story.log
    assert story.taken() == {1: names("a"), 2: names("b")}


async def test_a_run_that_waits_says_that_it_lives(gateway: Gateway) -> None:
    async with Client(gateway.url) as client:
        reporter = RunReporter(client, "run", LogDisplay(1))
        await reporter.begin("grpo", {}, 1, 0)
        before = (await client.run("run")).last_seen_ns
        await reporter.heartbeat()
        assert (await client.run("run")).last_seen_ns > before


def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        f"[model]\npath = {json.dumps(str(tmp_path))}\n[rollouts]\nahead = true\n[publish]\nrelease = 'auto'\n"
    )
    command = [sys.executable, "-m", "penstock", "train", "grpo", str(path), "--online"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 2
    assert "rollouts.ahead: production's rollouts are not queued" in found.stderr
