"""Comparing answers, asking judges, and what follows from many comparisons."""

from __future__ import annotations

import json
import random

import pytest
from fakes.releasing import turn
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Choice, Turn
from penstock.gateway.releases.canary.evidence import PassTest, ReorderBuffer
from penstock.gateway.traffic.trials.judges import (
    NextAction,
    canonical,
    exact,
    judge_prompts,
    next_action,
    parse_agreement,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [2, {"d": 1, "c": 2}]}', '{"b":[2,{"c":2,"d":1}],"a":1.0}'),
        ("", "{}"),
        ('{"a":"\\u00e9"}', '{"a":"é"}'),
        (" not json ", "not json"),
    ],
)
def test_arguments_that_mean_the_same_are_the_same(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [('{"a":1}', '{"a":"1"}'), ('{"a":true}', '{"a":1}'), ("[1,2]", "[2,1]"), ('{"a":1.5}', '{"a":1}')],
)
def test_arguments_that_differ_differ(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


@given(JSON)
def test_canonical_arguments_stay_what_they_are(value: object) -> None:
    written = canonical(json.dumps(value))
    assert canonical(written) == written
    if value is not None:
        assert json.loads(written) == value


def test_the_next_action_is_the_tools_that_are_called_or_what_is_said() -> None:
    call = ("book", '{"b":1,"a":2}')
    assert next_action(turn([call], text="Let me see.")) == NextAction((("book", '{"a":2,"b":1}'),))
    assert next_action(turn(text="Hello  there,\n\tAnn ")) == NextAction((), "Hello there, Ann")
    assert next_action(Turn(dialect="chat")) is None
    assert exact(turn([call, ("look", "{}")]), turn([("look", ""), call], text="Hm")) == 1
    assert exact(turn([call]), turn([call, call])) == 0
    assert exact(turn([call]), turn([("book", '{"b":2,"a":2}')])) == 0
    assert exact(turn(text="Yes"), turn([call])) == 0
    assert exact(turn(text="yes"), turn(text="Yes")) == 0


def test_of_several_choices_the_first_counts() -> None:
    one, other = turn(text="yes"), turn(text="no")
    first, second = one.choices[0], other.choices[0]
    both = Turn(
        dialect="chat", choices=[Choice(index=1, message=second.message), Choice(index=0, message=first.message)]
    )
    assert exact(both, one) == 1
    assert exact(both, other) == 0


def test_a_judge_sees_both_answers_in_both_orders_and_not_which_was_recorded() -> None:
    messages = [("user", f"question {number} {{braces}}") for number in range(9)]
    recorded, answered = turn([("book", '{"seat": "1A"}')], messages=messages), turn(text="Which seat?")
    one, other = judge_prompts(recorded, answered)
    a, b = '{"calls": [{"tool": "book", "arguments": "{\\"seat\\":\\"1A\\"}"}]}', '{"says": "Which seat?"}'
    assert one == other.replace(f"A:\n{b}\n\nB:\n{a}", f"A:\n{a}\n\nB:\n{b}")
    assert one != other
    assert one.index(a) < one.index(b)
    assert other.index(b) < other.index(a)
    assert "recorded" not in one
    assert "question 8 {braces}" in one
    assert "question 2" not in one
    swapped = judge_prompts(answered.model_copy(update={"messages": recorded.messages}), recorded)
    assert swapped == (other, one)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"agreement": 0.25}', 0.25),
        ('```json\n{"agreement":1}\n```', 1.0),
        ('First {"agreement": 0.9}, no: {"agreement": 0}', 0.0),
        ('{"agreement": 7}', None),
        ('{"agreement": -1}', None),
        ('{"agreement": 1e-2, "why": "they differ"}', 0.01),
        ('{"agreement": 1/4}', None),
        ('{"agreement": 1 of 4}', None),
        ("They agree.", None),
    ],
)
def test_a_judges_number_is_read(said: str, score: float | None) -> None:
    assert parse_agreement(turn(text=said)) == score


def test_a_judge_that_did_not_answer_gave_no_number() -> None:
    assert parse_agreement(None) is None
    assert parse_agreement(Turn(dialect="chat")) is None


@given(st.permutations(range(12)))
def test_results_are_taken_in_the_order_in_which_they_were_begun(arrivals: list[int]) -> None:
    order: ReorderBuffer[int] = ReorderBuffer()
    assert [result for number in arrivals for result in order.put(number, number)] == list(range(12))


def test_an_equal_candidate_passes_and_says_so() -> None:
    trial = PassTest(margin=0.1, alpha=0.05)
    while trial.verdict() is None:
        trial.add(1.0, 1.0)
    assert trial.verdict() == "pass"
    assert 40 < trial.calls < 80
    assert "100.0%" in trial.sentence("pass")


def test_one_that_always_differs_fails_soon() -> None:
    trial = PassTest(margin=0.1, alpha=0.05)
    while trial.verdict() is None:
        trial.add(0.0, 1.0)
    assert trial.verdict() == "fail"
    assert trial.calls < 15


def test_few_calls_decide_nothing() -> None:
    trial = PassTest(margin=0.1, alpha=0.05)
    for _ in range(5):
        trial.add(1.0, 1.0)
    assert trial.verdict() is None
    assert trial.verdict(used_up=True) == "undecided"
    assert "no harm is shown" in trial.sentence("undecided")


def test_an_incumbent_that_never_agrees_with_itself_lets_nothing_pass_as_proven() -> None:
    trial = PassTest(margin=0.1, alpha=0.05)
    for _ in range(500):
        trial.add(0.0, 0.0)
    assert trial.verdict() is None
    assert trial.verdict(used_up=True) == "undecided"
    assert "use another judge" in trial.sentence("undecided")


def _run(rng: random.Random, candidate: float, incumbent: float) -> str:
    trial = PassTest(margin=0.1, alpha=0.05)
    for _ in range(300):
        trial.add(float(rng.random() < candidate), float(rng.random() < incumbent))
        if (found := trial.verdict()) is not None:
            return found
    return trial.verdict(used_up=True) or ""


def test_noise_that_both_have_is_no_harm_and_a_loss_of_the_margin_seldom_passes() -> None:
    rng, runs = random.Random(4), 300
    equal = [_run(rng, 0.7, 0.7) for _ in range(runs)]
    worse = [_run(rng, 0.6, 0.7) for _ in range(runs)]
    broken = [_run(rng, 0.2, 0.7) for _ in range(runs)]
    assert equal.count("fail") <= 0.05 * runs + 10
    assert worse.count("pass") <= 0.05 * runs + 10
    assert broken.count("fail") == runs
