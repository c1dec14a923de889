"""The sentence that says what a run or a release has come to: for every kind, by what the run itself decides from."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fakes.trials import Trial, steady

from penstock.console.views.releases import release_result
from penstock.console.views.runs import result
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.run import CandidateTree, Run, RunCandidate, RunKind, RunStatus
from penstock.gateway.work.curves import Series, curve

HELD, NONE = "evaluation/held/reward", "no tasks are held out ([[evaluate.suite]])"
Values = Mapping[str, Mapping[int, float]]
SPREAD: Values = {f"{HELD}_low": {0: 0.4, 9: 0.58}, f"{HELD}_high": {0: 0.6, 9: 0.9}, "evaluation/held/tasks": {9: 24}}
RUNS: list[tuple[RunKind, Values, str]] = [
    ("grpo", {}, "Not enough data yet: it has not reported a step."),
    ("grpo", {"updates": {0: 0, 1: 0}, HELD: {0: 0.5}}, "Nothing was learnt: none of 2 steps has updated the weights."),
    ("grpo", {"rollouts": {0: 16, 1: 4}}, "Not enough data yet: 0 of 20 rollouts have a reward."),
    ("grpo", {"reward": {0: 0.31, 9: 0.42}}, f"Not known: {NONE}. reward: 0.31 at step 0 and 0.42 at step 9."),
    ("grpo", {HELD: {0: 0.5}}, f"Not known: the held-out tasks were evaluated only once. {HELD}: 0.5 at step 0."),
    (
        "grpo", {HELD: {0: 0.5, 5: 0.4, 9: 0.5}, **SPREAD},
        "Nothing was learnt: 0.50 before and after over 24 held-out tasks.",
    ),
    ("grpo", {HELD: {0: 0.5, 9: 0.4}}, "Nothing was learnt: 0.50 before, 0.40 after on held-out tasks."),
    (
        "grpo", {HELD: {0: 0.5, 9: 0.75}, **SPREAD},
        "Step 9 was better: 0.75 against 0.50 before over 24 held-out tasks; the 95 % intervals overlap.",
    ),
    (
        "grpo", {HELD: {0: 0.1, 5: 0.8, 9: 0.8, 12: 0.7}},
        "Step 5 was better: 0.80 against 0.10 before on held-out tasks. It was 0.70 after step 12.",
    ),
    ("grpo", {HELD: {0: 0.501, 9: 0.504}}, "Step 9 was better: 0.504 against 0.501 before on held-out tasks."),
    ("sft", {"loss": {1: 2.5}}, "Not known: no lessons are held out (data.held_out). loss: 2.5 at step 1."),
    (
        "sft", {"evaluation/loss": {0: 1.5, 9: 0.75}, "lessons/held_out": {0: 12}},
        "It was better: the loss over 12 held-out lessons was 1.5 before and 0.75 after step 9.",
    ),
    (
        "dpo", {"evaluation/loss": {0: 0.69, 5: 0.5, 9: 0.8}},
        "It was worse: the loss was 0.69 before and 0.8 after step 9, lowest after step 5 (0.5).",
    ),
    ("dpo", {"evaluation/loss": {0: 0.5, 9: 0.5}}, "Nothing was learnt: the loss was 0.5 before and 0.5 after step 9."),
    (
        "custom", {"score": {0: 1, 3: 2}},
        "Not known: a custom run does not say what decides. score: 1 at step 0 and 2 at step 3.",
    ),
]  # fmt: skip


def said(kind: RunKind, values: Values, status: RunStatus = "succeeded", tree: CandidateTree | None = None) -> str:
    curves = [curve(name, Series([*one], [*one.values()]), 0, None, 100) for name, one in values.items()]
    return result(Run(id="r", kind=kind, status=status, tree=tree), curves)


@pytest.mark.parametrize(("kind", "values", "sentence"), RUNS)
def test_a_run_says_what_it_has_come_to(kind: RunKind, values: Values, sentence: str) -> None:
    assert said(kind, values) == sentence
    running = said(kind, values, "running")
    assert (
        running == sentence
        if sentence.startswith("Not ")
        else running.startswith(("So far, step", "So far, no", "So far, it"))
    )


SEED, BEST = RunCandidate(id="s", state="seed"), RunCandidate(id="c2", pairs=40, gain=0.25, e_value=7.25, needed=40)
TEST: Values = {"test/seed": {200: 0.74}, "test/winner": {200: 0.81}, "test/tasks": {200: 24}}


def test_a_search_says_what_it_has_come_to() -> None:
    racing, won = (
        CandidateTree(candidates=[SEED, BEST.model_copy(update={"state": one})]) for one in ("racing", "winner")
    )
    raced = "The best in the race, c2, has an e-value of 7.25 of 40 after 40 tasks."
    stays = "no candidate was shown to be better, and the texts stay as they are"
    assert said("apo", {}, "running") == "Not decided yet. No candidate was in the race."
    assert said("apo", {}, "running", racing) == f"Not decided yet. {raced}"
    assert said("apo", {}, tree=racing) == f"Nothing was learnt: {stays}. {raced}"
    assert said("apo", {}, tree=won) == "Candidate c2 won the race: +0.250 over 40 tasks. It was not tested."
    better = "Candidate c2 was better: 0.81 against 0.74 over 24 tasks that nobody has seen"
    assert said("apo", TEST, tree=won) == f"{better}."
    interval: Values = {"test/gain_low": {200: -0.01}, "test/gain_high": {200: 0.15}}
    chance = "; the 95 % interval of the gain is -0.010 to +0.150, so it may be chance."
    assert said("apo", {**TEST, **interval}, tree=won) == better + chance
    worse = better.replace("better", "not better, though it had won the race").replace("0.74", "0.90")
    assert said("apo", {**TEST, "test/seed": {200: 0.9}}, tree=won) == f"{worse}."


def test_a_release_says_what_it_has_come_to() -> None:
    short = ReleasePolicy(
        stages=[CanaryStage(split=0.2, rollouts=5), CanaryStage(split=0.5, rollouts=5)], margin_absolute=0.1
    )
    trial = Trial.of(short)
    assert release_result(trial.view) == "Not started: no rollout has had v13 yet."
    trial.prepare(replayed={"skipped": True}).assign()
    assert release_result(trial.view) == "Not enough data yet: 0 of 1 rollouts have a reward."
    trial.run(300, steady(0.7, 0.72))
    figures = trial.view.figures
    means = f"{figures['candidate.reward']:.3f} against {figures['stable.reward']:.3f} in 300 rollouts"
    waits = f"no loss of 0.07 has an e-value of {figures['non_inferiority']:.3g} of 20"
    assert release_result(trial.view) == f"Not decided yet: v13 has {means}; {waits}."
    trial.person("hold", "held", held_in="canary", why="it is late")
    assert release_result(trial.view) == "Not decided: v13 was held: it is late."
    unsure = Trial.of(ReleasePolicy(stages=[CanaryStage(split=0.5)], horizon=60)).prepare().run(60, steady(0.7, 0.7))
    assert unsure.release.stage == "held"
    assert release_result(unsure.view).startswith("Not decided: v13 has 0.")
    assert release_result(unsure.view).endswith("; that shows no harm, nor does it exclude a loss of 0.07.")
    good = Trial.of(short).prepare().run(20_000, steady(0.7, 0.9))
    assert good.release.stage == "promoted"
    assert release_result(good.view).startswith("v13 was no worse: 0.")
    assert release_result(good.view).endswith(" rollouts; a loss of 0.07 or more is excluded.")
    bad = Trial.of().prepare().run(3000, steady(0.7, 0.4))
    assert bad.release.stage == "rolled_back"
    assert release_result(bad.view).startswith("v13 was worse: 0.")
    assert release_result(bad.view).endswith(" rollouts. It was rolled back.")
