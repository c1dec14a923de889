"""A search keeps its budget and its splits, comes to the same end after every kill, and says what came of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.laboratory import SEED, Bench, Killed, tasks
from fakes.mistakes import tells
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.model.base import Mode
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, PromptEngine, SearchBudget, Trial, TrialSpec
from penstock.trainer.apo.search import ALPHA, FINALISTS, SCREEN, SHRINK, PromptSearch, SearchResult, best

TRAIN, VALIDATION = tasks(20), tasks(96, first=20)
GOOD = Candidate({"desk": "Answer well."}, SEED.id, "it answers badly")
FAIR = Candidate({"desk": "Answer fairly well."}, SEED.id)
BAD = Candidate({"desk": "Answer badly."}, SEED.id)
BROKEN = Candidate({"desk": "broken"}, SEED.id)
Step = Callable[[Pool, Evidence], Sequence[Candidate]]


class Steps:
    """An engine of so many steps; then it knows no more."""

    def __init__(self, *steps: Step) -> None:
        self.left = list(steps)

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """See `PromptEngine`."""
        return self.left.pop(0)(pool, evidence) if self.left else []


def says(*candidates: Candidate) -> Step:
    """A step that only writes texts."""
    return lambda pool, evidence: candidates


class Branching:
    """An engine of branches that run at the same time, each of which asks and tries what it is told."""

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """See `PromptEngine`."""
        return await asyncio.gather(*(self._branch(at, evidence) for at in range(6)))

    async def _branch(self, at: int, evidence: Evidence) -> Candidate:
        trials = await evidence.run([(SEED, task.id) for task in evidence.tasks[at : at + 3]])
        said = await evidence.reflect(f"What is wrong with {at}? {[trial.reward for trial in trials]}")
        made = Candidate({"desk": f"Answer well, {said}."}, SEED.id)
        await evidence.run([(made, task.id) for task in evidence.tasks[:3]])
        return made


def by_quality(candidate: Candidate, order: TrialSpec) -> float:
    """A good candidate fails on no task, a fair one on a quarter, the seed on half, and a bad one on nearly all."""
    wrong = {GOOD.id: 0, FAIR.id: 1, SEED.id: 2}.get(candidate.id, 3)
    return float((int(order.task[1:]) + order.number) % 4 >= wrong)


async def searched(
    engine: PromptEngine, bench: Bench, rollouts: int = 300, draw: int = 0, **budget: Any
) -> SearchResult:
    search = PromptSearch(bench, engine, SEED, TRAIN, VALIDATION, SearchBudget(rollouts, **budget), draw)
    result = await search.run()
    within(result, bench)
    return result


def within(result: SearchResult, bench: Bench) -> None:
    """The budget was kept exactly, and each split was used for what it is there."""
    assert result.budget.used_rollouts == len(bench.ordered) <= result.budget.rollouts
    assert len(set(bench.ordered)) == len(bench.ordered)
    homes: dict[Mode, set[str]] = {"train": {task.id for task in TRAIN}, "val": {task.id for task in VALIDATION}}
    for order, mode in bench.ordered:
        assert order.task in homes[mode]
    assert len(result.pool.trials) == sum(mode == "train" for _, mode in bench.ordered)
    assert len(result.validation) == sum(mode == "val" for _, mode in bench.ordered)


# --- what comes of it ---


async def test_a_better_candidate_wins() -> None:
    result = await searched(Steps(says(BAD, GOOD)), Bench(by_quality))
    assert result.winner == GOOD
    assert result.why.startswith(f"the engine knows no more; {GOOD.id} is better by 0.")


async def test_of_two_better_ones_the_better_wins() -> None:
    result = await searched(Steps(says(FAIR), says(GOOD)), Bench(by_quality), rollouts=900)
    assert [racer.state for racer in result.racers] == ["better", "better"]
    assert result.winner == GOOD


@pytest.mark.parametrize("rollouts", [40, 41, 77, 300])
async def test_without_anything_better_the_seed_stays(rollouts: int) -> None:
    result = await searched(Steps(says(BAD)), Bench(by_quality), rollouts)
    assert result.winner is None
    assert result.why == "the engine knows no more; no candidate looks better than the seed"


async def test_an_engine_that_knows_nothing_costs_nothing() -> None:
    bench = Bench(by_quality)
    result = await searched(Steps(), bench)
    assert (result.winner, bench.ordered, result.racers) == (None, [], [])


async def test_a_finalist_that_is_only_lucky_does_not_win() -> None:
    # It is good on all tasks of the train split, and as good as the seed on others.
    lucky = {task.id for task in TRAIN}
    bench = Bench(
        lambda candidate, order: 1.0 if candidate == GOOD and order.task in lucky else by_quality(SEED, order)
    )
    result = await searched(Steps(says(GOOD)), bench, rollouts=600)
    assert result.winner is None
    assert f"no finalist is shown to be better: {GOOD.id} +0.000" in result.why


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 0.7, 1.0])
async def test_where_all_rewards_are_equal_the_seed_stays(reward: float) -> None:
    bench = Bench(lambda candidate, order: reward)
    result = await searched(Steps(says(GOOD, FAIR), says(BAD)), bench)
    assert (result.winner, result.racers) == (None, [])


async def test_where_nobody_gives_rewards_the_seed_stays() -> None:
    bench = Bench(lambda candidate, order: None)
    result = await searched(Steps(says(GOOD), says(FAIR)), bench)
    assert result.winner is None
    assert result.validation == []
    assert tells(result.why, "the engine knows no more", "no rollout of the seed", "reward")


async def test_pairs_of_which_one_has_no_reward_are_left_out() -> None:
    validation = {task.id for task in VALIDATION}
    bench = Bench(
        lambda candidate, order: (
            None if candidate == GOOD and order.task in validation else by_quality(candidate, order)
        )
    )
    result = await searched(Steps(says(GOOD)), bench)
    assert result.winner is None
    assert [racer.differences for racer in result.racers] == [[]]


# --- what an engine may do ---


async def test_new_candidates_are_run_beside_their_parents() -> None:
    child = Candidate({"desk": "Answer very well."}, GOOD.id)
    bench = Bench(by_quality)
    result = await searched(Steps(says(GOOD), says(child)), bench)
    seen: dict[str, Counter[str]] = {}
    for trial in result.pool.trials:
        seen.setdefault(trial.candidate, Counter())[trial.task] += 1
    assert sum(seen[SEED.id].values()) == SCREEN
    assert seen[SEED.id].keys() <= seen[GOOD.id].keys()
    assert sum(seen[GOOD.id].values()) == 2 * SCREEN
    assert seen[child.id].keys() <= seen[GOOD.id].keys()


async def test_a_candidate_that_cannot_be_run_is_never_run() -> None:
    bench = Bench(by_quality)
    result = await searched(Steps(says(BROKEN), says(BROKEN, GOOD)), bench)
    assert result.winner == GOOD
    assert BROKEN.id not in result.pool.candidates


async def test_a_candidate_that_is_known_is_not_screened_again() -> None:
    bench = Bench(by_quality)
    result = await searched(Steps(says(GOOD), says(GOOD), says(SEED), says(GOOD)), bench)
    assert Counter(trial.candidate for trial in result.pool.trials) == {GOOD.id: SCREEN, SEED.id: SCREEN}


async def test_an_engine_that_is_stopped_by_a_budget_races_what_it_has() -> None:
    class Asking(Steps):
        async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
            found = await super().propose(pool, evidence)
            return found or [Candidate({"desk": await evidence.reflect("what else?")})]

    bench = Bench(by_quality, answer=lambda prompt, number: f"Answer in {number} words.")
    result = await searched(Asking(says(GOOD)), bench, reflections=2)
    assert result.winner == GOOD
    assert tells(result.why, "budget.reflections: 2 of 2", "may need 1")
    assert len(bench.asked) == 2


async def test_an_engine_that_proposes_for_ever_leaves_rollouts_for_the_race() -> None:
    class Endless:
        async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
            return [GOOD if len(pool.candidates) == 1 else Candidate({"desk": f"Answer {len(pool.candidates)}."})]

    result = await searched(Endless(), Bench(by_quality), rollouts=200)
    assert result.winner == GOOD
    assert result.why.startswith("all ")
    assert len(result.pool.trials) >= 100


@pytest.mark.parametrize("rollouts", [40, 60, 200])
async def test_an_engine_that_takes_all_it_gets_leaves_rollouts_for_the_race(rollouts: int) -> None:
    class Greedy:
        async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
            while True:
                await evidence.run([(one, task.id) for task in evidence.tasks for one in (GOOD, SEED)])

    result = await searched(Greedy(), Bench(by_quality), rollouts)
    assert len(result.validation) > 0
    assert result.pool.mean(GOOD.id) == 1.0


async def test_an_engine_names_its_finalists() -> None:
    class Sure(Steps):
        def finalists(self, pool: Pool) -> Sequence[Candidate]:
            return [SEED, BROKEN, BAD, GOOD, FAIR]

    result = await searched(Sure(), Bench(by_quality))
    assert [racer.candidate for racer in result.racers] == [BAD.id, GOOD.id], f"{FINALISTS} of those that can be run"
    assert result.winner == GOOD
    assert result.racers[0].state == "out"


async def test_an_engine_that_repeats_itself_in_one_answer_is_screened_once() -> None:
    result = await searched(Steps(says(GOOD, Candidate(GOOD.texts, BAD.id), GOOD)), Bench(by_quality))
    assert Counter(trial.candidate for trial in result.pool.trials) == {GOOD.id: SCREEN, SEED.id: SCREEN}


async def test_an_engine_that_names_a_finalist_twice_races_it_once() -> None:
    class Twice(Steps):
        def finalists(self, pool: Pool) -> Sequence[Candidate]:
            return [GOOD, GOOD, Candidate({"door": "of no use"})]

    result = await searched(Twice(), Bench(by_quality))
    assert [(racer.candidate, racer.finalists) for racer in result.racers] == [(GOOD.id, 1)]


@pytest.mark.parametrize("proposed", [SEED, BROKEN, GOOD])
async def test_an_engine_that_goes_on_with_nothing_new_comes_to_an_end(proposed: Candidate) -> None:
    asked = 0

    class Stuck:
        async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
            nonlocal asked
            asked += 1
            assert asked < 200, "it is asked for ever"
            return [proposed]

    result = await searched(Stuck(), Bench(by_quality))
    assert result.why.startswith("the engine proposes nothing new")


@pytest.mark.parametrize("late", [None, 1, 2, 3])
@pytest.mark.parametrize("reflections", [None, 2])
async def test_what_an_engine_has_begun_and_left_takes_nothing_from_the_race(
    late: int | None, reflections: int | None
) -> None:
    def reward(one: Candidate, order: TrialSpec) -> float:
        return 1.0 if "well" in one.texts["desk"] else by_quality(one, order)

    bench = Bench(reward, late=late)
    result = await searched(Branching(), bench, 150, reflections=reflections)
    at_once = await searched(Branching(), Bench(reward), 150, reflections=reflections)
    assert result.winner is not None
    assert (result.winner, result.why) == (at_once.winner, at_once.why), "how long each took decides nothing"
    for _ in range(100):
        await asyncio.sleep(0)
    within(result, bench)


async def test_the_budget_that_is_said_to_be_used_up_is_the_one_that_was_given() -> None:
    result = await searched(Branching(), Bench(by_quality), 100)
    assert tells(result.why, "all 100 rollouts (budget.rollouts)", "30 of the race")


async def test_an_error_of_an_engine_ends_the_run() -> None:
    def fails(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await searched(Steps(says(GOOD), fails), Bench(by_quality))


async def test_who_watches_is_told_after_each_step_and_each_block() -> None:
    search = PromptSearch(Bench(by_quality), Steps(says(GOOD), says(BAD)), SEED, TRAIN, VALIDATION, SearchBudget(300))
    told: list[tuple[int, int]] = []

    async def watch() -> None:
        told.append((len(search.result.pool.trials), len(search.result.validation)))

    search.watch = watch
    await search.run()
    assert told[:2] == [(2 * SCREEN, 0), (4 * SCREEN, 0)]
    assert [one[1] for one in told] == sorted(one[1] for one in told)
    assert told[-1] == (len(search.result.pool.trials), len(search.result.validation))


@pytest.mark.parametrize("rollouts", [200, 600])
async def test_what_is_no_better_wins_seldom_where_tasks_decide_rewards(rollouts: int) -> None:
    # The rewards of a task are the same each time, so running it again says nothing new of other tasks.
    wrong = 0
    for draw in range(150):
        source = random.Random(draw)
        rewards = {(one, task.id): source.choice((0.0, 1.0)) for one in (SEED.id, GOOD.id) for task in VALIDATION}
        bench = Bench(lambda one, order, known=rewards: known.get((one.id, order.task), float(one == GOOD)))
        result = await searched(Steps(says(GOOD)), bench, rollouts, draw)
        assert result.racers
        wrong += result.winner is not None
    assert wrong / 150 <= ALPHA + 3 * (ALPHA * (1 - ALPHA) / 150) ** 0.5


# --- the same again ---


def outcome(result: SearchResult) -> tuple[Any, ...]:
    """What was decided."""
    raced = [(racer.candidate, racer.differences) for racer in result.racers]
    return list(result.pool.candidates), result.winner, result.why, raced, result.budget, result.pool.trials


def answered(prompt: str, number: int) -> str:
    """Whatever is asked: hypotheses of a reflection that has read the question, or a text in fences."""
    if '"hypotheses"' not in prompt:
        return f"```\nAnswer, {len(prompt) % 7}, {number}.\n```"
    said = [f"Mind rule {(len(prompt) + number) % 5}.", "Answer well."]
    edits = [f'{{"failure": "f", "resource": "desk", "kind": "add", "line": 0, "text": "{text}"}}' for text in said]
    return f'{{"hypotheses": [{", ".join(edits)}]}}'


def graded(candidate: Candidate, order: TrialSpec) -> float | None:
    """Rewards that follow from the text, some of them missing."""
    if order.number % 11 == 10:
        return None
    helped = "well" in candidate.texts["desk"]
    return float(hash_of(candidate, order) % 10 < (8 if helped else 3))


def hash_of(candidate: Candidate, order: TrialSpec) -> int:
    return int(candidate.id, 16) // 16 + 7 * int(order.task[1:]) + 3 * order.number


@pytest.mark.parametrize("engine", ["ours", "beam"])
async def test_a_run_that_is_killed_anywhere_comes_to_the_same_end_and_runs_nothing_twice(engine: str) -> None:
    whole = Bench(graded, answered)
    wanted = outcome(await searched(make_engine(engine), whole, rollouts=130, draw=3))
    everything = len(whole.runs) + len(whole.asked)
    for cut in range(1, everything, 7):
        bench = Bench(graded, answered, cut=cut)
        with pytest.raises(Killed):
            await searched(make_engine(engine), bench, rollouts=130, draw=3)
        assert len(bench.runs) + len(bench.asked) == cut
        bench.cut = None
        bench.ordered.clear()
        again = outcome(await searched(make_engine(engine), bench, rollouts=130, draw=3))
        assert again == wanted
        assert sorted(bench.runs) == sorted(whole.runs)
        assert sorted(bench.asked) == sorted(whole.asked)


@pytest.mark.parametrize("reflections", [None, 3, 8])
@pytest.mark.parametrize("rollouts", [60, 130])
@pytest.mark.parametrize("engine", ["ours", "beam"])
async def test_how_long_each_takes_changes_nothing(engine: str, rollouts: int, reflections: int | None) -> None:
    found: list[Any] = []
    for late in (None, 1, 2, 3):
        bench = Bench(graded, answered, late=late)
        result = await searched(make_engine(engine), bench, rollouts, reflections=reflections)
        _, winner, why, raced, budget, trials = outcome(result)
        found.append((winner, why, raced, budget, {trial.rollout for trial in trials}, set(bench.asked)))
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("engine", ["ours", "beam"])
async def test_a_seed_decides_everything(engine: str) -> None:
    one, same, other = [
        outcome(await searched(make_engine(engine), Bench(graded, answered), draw=draw)) for draw in (1, 1, 2)
    ]
    assert one == same
    assert one != other


@pytest.mark.parametrize("engine", ["ours", "beam"])
@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
@pytest.mark.parametrize("answer", ["", "{}", "```\n```", "\ud800", "broken", '{"hypotheses": [[]]}'])
async def test_engines_come_to_an_end_where_there_is_nothing_to_learn(
    engine: str, reward: float | None, answer: str
) -> None:
    bench = Bench(lambda candidate, order: reward, lambda prompt, number: answer)
    result = await searched(make_engine(engine), bench, 160, reflections=40)
    assert result.winner is None


# --- the best of a pool ---


rewards = st.lists(st.floats(0, 1), max_size=12)


@given(seed=rewards, good=rewards, bad=rewards)
@settings(max_examples=60)
def test_the_best_are_above_the_seed_once_they_are_mixed_with_it(
    seed: list[float], good: list[float], bad: list[float]
) -> None:
    pool = pool_of_lists(seed, good, bad)
    found = [one.id for one in best(pool)]
    if not seed:
        assert found == []
        return
    mean = sum(seed) / len(seed)
    scores = {
        one.id: (sum(got) + SHRINK * mean) / (len(got) + SHRINK) for one, got in ((GOOD, good), (BAD, bad)) if got
    }
    wanted = sorted((one for one in scores if scores[one] > mean + 1e-6), key=lambda one: -scores[one])
    assert [one for one in found if one in wanted and scores[one] > mean + 1e-6] == wanted
    assert all(scores.get(one, 0.0) > mean - 1e-9 for one in found)


def pool_of_lists(seed: list[float], good: list[float], bad: list[float]) -> Pool:
    pool = Pool(SEED)
    for candidate, found in ((SEED, seed), (GOOD, good), (BAD, bad)):
        pool.add(candidate)
        pool.keep(Trial(candidate.id, f"t{at}", 0, reward) for at, reward in enumerate(found))
    return pool


def test_few_lucky_rollouts_win_less_than_many_good_ones() -> None:
    pool = pool_of_lists([0.5] * 20, [1.0] * 2, [0.9] * 20)
    assert best(pool) == [BAD, GOOD]


def test_of_two_that_score_the_same_the_shorter_is_first() -> None:
    long = Candidate({"desk": "Answer well" + "!" * 100})
    pool = pool_of_lists([0.5] * 20, [1.0] * 4, [])
    pool.add(long)
    pool.keep(Trial(long.id, f"t{at}", 0, 1.0) for at in range(4))
    assert best(pool) == [GOOD, long]
