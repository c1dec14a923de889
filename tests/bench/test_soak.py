"""A soak of some hundred calls with one kill and one reload, every time; `make soak` is a million of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.mistakes import tells

from bench.programs import Cores
from bench.soak.figures import growth, lives, report
from bench.soak.harness import Outcome, Plan, run, schedule
from bench.soak.kinds import KINDS, STEPS, Seen, episode
from bench.soak.plot import plot
from bench.soak.samples import Latency, Sample


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("plan", [Plan(400, 16, 1, 1, samples=8), Plan(600, 16, 2, 1, samples=8, workers=2)])
async def test_every_call_is_accounted_for(tmp_path: Path, plan: Plan) -> None:
    outcome = await run(plan, Cores.choose(), tmp_path / "soak.jsonl")
    said = report(outcome)
    print(said)
    assert outcome.account.wrong == 0
    assert [fault for fault, _ in outcome.faults] == ["kill", "reload", "kill"][: plan.kills + plan.reloads]
    assert outcome.account.ends.total() - outcome.account.unsent >= plan.calls
    on_tape = {end for (_, end), count in outcome.account.ends.items() if count}
    assert {"ok", "error", "cancelled"} <= on_tape, "the run was worth its name"
    written = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert written == [sample.row() for sample in outcome.samples]
    assert len(written) == plan.samples
    assert "0 calls not accounted for" in said
    assert ElementTree.fromstring(plot(outcome)).tag.endswith("svg")


def test_faults_are_over_after_a_third() -> None:
    plan = Plan(calls=300, kills=2, reloads=1)
    assert schedule(plan) == [(30, "kill"), (64, "reload"), (99, "kill")]
    assert schedule(Plan(calls=300, kills=0, reloads=0)) == []


def test_agents_make_calls_of_every_kind() -> None:
    rollouts = [list(episode(random.Random(seed))) for seed in range(300)]
    assert {kind for rollout in rollouts for kind, _, _ in rollout} == set(range(len(KINDS)))
    assert {len(rollout) for rollout in rollouts} == {STEPS}
    assert {kind.sees for kind in KINDS} == {Seen.ANSWERED, Seen.REFUSED, Seen.BROKEN, Seen.LEFT}


def sample(calls: int, life: int, anon_mb: float, whole: bool = True) -> Sample:
    """One of a run of 1,000 calls/s."""
    fast = Latency(100, 5.0, 20.0, 0)
    return Sample(calls, calls / 1000, life, whole, 1000.0, 0.4, anon_mb + 30, anon_mb, 1.0, fast, {"chat": fast})


def test_growth_is_that_of_one_process_in_the_last_third_of_its_life() -> None:
    warming = [sample(1000 * number, 0, 50.0 + number) for number in range(1, 13)]
    after = [sample(1000 * number, 1, 60.0 + min(number, 20), number > 13) for number in range(13, 31)]
    first, second = lives([*warming, *after])
    assert len(second) == 17, "the interval of the kill belongs to nobody"
    assert growth(first) == pytest.approx(100.0)
    assert growth(second) == pytest.approx(0.0)
    assert growth(second[:9]) is None
    said = report(Outcome(Plan(), [*warming, *after]))
    assert tells(said, "process 1", "11,000 calls", "51.0 -> 62.0 MB, +100.00 MB per 100,000 calls", "(flat: NOT")
    assert tells(said, "process 2", "16,000 calls", "74.0 -> 80.0 MB, +0.00 MB per 100,000 calls", "(flat: reached")
