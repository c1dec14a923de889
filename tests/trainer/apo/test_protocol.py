"""Evidence gives an engine what it may have and no more, and names are the same however many ask at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.laboratory import SEED, Bench, tasks
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.protocol import BudgetExhausted, Candidate, Evidence, Pool, SearchBudget, TrialSpec

OTHER = Candidate({"desk": "Answer kindly."}, SEED.id)
BROKEN = Candidate({"desk": "broken"}, SEED.id)
TRAIN = tasks(6)


def made(bench: Bench, **budget: Any) -> tuple[Evidence, Pool]:
    pool = Pool(SEED)
    return Evidence(bench, pool, TRAIN, SearchBudget(**{"rollouts": 20} | budget), 0), pool


# --- rollouts ---


async def test_trials_come_in_the_order_of_the_pairs_and_join_the_pool() -> None:
    bench = Bench()
    evidence, pool = made(bench)
    trials = await evidence.run([(OTHER, "t1"), (SEED, "t0"), (OTHER, "t1")])
    assert [(one.candidate, one.task, one.number) for one in trials] == [
        (OTHER.id, "t1", 0),
        (SEED.id, "t0", 0),
        (OTHER.id, "t1", 1),
    ]
    assert pool.trials == trials
    assert list(pool.candidates) == [SEED.id, OTHER.id]
    assert {mode for _, mode in bench.runs} == {"train"}
    assert evidence.budget.used_rollouts == 3


async def test_more_pairs_than_the_budget_has_left_are_cut_and_then_it_is_spent() -> None:
    bench = Bench()
    evidence, _ = made(bench, rollouts=5)
    assert len(await evidence.run([(SEED, task.id) for task in TRAIN])) == 5
    with pytest.raises(BudgetExhausted, match=r"all 5 rollouts \(budget\.rollouts\)"):
        await evidence.run([(SEED, "t0")])
    assert len(bench.runs) == 5
    assert await evidence.run([]) == []


async def test_candidates_that_cannot_be_run_are_left_out_and_cost_nothing() -> None:
    bench = Bench()
    evidence, pool = made(bench)
    trials = await evidence.run([(BROKEN, "t0"), (OTHER, "t0"), (BROKEN, "t1")])
    assert [one.candidate for one in trials] == [OTHER.id]
    assert evidence.budget.used_rollouts == 1
    assert BROKEN.id not in pool.candidates


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ({"desk": "broken"}, "it is broken"),
        ({"desk": "a", "door": "b"}, "it has texts for desk, door, and needs desk"),
        ({"door": "b"}, "it has texts for door, and needs desk"),
        ({"desk": "half a \ud83d"}, "desk: it has half a character, which cannot be sent"),
        ({"desk": "fine \U0001f600"}, ""),
    ],
)
def test_why_a_candidate_cannot_be_run_is_said(texts: dict[str, str], problem: str) -> None:
    assert made(Bench())[0].problem(Candidate(texts)) == problem


@pytest.mark.parametrize("task", ["t6", "t7", "", "question 1"])
async def test_tasks_of_other_splits_cannot_be_run(task: str) -> None:
    bench = Bench()
    evidence, _ = made(bench)
    with pytest.raises(ConfigError, match=rf"engine: it wants to run task '{task}', which is not in evidence\.tasks"):
        await evidence.run([(SEED, "t0"), (SEED, task)])
    assert bench.ordered == []
    assert evidence.budget.used_rollouts == 0


@given(
    late=st.integers(0, 1000),
    waves=st.lists(
        st.lists(st.tuples(st.sampled_from([SEED, OTHER]), st.sampled_from(["t0", "t1"])), max_size=3), max_size=6
    ),
)
def test_names_of_rollouts_do_not_change_with_how_long_each_takes(
    late: int, waves: list[list[tuple[Candidate, str]]]
) -> None:
    async def whole(bench: Bench) -> list[list[TrialSpec]]:
        evidence, pool = made(bench, rollouts=100)
        found = await asyncio.gather(*map(evidence.run, waves))
        assert sorted(one.rollout for one in pool.trials) == sorted(one.rollout for part in found for one in part)
        return [[TrialSpec(one.candidate, one.task, one.number) for one in part] for part in found]

    assert asyncio.run(whole(Bench(late=late))) == asyncio.run(whole(Bench()))


# --- reflections ---


async def test_the_same_question_asked_again_has_another_number_and_so_another_answer() -> None:
    bench = Bench(answer=lambda prompt, number: f"{prompt} {number}")
    evidence, _ = made(bench)
    assert [await evidence.reflect(prompt) for prompt in ("a", "b", "a")] == ["a 0", "b 0", "a 1"]


@given(late=st.integers(0, 1000), prompts=st.lists(st.sampled_from("abc"), max_size=8))
def test_answers_do_not_change_with_how_long_each_takes(late: int, prompts: list[str]) -> None:
    async def whole(bench: Bench) -> list[str]:
        evidence, _ = made(bench)
        return await asyncio.gather(*map(evidence.reflect, prompts))

    first, again = (Bench(answer=lambda prompt, number: f"{prompt} {number}", late=one) for one in (late, None))
    assert asyncio.run(whole(first)) == asyncio.run(whole(again))


async def test_what_an_answer_did_not_use_is_given_back() -> None:
    evidence, _ = made(Bench(tokens=10), tokens=45, money=0.45)
    for used in (10, 20, 30):
        await evidence.reflect("a")
        assert (evidence.budget.used_tokens, evidence.budget.used_money) == (used, pytest.approx(used / 100))
    with pytest.raises(BudgetExhausted, match=r"budget\.tokens: 30 of 45 are used, and a reflection may need 20"):
        await evidence.reflect("a")
    assert evidence.budget.used_reflections == 3


async def test_reflections_at_the_same_time_do_not_exceed_the_budget_together() -> None:
    bench = Bench(tokens=10, late=1)
    evidence, _ = made(bench, tokens=50)
    found = await asyncio.gather(*(evidence.reflect("a") for _ in range(6)), return_exceptions=True)
    # Later ones wait for what the first give back; for a fifth that does not suffice.
    assert [isinstance(one, BudgetExhausted) for one in found] == [False, False, False, False, True, True]
    assert len(bench.asked) == evidence.budget.used_reflections == 4
    assert evidence.budget.used_tokens == 40


async def test_halves_of_characters_are_neither_asked_nor_answered() -> None:
    bench = Bench(answer=lambda prompt, number: f"{prompt} \ude00!")
    evidence, _ = made(bench)
    assert await evidence.reflect("a \ud83d") == "a  !"
    assert bench.asked == [("a ", 0)]


# --- its end ---


async def test_an_end_waits_for_what_is_under_way_and_lets_nothing_begin() -> None:
    bench = Bench(late=3)
    evidence, pool = made(bench, reflections=1)

    async def child(at: int) -> None:
        await evidence.run([(SEED, f"t{at}")])
        await evidence.reflect("a")
        await evidence.run([(OTHER, f"t{at}")])

    with pytest.raises(BudgetExhausted, match=r"budget\.reflections"):
        await asyncio.gather(*map(child, range(4)))
    await evidence.close()
    assert len(pool.trials) == len(bench.runs) == evidence.budget.used_rollouts
    assert {one.task for one in pool.of(SEED.id)} == {"t0", "t1", "t2", "t3"}
    for late in (evidence.run([(SEED, "t0")]), evidence.reflect("a")):
        with pytest.raises(BudgetExhausted, match="the search has ended"):
            await late
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(pool.trials) == len(bench.ordered) == evidence.budget.used_rollouts


async def test_an_end_raises_what_went_wrong_unseen() -> None:
    def breaks(candidate: Candidate, order: TrialSpec) -> float:
        raise ConfigError("rollouts: there is no runner")

    evidence, _ = made(Bench(breaks, late=1))
    unseen = asyncio.ensure_future(evidence.run([(SEED, "t0")]))
    await asyncio.sleep(0)
    unseen.cancel()
    with pytest.raises(ConfigError, match="there is no runner"):
        await evidence.close()


def test_draws_of_an_engine_are_the_same_in_every_life_and_other_with_another_seed() -> None:
    draws = [
        [Evidence(Bench(), Pool(SEED), TRAIN, SearchBudget(1), seed).random.random() for _ in range(2)]
        for seed in (4, 5)
    ]
    assert draws[0][0] == draws[0][1]
    assert draws[0] != draws[1]
