"""Edits mean the same whoever looks first, and do no harm where they do not fit."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.reflection import Edit, Kind, applied, exclude, words

LINES = ("", " ", "a", " a", "b", "c", "Be kind.", "be kind", "{date}")
lines = st.sampled_from(LINES)
texts = st.text(max_size=30) | st.lists(lines, max_size=8).map("\n".join)
kinds: st.SearchStrategy[Kind] = st.sampled_from(["add", "delete", "replace"])
edits = st.builds(Edit, st.sampled_from(["desk", "back"]), kinds, lines, lines)


def made(text: str, *edits: Edit) -> str:
    return applied({"desk": text}, edits)["desk"]


def edit(kind: Kind, line: str = "", text: str = "") -> Edit:
    return Edit("desk", kind, line, text)


# --- what an edit does ---


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (edit("add", text="c"), "a\nb\nc"),
        (edit("add", "a", "c"), "a\nc\nb"),
        (edit("add", "gone", "c"), "a\nb\nc"),
        (edit("add", "a", " b "), "a\nb"),
        (edit("delete", " a "), "b"),
        (edit("delete", "gone"), "a\nb"),
        (edit("replace", "a", "c"), "c\nb"),
        (edit("replace", "gone", "c"), "a\nb"),
        (edit("replace", "a", "b"), "b"),
        (edit("replace", "a", " a"), " a\nb"),
        (Edit("back", "delete", "a"), "a\nb"),
    ],
)
def test_what_an_edit_does(edit: Edit, after: str) -> None:
    assert made("a\nb", edit) == after


@given(texts=st.dictionaries(st.sampled_from(["desk", "other"]), texts), edits=st.lists(edits, max_size=6))
def test_any_edits_can_be_made_and_leave_other_texts_alone(texts: dict[str, str], edits: list[Edit]) -> None:
    after = applied(texts, edits)
    assert after.keys() == texts.keys()
    assert after.get("other") == texts.get("other")
    assert applied(texts, []) == texts


@given(texts, edits)
def test_an_edit_that_was_made_makes_a_text_no_longer_when_it_is_made_again(text: str, edit: Edit) -> None:
    once = applied({"desk": text}, [edit])
    again = applied(once, [edit])
    assert len(again["desk"].split("\n")) <= len(once["desk"].split("\n"))


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True), st.data())
def test_edits_that_do_not_exclude_each_other_write_the_same_lines_in_any_order(
    lines: list[str], data: st.DataObject
) -> None:
    named = data.draw(st.lists(st.tuples(kinds, st.sampled_from(lines)), max_size=4))
    every = [edit(kind, line, f"new {at}") for at, (kind, line) in enumerate(named)]
    chosen: list[Edit] = []
    for one in every:
        if not any(exclude(one, other) for other in chosen):
            chosen.append(one)
    results = {tuple(sorted(made("\n".join(lines), *order).split("\n"))) for order in permutations(chosen)}
    # All lines deleted leave one that is empty, wherever the others were added.
    assert len({tuple(line for line in result if line) for result in results}) == 1


def test_a_line_that_two_edits_write_is_written_once_in_either_order() -> None:
    both = edit("add", text="right"), edit("replace", "wrong", "right")
    assert made("a\nwrong", *both) == "a\nright"
    assert made("a\nwrong", *both[::-1]) == "a\nright"


@given(st.lists(st.sampled_from("abcdef"), min_size=2, unique=True), kinds, st.text("xyz ", min_size=1), st.data())
def test_the_length_of_an_edit_is_what_a_text_grows_by(
    lines: list[str], kind: Kind, new: str, data: st.DataObject
) -> None:
    before, one = "\n".join(lines), edit(kind, data.draw(st.sampled_from(lines)), new)
    assert len(made(before, one)) - len(before) == one.length


# --- two edits ---


@given(edits, edits)
def test_what_holds_of_two_edits_holds_of_them_turned_round(one: Edit, other: Edit) -> None:
    assert exclude(one, other) == exclude(other, one)


@given(edits)
def test_an_edit_that_adds_can_be_made_twice(edit: Edit) -> None:
    assert exclude(edit, edit) == (edit.kind != "add")


@pytest.mark.parametrize(
    ("one", "other", "excluded"),
    [
        (edit("delete", "x"), edit("replace", "x ", "y"), True),
        (edit("replace", "x", "y"), edit("replace", "x", "z"), True),
        (edit("delete", "x"), edit("delete", "y"), False),
        (edit("add", "x", "y"), edit("delete", "x"), False),
        (edit("delete", "x"), Edit("back", "delete", "x"), False),
    ],
)
def test_which_edits_exclude_each_other(one: Edit, other: Edit, excluded: bool) -> None:
    assert exclude(one, other) == excluded


def test_words_have_no_case_and_keep_slots() -> None:
    assert words("Say {date}, don't GUESS; guess") == {"say", "{date}", "don't", "guess"}
