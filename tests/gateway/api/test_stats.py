"""Sums over the newest spans: what is counted, and as what."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.memory_tape import MemoryTape, call

from penstock.gateway.api.stats import gather
from penstock.gateway.api.tool_stats import failed
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.answers import RewardStats
from penstock.gateway.model.attributes import REPLAY_OF, SHADOW_OF
from penstock.gateway.model.release_calls import own, rehearsed
from penstock.gateway.model.rollout import Reward, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span


def reward(sequence: int, **about: float | str | bool | None) -> Span:
    given = Reward.model_validate(about)
    return call(sequence, kind="reward", name="reward", model=None, usage=None, attributes=given.attributes())


async def test_calls_rewards_and_events_are_told_apart() -> None:
    tape = MemoryTape()
    for span in (
        call(1),
        call(2, status="error"),
        call(3, kind="event", name="stdout", model=None, usage=None),
        reward(4, value=1.0, source="runner"),
        reward(5, value=0.5, source="judge"),
        reward(6, value=-100.0, source="agent", trusted=False),
    ):
        tape.add(span)
    figures = await gather(tape, 100, Metrics())
    assert (figures.counted_spans, figures.complete) == (6, True)
    assert figures.by_status == {"ok": 1, "error": 1}
    assert figures.by_kind == {"llm": 2, "event": 1, "reward": 3}
    assert list(figures.by_model) == ["gpt-5-mini"]
    assert figures.rewards == RewardStats(
        count=3, untrusted=1, mean=0.75, by_source={"runner": 1, "judge": 1, "agent": 1}
    )


async def test_what_was_asked_for_a_release_is_in_no_sum() -> None:
    tape = MemoryTape()
    tape.add(call(1))
    tape.add(reward(2, value=1.0))
    for number, mark in enumerate((REPLAY_OF, SHADOW_OF), 3):
        tape.add(call(number, rollout="x-1-shadow", attributes={mark: "r1/a1#1"}, status="error"))
    rehearsal = "x-1-rehearsal-a2-1-candidate"
    tape.add(call(1, rollout=rehearsal, attributes={REPLAY_OF: "r1/a1"}))
    tape.add(reward(2, value=0.0).model_copy(update={"rollout": rehearsal}))
    figures = await gather(tape, 100, Metrics())
    assert (figures.counted_spans, figures.by_kind) == (6, {"llm": 4, "reward": 2})
    assert (figures.totals.calls, figures.by_status, figures.by_model["gpt-5-mini"].calls) == (1, {"ok": 1}, 1)
    assert (figures.rewards.count, figures.rewards.mean) == (1, 1.0)


FAILED: dict[str, Any] = {"status": RolloutStatus.FAILED}


def run(rollout: str, sequence: int, tool: str = "search", server: str = "web", **about: Any) -> Span:
    named = {"gen_ai.tool.name": tool}
    return call(sequence, rollout, kind="tool", model=None, usage=None, upstream=server, attributes=named, **about)


async def test_tools_are_summed_with_the_rollouts_that_ran_them() -> None:
    tape = MemoryTape()
    for number in range(1, 5):
        # r1 and r2 fail, r3 succeeds, nobody says how r4 went.
        statuses: dict[int, dict[str, Any]] = {1: FAILED, 2: FAILED, 3: {"status": RolloutStatus.SUCCEEDED}}
        tape.add(call(1, f"r{number}"), None, **statuses.get(number, {}))
    for number, name in enumerate(("r1", "r1", "r2", "r3", "r4"), 2):
        tape.add(run(name, number, ms=100 * number))
    tape.add(run("r1", 9, "fetch", status="error", error="tool_error"))
    tape.add(run("r3", 9, server="other", status="cancelled"))
    tape.add(run("r3", 10, status="open", ms=0).model_copy(update={"end_ns": None}))
    search, other, fetch = (await gather(tape, 100, Metrics())).by_tool
    assert (search.server, search.tool, search.calls, search.errors, search.cancelled) == ("web", "search", 5, 0, 0)
    assert (search.median_ns, search.p95_ns) == (400_000_000, 600_000_000)
    assert (search.rollouts, search.failed, search.share_of_failed, search.share_of_others) == (3, 2, 1.0, 1.0)
    assert (fetch.tool, fetch.calls, fetch.errors, fetch.share_of_failed, fetch.share_of_others) == (
        "fetch", 1, 1, 0.5, 0.0,
    )  # fmt: skip
    assert (other.server, other.tool, other.calls, other.cancelled) == ("other", "search", 1, 1)


@pytest.mark.parametrize(
    ("status", "reward", "bad"),
    [
        ("failed", None, True),
        ("failed", 1.0, True),
        ("succeeded", None, False),
        ("succeeded", 0.0, True),
        ("running", 0.5, False),
        ("running", -1.0, True),
        ("running", None, None),
        ("cancelled", None, None),
    ],
)
def test_when_a_rollout_has_failed(status: str, reward: float | None, bad: bool | None) -> None:
    assert failed(RolloutSummary(id="r1", status=RolloutStatus(status), reward=reward)) == bad


async def test_without_tools_no_rollout_is_looked_up() -> None:
    tape = MemoryTape()
    tape.add(call(1))
    tape.rollout = lambda rid: pytest.fail(rid)
    assert (await gather(tape, 100, Metrics())).by_tool == []


@pytest.mark.parametrize(
    ("rollout", "is_one"),
    [
        ("x-1-rehearsal-a2-17-candidate", True),
        ("x-1-rehearsal-a2-17-incumbent", True),
        ("x-1-rehearsal", False),
        ("x-1-rehearsal-a2-17-other", False),
        ("rehearsal-a2-17-candidate", False),
        ("r1", False),
    ],
)
def test_a_run_of_a_rehearsal_is_known_by_its_name(rollout: str, is_one: bool) -> None:
    assert rehearsed(rollout) == own(call(1, rollout=rollout)) == is_one


async def test_dimensions_alone_have_no_mean() -> None:
    tape = MemoryTape()
    tape.add(call(1, kind="reward", attributes=Reward(dimensions={"style": 1.0}).attributes()))
    assert (await gather(tape, 100, Metrics())).rewards.mean is None
