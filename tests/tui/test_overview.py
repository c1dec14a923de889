"""What the overview says, without a gateway."""

from __future__ import annotations

from fakes.goldens import text_of

from penstock.gateway.model.answers import ModelStats, RewardStats, Stats
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.rollout import Totals, Worker
from penstock.gateway.model.upstream import UpstreamView
from penstock.tui.screens.overview import Overview, drawn


def text(count: int) -> str:
    """An overview in which there is so much of everything."""
    sums = {"calls": count, "errors": count}
    stats = Stats(
        counted_spans=count, complete=True, since_ns=None, totals=Totals(**sums), by_model={"m": ModelStats(**sums)},
        by_status={}, by_kind={}, rewards=RewardStats(), tape={"rollouts": count, "attempts": count}, cursor=0,
        gaps=count,
    )  # fmt: skip
    paused = UpstreamView(name="up", paused=True, paused_s=5, bound_s=9, waiting=count, running=0, waited=0, refused=0)
    status = QueueStatus(state="open", waiting={}, claimed=0, oldest_ns=None)
    workers = [Worker(id=f"w{number}", last_seen_ns=0) for number in range(count)]
    return text_of(drawn(Overview(None, stats, status, workers, [], [], [], [], [paused], []), None, 0, 100), 100)


def test_one_is_no_plural() -> None:
    one, two = text(1), text(2)
    for noun in ("rollout", "attempt", "error", "span", "worker"):
        assert f"1 {noun}" in one
        assert f"1 {noun}s" not in one
        assert f"2 {noun}s" in two
    for said in ("1 call could not be recorded", "1 call waits", "1 call  "):
        assert said in one
    for said in ("2 calls could not be recorded", "2 calls wait\n", "2 calls  "):
        assert said in two
