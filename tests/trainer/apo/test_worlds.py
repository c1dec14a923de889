"""Scripted worlds do what they say: the agent follows its prompt, values are exact, and a placebo rewards nothing."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.apo.laboratory import NAME, Simulated
from bench.apo.reflector import Reflector
from bench.apo.worlds import (
    CUSTOMERS,
    FAMILIES,
    HEADROOM,
    POISON,
    RULES,
    TASKS,
    VAGUE,
    Family,
    World,
    broken,
    right,
    special,
    world,
    wrong,
)
from penstock.trainer.apo.engines.beam import CRITIQUE, EDIT
from penstock.trainer.apo.protocol import Candidate, Trial, TrialSpec
from penstock.trainer.apo.reflection import ask_hypotheses, ask_scratch, fenced, read_hypotheses, read_texts

SEEDS = range(4)
EVERY = [(family, seed) for family in FAMILIES for seed in SEEDS]


def mean_of_draws(made: World, prompt: str, rounds: int = 30) -> float:
    draw = random.Random(1)
    return fmean(made.draw(prompt, task, draw)[0] for task in made.tasks for _ in range(rounds))


def without(prompt: str, *lines: str) -> str:
    return "\n".join(line for line in prompt.split("\n") if line not in lines)


def with_more(prompt: str, *lines: str) -> str:
    return "\n".join([prompt, *lines])


# --- worlds ---


@pytest.mark.parametrize(("family", "seed"), EVERY)
def test_a_world_follows_from_its_family_and_seed(family: Family, seed: int) -> None:
    one, again = world(family, seed), world(family, seed)
    assert one == again
    assert one != world(family, seed + 100)
    assert (len(one.rules), len(one.tasks), len({task.key for task in one.tasks})) == (RULES, TASKS, CUSTOMERS)
    assert all(one.calls[task.id] for task in one.tasks), "each task calls for something"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_is_the_mean_of_many_draws(family: Family) -> None:
    for seed in SEEDS[:2]:
        made = world(family, seed)
        made.noise = 0.0
        half = with_more(made.seed, *(right(rule.theme, 1) for rule in made.rules[:6]))
        for prompt in (made.seed, half, with_more(half, wrong(made.rules[0].theme), *VAGUE)):
            # Four standard errors of 7,200 draws within 0 and 1.
            assert mean_of_draws(made, prompt) == pytest.approx(made.value(prompt), abs=0.024)


def test_a_noisy_grader_is_wrong_as_often_as_it_says() -> None:
    made = world("noisy", 1)
    assert made.noise > 0
    noisy = mean_of_draws(made, made.seed)
    assert noisy == pytest.approx((1 - made.noise) * made.value(made.seed) + made.noise / 2, abs=0.024)


@pytest.mark.parametrize(("family", "seed"), EVERY)
def test_there_is_something_to_gain_where_it_is_said(family: Family, seed: int) -> None:
    made = world(family, seed)
    gain = made.ceiling - made.value(made.seed)
    assert gain >= 0.05 if family in HEADROOM else gain <= 0.02


@pytest.mark.parametrize(("family", "seed"), EVERY)
def test_the_agent_follows_each_instruction_in_any_wording_and_its_opposite(family: Family, seed: int) -> None:
    made = world(family, seed)
    bare = "You answer customers of a shop."
    for rule in made.rules:
        ways = [made.value(with_more(bare, right(rule.theme, way))) for way in range(3)]
        assert ways[0] == ways[1] == ways[2] >= made.value(bare)
        assert made.value(with_more(bare, wrong(rule.theme))) <= made.value(bare)
        both = with_more(bare, right(rule.theme, 0), wrong(rule.theme))
        assert made.value(both) <= ways[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_spoils_a_seed_is_worth_taking_away(seed: int) -> None:
    made = world("broken", seed)
    assert POISON in made.seed
    assert made.value(without(made.seed, POISON)) > made.value(made.seed) + 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_that_say_nothing_cost_a_little(family: Family) -> None:
    made = world(family, 0)
    values = [made.value(with_more(made.seed, *VAGUE[:count])) for count in range(4)]
    assert values == sorted(values, reverse=True)
    assert 0 < values[0] - values[3] < 0.1


def test_a_line_for_one_customer_helps_that_one_alone() -> None:
    made = world("leaking", 0)
    prompt = with_more(made.seed, special("c03"))
    draw = random.Random(0)
    theirs = [task for task in made.tasks if task.key == "c03"]
    assert fmean(made.draw(prompt, task, draw)[0] for task in theirs for _ in range(50)) > 0.8
    # On customers that nobody has seen it is a line that says nothing.
    assert made.value(prompt) < made.value(made.seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placebo_rewards_every_candidate_as_the_seed(family: Family) -> None:
    made, placebo = world(family, 2), world(family, 2, placebo=True)
    best = "\n".join(right(rule.theme, 0) for rule in made.rules)
    for prompt in (best, POISON, ""):
        draws = [
            [placebo.draw(one, task, random.Random(task.id)) for task in placebo.tasks] for one in (prompt, made.seed)
        ]
        assert draws[0] == draws[1]
        assert draws[0] == [made.draw(made.seed, task, random.Random(task.id)) for task in made.tasks]
    assert placebo.value(best) == made.value(best), "its value is still its own"


@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 3), prompt=st.text(max_size=80), draw=st.integers(0, 9))
def test_any_prompt_has_a_value_and_draws_within_0_and_1(family: Family, seed: int, prompt: str, draw: int) -> None:
    made = world(family, seed)
    assert 0 <= made.value(prompt) <= 1
    reward, reason = made.draw(prompt, made.tasks[draw], random.Random(draw))
    assert 0 <= reward <= 1
    assert reason


def test_reasons_name_rules_that_were_broken() -> None:
    made = world("headroom", 0)
    for task in made.tasks[:50]:
        reward, reason = made.draw(made.seed, task, random.Random(task.id))
        called = {broken(made.rules[one].theme) for one in made.calls[task.id]}
        assert reason == "nothing is missing" or set(reason.split("; ")) <= called
        assert reward == 1.0 or reason != "nothing is missing"


# --- the laboratory ---


async def test_a_rollout_is_the_same_in_every_life_and_another_each_time() -> None:
    made = world("headroom", 0)
    seed = Candidate({NAME: made.seed})
    orders = [TrialSpec(seed.id, task.id, number) for task in made.tasks[:40] for number in (0, 1)]
    lives = [await Simulated(made, draw).run([seed], orders) for draw in (5, 5, 6)]
    assert lives[0] == lives[1]
    assert [one.reward for one in lives[0]] != [one.reward for one in lives[2]]
    assert [one.reward for one in lives[0][::2]] != [one.reward for one in lives[0][1::2]]
    assert [(one.candidate, one.task, one.number) for one in lives[0]] == orders


# --- the reflector ---


def asked(made: World, prompt: str, count: int = 6) -> tuple[dict[str, str], list[Trial]]:
    draw = random.Random(3)
    trials: list[Trial] = []
    for task in made.tasks[:count]:
        reward, reason = made.draw(prompt, task, draw)
        trials.append(Trial("c", task.id, 0, reward, reason, f"customer {task.key} asks {task.input}"))
    return {NAME: prompt}, trials


@pytest.mark.parametrize(("family", "seed"), EVERY)
def test_hypotheses_name_rules_that_the_rollouts_broke(family: Family, seed: int) -> None:
    made = world(family, seed)
    texts, trials = asked(made, made.seed)
    failures = {part for trial in trials for part in trial.reason.split("; ")}
    found = 0
    for draw in range(20):
        answer = Reflector(made).answer(ask_hypotheses(texts, trials, 3), random.Random(draw))
        for one in read_hypotheses(answer, texts):
            found += 1
            assert one.failure in failures | {"answers are cut short"}
            known = {
                text
                for rule in made.rules
                for text in (*(right(rule.theme, way) for way in range(3)), wrong(rule.theme))
            }
            assert one.edit.kind == "delete" or one.edit.text in known | {*VAGUE} or "For customer" in one.edit.text
            if one.edit.kind == "delete":
                assert one.edit.line == POISON
    assert found >= 20 or failures == {"nothing is missing"}


def test_right_wrong_and_vague_hypotheses_are_as_frequent_as_the_rules_say() -> None:
    made = world("headroom", 0)
    rule = made.rules[-1]
    texts = {NAME: made.seed}
    trials = [Trial("c", "t0", 0, 0.0, broken(rule.theme))]
    said = [
        read_hypotheses(Reflector(made).answer(ask_hypotheses(texts, trials, 3), random.Random(draw)), texts)
        for draw in range(600)
    ]
    texts_said = [one.edit.text for (one,) in said]
    sure = sum(text in {right(rule.theme, way) for way in range(3)} for text in texts_said) / 600
    mistaken = sum(text == wrong(rule.theme) for text in texts_said) / 600
    assert sure == pytest.approx(rule.understood, abs=0.08)
    assert mistaken == pytest.approx((1 - rule.understood) * 0.4, abs=0.08)


def test_one_reflector_answers_the_questions_of_all_engines() -> None:
    made = world("broken", 0)
    texts, trials = asked(made, made.seed)
    scratch = read_texts(Reflector(made).answer(ask_scratch(texts, [], trials), random.Random(0)), texts)
    assert scratch is not None
    assert POISON not in scratch[NAME]
    critique = Reflector(made).answer(
        CRITIQUE % (made.seed, "\n".join(trial.reason for trial in trials)), random.Random(0)
    )
    assert set(critique.split("; ")) <= {broken(rule.theme) for rule in made.rules}
    written = fenced(Reflector(made).answer(EDIT % (made.seed, critique), random.Random(0)))
    assert len(set(written.split("\n")) - set(made.seed.split("\n"))) >= 1
    assert len(set(made.seed.split("\n")) - set(written.split("\n"))) <= 3


def test_a_reflector_that_sees_no_failure_names_none() -> None:
    made = world("none", 0)
    texts = {NAME: made.seed}
    trials = [Trial("c", "t0", 0, 1.0, "nothing is missing")]
    answer = Reflector(made).answer(ask_hypotheses(texts, trials, 3), random.Random(0))
    assert json.loads(answer) == {"hypotheses": []}
    assert Reflector(made).answer(CRITIQUE % (made.seed, ""), random.Random(0)) == "nothing"
