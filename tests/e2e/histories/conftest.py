"""A history in which nothing is wrong, and its tape."""

from __future__ import annotations

import pytest
from e2e.histories.history import Operation
from e2e.histories.planted import attempt, call, claim, did, finish, held, reward, span, told
from e2e.histories.tape import Tape


@pytest.fixture
def history() -> list[Operation]:
    """A rollout that was queued, claimed, run, finished, and followed; nothing is wrong."""
    return [
        did("enqueue", 0.0, 1.0, rollouts=["q1"], answer={"created": ["q1"]}),
        claim(2.0, 3.0), call(4.0, 5.0), held(5.0, 6.0),
        finish(7.0, 8.0),
        did("follow", 20.0, 20.0, actor="f1", since=0),
        told(1, "rollout q1", "queuing"), told(2, "attempt q1/a1", "preparing"), told(3, "span q1/a1#1", "open"),
        told(4, "span q1/a1#1", "ok"), told(5, "attempt q1/a1", "succeeded"), told(6, "rollout q1", "succeeded"),
    ]  # fmt: skip


@pytest.fixture
def tape() -> Tape:
    """Its tape. The beginning of the call, at 3, is not told any more."""
    feed = {1: "rollout q1", 2: "attempt q1/a1", 4: "span q1/a1#1", 5: "attempt q1/a1", 6: "rollout q1"}
    spans = [span(), reward()]
    return Tape(
        {"q1": "succeeded"},
        {("q1", "a1"): attempt()},
        spans,
        feed,
        stages={"r-1": "promoted"},
        released={"r-1": "travel"},
    )
