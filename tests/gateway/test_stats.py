"""Sums over the newest spans: what is counted, and as what."""

from __future__ import annotations

from fakes.memory_tape import MemoryTape, call

from gateway.model import Reward, Span
from gateway.stats import gather
from gateway.views import RewardStats


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
    figures = await gather(tape, 100, 0)
    assert (figures.counted_spans, figures.complete) == (6, True)
    assert figures.by_status == {"ok": 1, "error": 1}
    assert figures.by_kind == {"llm": 2, "event": 1, "reward": 3}
    assert list(figures.by_model) == ["gpt-5-mini"]
    assert figures.rewards == RewardStats(
        count=3, untrusted=1, mean=0.75, by_source={"runner": 1, "judge": 1, "agent": 1}
    )


async def test_dimensions_alone_have_no_mean() -> None:
    tape = MemoryTape()
    tape.add(call(1, kind="reward", attributes=Reward(dimensions={"style": 1.0}).attributes()))
    assert (await gather(tape, 100, 0)).rewards.mean is None
