"""`ours` finds edits that help among others, from few rollouts, and does not stumble over what it is told."""

from __future__ import annotations

import json
import re
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.laboratory import SEED, Bench, tasks

from bench.apo.laboratory import NAME, Simulated
from bench.apo.worlds import POISON, Family, world
from penstock.trainer.apo.engines.pooled_edits import PooledEditEngine
from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, SearchBudget, TrialSpec
from penstock.trainer.apo.reflection import Edit, applied
from penstock.trainer.apo.search import PromptSearch, SearchResult, split

TRAIN, VALIDATION = tasks(24), tasks(40, first=24)


def named(*edits: dict[str, Any]) -> str:
    """An answer with these hypotheses."""
    usual = {"failure": "it is not answered well", "resource": "desk", "kind": "add", "line": 0, "text": ""}
    return json.dumps({"hypotheses": [usual | edit for edit in edits]})


def well(candidate: Candidate, order: TrialSpec) -> float:
    """A text with `well` in it fails on a tenth of the tasks, others on most of them; `ill` spoils it."""
    text, place = candidate.texts["desk"], (7 * int(order.task[1:]) + 3 * order.number) % 10
    return float(place < (9 if "well" in text and "ill" not in text.split() else 3))


async def searched(
    bench: Bench, rollouts: int = 300, seed: Candidate = SEED, budget: SearchBudget | None = None
) -> SearchResult:
    return await PromptSearch(
        bench, PooledEditEngine(), seed, TRAIN, VALIDATION, budget or SearchBudget(rollouts)
    ).run()


async def value(family: Family, number: int, rollouts: int) -> tuple[float, float, float]:
    """(of the seed, of what came of it, of the best there is) in a scripted world."""
    made = world(family, number)
    parts = split(made.tasks, number)
    seed = Candidate({NAME: made.seed})
    search = PromptSearch(
        Simulated(made, number), PooledEditEngine(), seed, parts.train, parts.validation, SearchBudget(rollouts), number
    )
    result = await search.run()
    after = made.seed if result.winner is None else result.winner.texts[NAME]
    return made.value(made.seed), made.value(after), made.ceiling


# --- what it finds ---


@pytest.mark.parametrize("family", ["headroom", "broken"])
async def test_where_there_is_much_to_gain_most_of_it_is_found(family: Family) -> None:
    found = [await value(family, number, 300) for number in range(4)]
    gained, possible = (fmean(one[at] - one[0] for one in found) for at in (1, 2))
    assert gained > possible / 3
    assert min(after - before for before, after, _ in found) > -0.02


async def test_where_there_is_nothing_to_gain_hardly_anything_is_lost() -> None:
    found = [await value("none", number, 200) for number in range(4)]
    assert fmean(after - before for before, after, _ in found) > -0.01


async def test_one_edit_that_helps_is_told_from_those_that_do_not() -> None:
    answer = named({"text": "Answer ill soon."}, {"text": "Answer well."}, {"text": "Pay attention to everything."})
    result = await searched(Bench(well, lambda prompt, number: answer))
    assert result.winner is not None
    assert "Answer well." in result.winner.texts["desk"].split("\n")
    assert "ill" not in result.winner.texts["desk"]


async def test_a_line_that_spoils_everything_is_deleted() -> None:
    seed = Candidate({"desk": "Answer well.\nAnswer ill\nBe kind."})
    answer = named({"kind": "delete", "line": 2}, {"kind": "delete", "line": 1})
    result = await searched(Bench(well, lambda prompt, number: answer if "3| Be kind." in prompt else ""), seed=seed)
    assert result.winner is not None
    assert result.winner.texts["desk"] == "Answer well.\nBe kind."


async def test_a_seed_that_is_lost_is_written_from_scratch() -> None:
    def lost(candidate: Candidate, order: TrialSpec) -> float:
        return float("START" in candidate.texts["desk"] and int(order.task[1:]) % 5 > 0)

    bench = Bench(lost, lambda prompt, number: '{"texts": {"desk": "START here"}}' if "from scratch" in prompt else "")
    result = await searched(bench)
    assert result.winner is not None
    assert result.winner.texts["desk"] == "START here"


# --- what it proposes ---


