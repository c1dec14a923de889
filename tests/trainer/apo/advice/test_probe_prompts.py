"""Checklists are made of what several reflections name; of several ways to mend a failure the usual one is taken."""

from __future__ import annotations

from penstock.trainer.apo.advice.probe import ask_reworded, checklist
from penstock.trainer.apo.reflection import Edit, Hypothesis, read_texts

TEXTS = {"desk": "You answer customers.\nLeave the price out."}


def add(failure: str, text: str) -> Hypothesis:
    return Hypothesis(failure, Edit("desk", "add", "", text))


PRICE, DATE = "the answer has no price", "the answer has no date"


def test_each_failure_gets_the_edit_that_is_named_most_often() -> None:
    named = [
        add(DATE, "State the date in every answer."),
        add(PRICE, "State the price in every answer."),
        add(PRICE, "Be careful and thorough."),
        add(PRICE, "In every answer, state the price."),
    ]
    lines = checklist(TEXTS, named)["desk"].split("\n")
    assert lines == [*TEXTS["desk"].split("\n"), "State the price in every answer.", "State the date in every answer."]


def test_an_edit_that_also_takes_a_line_away_is_rather_made() -> None:
    text = "State the price in every answer."
    replaced = Hypothesis(PRICE, Edit("desk", "replace", "Leave the price out.", text))
    assert checklist(TEXTS, [add(PRICE, text), replaced])["desk"] == f"You answer customers.\n{text}"


def test_edits_that_exclude_each_other_are_not_both_made() -> None:
    replaced = [
        Hypothesis(failure, Edit("desk", "replace", "Leave the price out.", text))
        for failure, text in ((PRICE, "State the price."), (PRICE, "State the price."), (DATE, "State a date."))
    ]
    assert checklist(TEXTS, replaced)["desk"] == "You answer customers.\nState the price."


def test_the_question_shows_every_text_and_asks_for_all_of_them() -> None:
    asked = ask_reworded({**TEXTS, "other": "Plan it for {day}."}, "terse")
    assert "Leave the price out." in asked
    assert "Plan it for {day}." in asked
    assert "these names: desk, other" in asked
    assert read_texts('{"texts": {"desk": "Answer.", "other": "Plan."}}', {**TEXTS, "other": ""}) is not None
