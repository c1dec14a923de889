"""Budgets are kept exactly: no order of taking and giving back exceeds one, and `BudgetExhausted` says which is used
up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.protocol import BudgetExhausted, SearchBudget

limits = st.none() | st.integers(0, 60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("rollouts"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("reflection"), st.integers(0, 20), st.integers(0, 20)),
        st.tuples(st.just("answer"), st.integers(0, 20), st.integers(0, 20)),
    ),
    max_size=40,
)


@given(rollouts=st.integers(0, 60), reflections=limits, tokens=limits, money=limits, steps=steps)
def test_no_order_of_taking_and_giving_back_exceeds_a_budget(
    rollouts: int, reflections: int | None, tokens: int | None, money: int | None, steps: list[tuple[str, int, int]]
) -> None:
    budget = SearchBudget(rollouts, reflections, tokens, money)
    asked: list[tuple[int, int]] = []
    refused: list[bool] = []
    taken = 0
    for what, first, second in steps:
        try:
            if what == "rollouts":
                given = budget.take_rollouts(first)
                assert given == min(first, rollouts - taken)
                taken += given
            elif what == "reflection":
                budget.take_reflection(first, second)
                asked.append((first, second))
            elif asked:
                most_tokens, most_money = asked.pop()
                budget.give_back(most_tokens - min(first, most_tokens), most_money - min(second, most_money))
        except BudgetExhausted as spent:
            names = ("rollouts",) if what == "rollouts" else ("reflections", "tokens", "money")
            refused.append(any(f"budget.{name}" in str(spent) for name in names))
        used = (budget.used_rollouts, budget.used_reflections, budget.used_tokens, budget.used_money)
        for one, most in zip(used, (rollouts, reflections, tokens, money), strict=True):
            assert one >= 0
            assert most is None or one <= most
    assert budget.used_rollouts == taken == rollouts - budget.left
    assert all(refused), "it says which budget is used up"


def test_as_many_rollouts_are_given_as_are_left() -> None:
    budget = SearchBudget(10)
    assert [budget.take_rollouts(wanted) for wanted in (4, 0, 4, 4)] == [4, 0, 4, 2]
    assert budget.take_rollouts(0) == 0, "nothing is wanted, so nothing is lacking"
    with pytest.raises(BudgetExhausted, match=r"^all 10 rollouts \(budget\.rollouts\) are used$"):
        budget.take_rollouts(1)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (SearchBudget(1, reflections=2), "budget.reflections: 2 of 2 are used, and a reflection may need 1"),
        (SearchBudget(1, tokens=2_500), "budget.tokens: 2,000 of 2,500 are used, and a reflection may need 1,000"),
        (SearchBudget(1, money=0.7), "budget.money: 0.6 of 0.7 are used, and a reflection may need 0.3"),
    ],
)
def test_the_budget_that_is_used_up_is_named_and_what_is_refused_takes_nothing(
    budget: SearchBudget, message: str
) -> None:
    for _ in range(2):
        budget.take_reflection(1_000, 0.3)
    with pytest.raises(BudgetExhausted) as caught:
        budget.take_reflection(1_000, 0.3)
    assert str(caught.value) == message
    assert (budget.used_reflections, budget.used_tokens, budget.used_money) == (2, 2_000, pytest.approx(0.6))


def test_what_was_given_back_can_be_taken_again() -> None:
    budget = SearchBudget(1, tokens=1_000, money=1.0)
    budget.take_reflection(1_000, 1.0)
    budget.give_back(600, 0.75)
    budget.take_reflection(600, 0.75)
    assert (budget.used_tokens, budget.used_money) == (1_000, 1.0)


def test_money_that_fits_exactly_is_not_refused_for_the_rounding_of_sums() -> None:
    budget = SearchBudget(1, money=0.3)
    for _ in range(3):
        budget.take_reflection(0, 0.1)
    with pytest.raises(BudgetExhausted, match=r"budget\.money: 0\.3 of 0\.3 are used"):
        budget.take_reflection(0, 0.1)


def test_an_answer_that_was_larger_than_expected_counts_whole() -> None:
    budget = SearchBudget(1, tokens=1_000)
    budget.take_reflection(400, 0.0)
    budget.give_back(400 - 900, 0.0)
    with pytest.raises(BudgetExhausted, match=r"budget\.tokens: 900 of 1,000"):
        budget.take_reflection(400, 0.0)
