"""`beam` criticises, writes anew and keeps the best on one batch; what cannot be run or says nothing joins no beam."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes.laboratory import BROKEN, SEED, Bench, tasks

from penstock.trainer.apo.budget import Budget, Spent
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.engines.beam import BATCH, BRANCH, GRADIENT, ROUNDS, WIDTH, Beam
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.trials import Order, Pool

TRAIN = tasks(30)
BRANCHES = WIDTH * BRANCH


def made(bench: Bench, seed: Candidate = SEED, budget: Budget | None = None) -> tuple[Beam, Pool, Evidence]:
    pool = Pool(seed)
    return Beam(), pool, Evidence(bench, pool, TRAIN, budget or Budget(2_000), 0)


def grows(prompt: str, number: int) -> str:
    """A critique, or the text with another word behind it."""
    if "Answer with the new text" not in prompt:
        return f"It lacks a word, {random.Random(prompt).randrange(10**6)}."
    return (
        f"Here it is:\n```\n{prompt.split('```')[1].strip()} word{random.Random(f'{prompt}{number}').randrange(9)}\n```"
    )


def by_length(candidate: Candidate, order: Order) -> float:
    """Longer is better, and some tasks are harder."""
    return min(1.0, len(candidate.texts["desk"]) / 60) * (0.5 + int(order.task[1:]) % 3 / 4)


async def test_a_round_criticises_writes_and_keeps_the_best_of_one_batch() -> None:
    bench = Bench(by_length, grows)
    beam, pool, evidence = made(bench)
    found = await beam.propose(pool, evidence)
    assert len(bench.asked) == 2 * BRANCHES
    assert len(found) == WIDTH
    children = len(pool.candidates) - 1
    assert len(bench.runs) == BRANCHES * GRADIENT + (1 + children) * BATCH
    batches = Counter(trial.candidate for trial in pool.trials[BRANCHES * GRADIENT :])
    assert set(batches.values()) == {BATCH}
    assert len({trial.task for trial in pool.trials[BRANCHES * GRADIENT :]}) == BATCH, "all on the same tasks"
    best = max(pool.candidates.values(), key=lambda one: one.length)
    assert found[0].length == best.length
    assert beam.finalists(pool) == [found[0]]


async def test_it_climbs_round_by_round_and_ends() -> None:
    beam, pool, evidence = made(Bench(by_length, grows))
    lengths = [SEED.length]
    while found := await beam.propose(pool, evidence):
        lengths.append(found[0].length)
    assert len(lengths) == 1 + ROUNDS
    assert lengths == sorted(set(lengths))


async def test_a_child_says_whose_it_is_and_what_led_to_it() -> None:
    bench = Bench(by_length, grows)
    beam, pool, evidence = made(bench)
    for child in (await beam.propose(pool, evidence))[:-1]:
        assert child.parent == SEED.id
        assert child.claim.startswith("It lacks a word")
        assert len(child.causes) == GRADIENT
        assert set(child.causes) <= {trial.rollout for trial in pool.trials}


async def test_a_critique_sees_the_text_and_the_rollouts_of_its_branch() -> None:
    bench = Bench(by_length, grows)
    beam, pool, evidence = made(bench)
    await beam.propose(pool, evidence)
    critiques = [prompt for prompt, _ in bench.asked if "Answer with the new text" not in prompt]
    assert len(critiques) == BRANCHES
    for prompt in critiques:
        assert "Answer." in prompt
        assert prompt.count("# Rollout") == GRADIENT
    edits = [prompt for prompt, _ in bench.asked if "Answer with the new text" in prompt]
    assert all("Critique: It lacks a word" in prompt for prompt in edits)


@pytest.mark.parametrize("text", [BROKEN, "", "\n \n"])
async def test_what_cannot_be_run_or_says_nothing_joins_no_beam(text: str) -> None:
    beam, pool, evidence = made(Bench(by_length, lambda prompt, number: f"```\n{text}\n```"))
    for _ in range(ROUNDS):
        assert await beam.propose(pool, evidence) == [SEED]
    assert list(pool.candidates) == [SEED.id]


async def test_of_several_texts_one_is_written_in_turn() -> None:
    seed = Candidate({"back": "Answer.", "desk": "Answer."})
    beam, pool, evidence = made(Bench(lambda candidate, order: candidate.length / 90, grows), seed)
    changed: list[set[str]] = []
    for _ in range(2):
        before = set(pool.candidates)
        await beam.propose(pool, evidence)
        new = [one for name, one in pool.candidates.items() if name not in before]
        changed.append(
            {
                name
                for one in new
                for name in one.texts
                if one.texts[name] != pool.candidates[one.parent or ""].texts[name]
            }
        )
    assert sorted(map(sorted, changed)) == [["back"], ["desk"]]


async def test_without_rewards_the_beam_stays_as_it_was_put() -> None:
    beam, pool, evidence = made(Bench(lambda candidate, order: None, grows))
    found = await beam.propose(pool, evidence)
    assert found[0] == SEED


async def test_a_candidate_without_rewards_is_behind_those_that_have_some() -> None:
    bench = Bench(lambda candidate, order: 0.0 if candidate == SEED else None, grows)
    beam, pool, evidence = made(bench)
    assert (await beam.propose(pool, evidence))[0] == SEED


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (Budget(50), "rollouts"),
        (Budget(BRANCHES * GRADIENT), "rollouts"),
        (Budget(2_000, reflections=20), "reflections"),
        (Budget(2_000, reflections=0), "reflections"),
    ],
)
async def test_a_round_that_cannot_be_paid_ends_as_spent(budget: Budget, spent: str) -> None:
    bench = Bench(by_length, grows)
    beam, pool, evidence = made(bench, budget=budget)
    with pytest.raises(Spent, match=rf"budget\.{spent}"):
        await beam.propose(pool, evidence)
    await evidence.close()
    assert len(bench.runs) == budget.used_rollouts <= budget.rollouts
    assert len(bench.asked) == budget.used_reflections
    assert beam.finalists(pool) == [SEED]


async def test_what_is_left_of_the_rollouts_compares_all_alike() -> None:
    # All but the last tasks of the batch can be paid.
    paid = BRANCHES * GRADIENT + 5 * (BRANCHES + 1) + 3
    beam, pool, evidence = made(Bench(by_length, grows), budget=Budget(paid))
    await beam.propose(pool, evidence)
    counts = Counter(trial.candidate for trial in pool.trials[BRANCHES * GRADIENT :])
    assert max(counts.values()) - min(counts.values()) <= 1


async def test_fewer_tasks_than_a_batch_are_enough() -> None:
    pool = Pool(SEED)
    evidence = Evidence(Bench(by_length, grows), pool, tasks(3), Budget(2_000), 0)
    assert len(await Beam().propose(pool, evidence)) == WIDTH
