"""What rollouts are given while the tape cannot be written is on the tape when it can be again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.local import KILLED
from fakes.process import Gateway, limit_files, running, upstreams
from fakes.releasing import bench, counting
from fakes.tape import Tape
from fakes.waiting import until

from examples.demo.model import DemoAnswer
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.release import NewRelease, Pin
from penstock.gateway.model.rollout import RolloutConfig
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store import keys
from penstock.gateway.traffic.versions import PendingPins

FULL = 16_384
"""The first pages of a tape: what is written comes after them."""


@contextmanager
def full_disk(gateway: Gateway) -> Generator[None]:
    """No file may be longer than that meanwhile."""
    limit_files(gateway.pid, FULL)
    try:
        yield
    finally:
        limit_files(gateway.pid, None)


async def fallen_back(gateway: Gateway, client: Client, traffic: Traffic) -> str:
    """A rollout of the candidate whose release was rolled back, and which made its next call while the disk was full.
    So did `late`, its first one."""
    release = await traffic.start("travel", "v2", policy(0.5))
    name = "r"
    while await traffic.rollout(name, lambda _: None, calls=1) != "candidate":
        name += "r"
    _ = await client.decide(release.id, "rollback", ActionRequest(who="ann", why="it is worse"))
    with full_disk(gateway):
        _ = await traffic.call(name)
        _ = await traffic.call("late")
    return name


@pytest.mark.slow
@KILLED
async def test_a_rollout_keeps_its_arm_in_a_process_that_did_not_give_it(
    gateway: Gateway, traffic: Traffic, tape: Tape
) -> None:
    """As another worker of a gateway, or one that was started since: the tape can be read."""
    release = await traffic.start("travel", "v2", policy(0.5))
    name = "r"
    while await traffic.rollout(name, lambda _: None, calls=1) != "candidate":
        name += "r"
    await gateway.restart()
    with full_disk(gateway):
        # What it has to write of another one stands before it.
        _ = await traffic.call("late")
        _ = await traffic.call(name)
    spans = await tape.spans(name, 2)
    assert [(span.versions, span.arm) for span in spans] == [({"travel": "v2"}, f"{release.id}:candidate")] * 2
    assert traffic.failures == []


@pytest.mark.slow
@KILLED
async def test_a_person_keeps_an_arm_in_a_process_that_did_not_give_it(
    gateway: Gateway, traffic: Traffic, tape: Tape
) -> None:
    release = await traffic.start("travel", "v2", policy(0.999, unit="user.id"))
    _ = await traffic.call("first", baggage="user.id=ann")
    await gateway.restart()
    with full_disk(gateway):
        _ = await traffic.call("late")
        _ = await traffic.call("second", baggage="user.id=ann")
        _ = await traffic.call("bobs", baggage="user.id=bob")
    given = dict[str, object]()
    for name in ("first", "second", "bobs"):
        (span,) = await tape.spans(name, 1)
        given[name] = span.arm
    assert given == {"first": f"{release.id}:candidate", "second": f"{release.id}:candidate", "bobs": None}
    assert traffic.failures == []


@pytest.mark.slow
@KILLED
async def test_a_rollout_gets_the_version_that_it_names(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape
) -> None:
    named = RolloutConfig(versions={"travel": "v2"})
    _ = await client.enqueue([RolloutSpec(id=name, mode="online", config=named) for name in ("r1", "r2")])
    with full_disk(gateway):
        # What it has to write of another one stands before it.
        _ = await traffic.call("late")
        _ = await traffic.call("r1/agent/planner")
        _ = await traffic.call("r1/agent/critic")
    _ = await traffic.call("r1/agent/planner")
    _ = await traffic.call("r2")
    spans = [*await tape.spans("r1", 3), *await tape.spans("r2", 1)]
    assert [(span.versions, span.arm) for span in spans] == [({"travel": "v2"}, None)] * 4
    assert {(pin.agent, pin.version) for pin in await client.pins("r1")} == {("planner", "v2"), ("critic", "v2")}
    (other,) = await tape.spans("late", 1)
    assert (other.versions, traffic.failures) == ({"travel": "v1"}, [])


@pytest.mark.slow
@KILLED
async def test_what_its_metadata_says_of_a_rollout_counts(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape
) -> None:
    release = await traffic.start("travel", "v2", policy(0.999, unit="user.id"))
    anns = [RolloutSpec(id=name, mode="online", metadata={"user.id": "ann"}) for name in ("first", "second")]
    _ = await client.enqueue(anns)
    _ = await traffic.call("first")
    with full_disk(gateway):
        _ = await traffic.call("late")
        _ = await traffic.call("second")
    for name in ("first", "second"):
        (span,) = await tape.spans(name, 1)
        assert (name, span.arm) == (name, f"{release.id}:candidate")
    assert traffic.failures == []


@pytest.mark.slow
@KILLED
async def test_a_rollout_that_fell_back_while_the_disk_was_full_is_marked(
    gateway: Gateway, client: Client, traffic: Traffic
) -> None:
    name = await fallen_back(gateway, client, traffic)
    assert traffic.failures == []

    # Neither makes another call.
    async def are_pinned() -> bool:
        (mixed,) = await client.pins(name)
        return mixed.mixed and [pin.version for pin in await client.pins("late")] == ["v1"]

    await until(are_pinned)
    (mixed,) = await client.pins(name)
    assert (mixed.version, mixed.arm) == ("v1", "candidate")


@pytest.mark.slow
@KILLED
async def test_a_span_with_the_version_that_a_rollout_fell_back_to_brings_the_mark(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape
) -> None:
    """In one transaction, so that no kill comes between them; also where the rollout had nothing on the tape before."""
    name = await fallen_back(gateway, client, traffic)
    for rollout, spans in ((name, 3), ("late", 2)):
        _ = await traffic.call(rollout)
        _ = await tape.spans(rollout, spans)
    _ = await gateway.kill()
    assert traffic.failures == []
    await gateway.start(gateway.port)
    (mixed,) = await client.pins(name)
    assert (mixed.version, mixed.arm, mixed.mixed) == ("v1", "candidate", True)
    assert [pin.version for pin in await client.pins("late")] == ["v1"]


@pytest.mark.slow
async def test_a_replay_asks_nothing_twice_while_the_disk_is_full(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        counting() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url)) as gateway,
        Client(gateway.url) as client,
    ):
        provider.script = lambda asked: DemoAnswer("Hello")
        _ = await client.add_version("travel", prompt(STABLE, sent=True))
        _ = await client.add_version("travel", prompt(CANDIDATE))
        traffic = Traffic(gateway.url, http, client)
        for number in range(4):
            _ = await traffic.call(f"r{number}")
        provider.held = lambda asked: True
        how = policy(0.5, replayed="required")
        release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
        await provider.until(lambda: provider.running == 8)
        with full_disk(gateway):
            provider.held = lambda asked: False
            provider.go.set()
            await until(lambda: gateway.log.count("waits for the tape") >= 3)
            assert len(provider.log) == 4 + 8
        view = await traffic.when(release.id, lambda view: view.release.stage in ("canary", "rolled_back"))
        assert view.release.stage == "canary", view.release.reason
        assert len(provider.log) == 4 + 8 + 8


async def test_a_pin_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    given = (Pin(resource="travel", version="v1"),)
    async with counting() as provider, bench(tmp_path, provider) as made:
        await made.do(lambda tape: tape.put("pins", keys.rollout_key("r1"), b"damaged"))
        unwritten = PendingPins(made.context.recorder)
        for name in ("r0", "r1", "r2", "r3"):
            unwritten.add(name, given)
        reader = ReleaseReader(made.context.tape)
        await until(lambda: [name for name in ("r0", "r2", "r3") if reader.pins(name)] == ["r0", "r2", "r3"])