async def test_every_candidate_is_the_seed_with_edits_that_were_named() -> None:
    told = ["Answer well.", "Answer soon.", "Be kind to everybody here."]
    bench = Bench(well, lambda prompt, number: named(*({"text": one, "failure": f"not: {one}"} for one in told)))
    result = await searched(bench)
    assert len(result.pool.candidates) > 2
    rollouts = {trial.rollout for trial in result.pool.trials}
    for candidate in result.pool.candidates.values():
        old = SEED.texts["desk"].split("\n")
        added = [Edit("desk", "add", "", one) for one in candidate.texts["desk"].split("\n") if one not in old]
        assert {edit.text for edit in added} <= set(told)
        assert applied(SEED.texts, added) == candidate.texts
        if candidate is not result.pool.seed:
            assert candidate.parent == SEED.id
            assert set(candidate.claim.split("; ")) == {f"not: {edit.text}" for edit in added}
            assert candidate.causes
            assert set(candidate.causes) <= rollouts


async def test_it_asks_on_failures_only_and_each_time_on_others() -> None:
    bench = Bench(well, lambda prompt, number: "")
    await searched(bench)
    assert bench.asked
    for prompt, _ in bench.asked:
        assert "reward 1.00" not in prompt
        assert "reward 0.00" in prompt
    assert len({prompt for prompt, _ in bench.asked}) > len(bench.asked) // 2


async def test_where_nothing_fails_nothing_is_asked() -> None:
    bench = Bench(lambda candidate, order: 1.0)
    result = await searched(bench)
    assert bench.asked == []
    assert result.why.startswith("the engine knows no more")
    assert result.budget.used_rollouts < 60


async def test_answers_that_say_nothing_end_the_search_before_its_budget() -> None:
    result = await searched(Bench(well, lambda prompt, number: "I do not know."), 2_000)
    assert result.why.startswith("the engine knows no more; no candidate")


# --- what it is told ---


@pytest.mark.parametrize("text", ["This is broken.", "broken, well"])
async def test_an_edit_that_cannot_be_run_spoils_no_other(text: str) -> None:
    answer = named({"text": text}, {"text": "Answer well."})
    result = await searched(Bench(well, lambda prompt, number: answer))
    assert result.winner is not None
    assert "Answer well." in result.winner.texts["desk"]


@pytest.mark.parametrize(("reflections", "tokens"), [(3, None), (None, 70)])
async def test_answers_that_could_be_paid_are_used(reflections: int | None, tokens: int | None) -> None:
    bench = Bench(well, lambda prompt, number: named({"text": "Answer well."}))
    result = await searched(bench, budget=SearchBudget(300, reflections, tokens))
    assert result.winner is not None


async def test_the_poison_of_a_broken_world_is_found() -> None:
    made = world("broken", 0)
    parts = split(made.tasks, 0)
    pool = Pool(Candidate({NAME: made.seed}))
    engine, evidence = PooledEditEngine(), Evidence(Simulated(made, 0), pool, parts.train, SearchBudget(600), 0)
    found = pool.seed
    for _ in range(6):
        proposed = await engine.propose(pool, evidence)
        found = proposed[0] if proposed else found
    assert POISON not in found.texts[NAME].split("\n")


async def test_of_lines_for_the_same_failure_a_prompt_has_one() -> None:
    told = ["Answer well.", "Do it well, please.", "Well done is half won."]
    result = await searched(Bench(well, lambda prompt, number: named(*({"text": one} for one in told))))
    for candidate in result.pool.candidates.values():
        assert len([line for line in told if line in candidate.texts["desk"].split("\n")]) <= 1


async def test_what_names_the_key_of_a_task_is_not_tried() -> None:
    result = await searched(Bench(well, lambda prompt, number: named({"text": f"Serve {TRAIN[0].key} well."})))
    assert list(result.pool.candidates) == [SEED.id]


async def test_a_reflection_sees_better_rollouts_beside_worse_ones_of_the_same_task() -> None:
    def luck(candidate: Candidate, order: TrialSpec) -> float:
        return float(order.number % 2)

    bench = Bench(luck, lambda prompt, number: named({"text": f"Line {len(prompt)}.", "failure": f"f{len(prompt)}"}))
    await searched(bench)
    seen = [re.findall(r"^# Rollout \d+, task (\S+), reward (\S+)$", prompt, re.MULTILINE) for prompt, _ in bench.asked]
    pairs = [one for one in seen if any((task, "1.00") in one for task, reward in one if reward == "0.00")]
    assert pairs
    for one in pairs:
        assert [task for task, _ in one] == sorted(task for task, _ in one), "side by side"
