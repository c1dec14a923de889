"""Edits lead from any text to any other, mean the same whoever looks first, and do no harm where they do not fit."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.trainer.apo.edits import Edit, Kind, alike, applied, diff_edits, exclude, words

LINES = ("", " ", "a", " a", "b", "c", "Be kind.", "be kind", "{date}")
lines = st.sampled_from(LINES)
texts = st.text(max_size=30) | st.lists(lines, max_size=8).map("\n".join)
kinds: st.SearchStrategy[Kind] = st.sampled_from(["add", "delete", "replace"])
edits = st.builds(Edit, st.sampled_from(["desk", "back"]), kinds, lines, lines)


def made(text: str, *edits: Edit) -> str:
    return applied({"desk": text}, edits)["desk"]


def edit(kind: Kind, line: str = "", text: str = "") -> Edit:
    return Edit("desk", kind, line, text)


# --- from one text to another ---


@given(before=texts, after=texts)
@example(before="b", after="a\nb")
@example(before="a\n\nb", after="a\n\nb\n\nc")
@example(before="a\na\nb", after="a\nb\na")
@example(before=" a", after="a")
@example(before="", after="\n")
def test_edits_between_two_texts_lead_from_one_to_the_other(before: str, after: str) -> None:
    found = diff_edits(before, after, "desk")
    assert made(before, *found) == after
    assert before != after or found == []


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.data())
def test_a_change_of_one_line_is_one_edit(lines: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(lines)))
    more = [*lines[:at], "new", *lines[at:]]
    if at:
        assert diff_edits("\n".join(lines), "\n".join(more), "desk") == [edit("add", lines[at - 1], "new")]
    if lines:
        assert diff_edits("\n".join(more), "\n".join(lines), "desk") == [edit("delete", "new")]
        other = [*lines[:at], "other", *lines[at:]]
        assert diff_edits("\n".join(more), "\n".join(other), "desk") == [edit("replace", "new", "other")]


def test_lines_that_come_together_stay_in_order() -> None:
    found = diff_edits("a\nz", "a\nb\nc\nz", "desk")
    assert found == [edit("add", "a", "b"), edit("add", "b", "c")]


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
    assert alike(one, other) == alike(other, one)
    assert exclude(one, other) == exclude(other, one)


@given(edits)
def test_an_edit_is_like_itself_if_it_says_something(edit: Edit) -> None:
    assert alike(edit, edit) == (edit.kind == "delete" or bool(words(edit.text)))
    assert exclude(edit, edit) == (edit.kind != "add")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            edit("add", text="State the price in every answer."),
            edit("add", "a", "In every answer state the price"),
            True,
        ),
        (edit("add", text="State the price in every answer."), edit("add", text="Leave the price out."), False),
        (edit("add", text="a b c"), edit("replace", "x", "a b c"), False),
        (edit("replace", "x", "a b c"), edit("replace", " x", "c b a"), True),
        (edit("replace", "x", "a b c"), edit("replace", "y", "a b c"), False),
        (edit("delete", "x"), edit("delete", " x "), True),
        (edit("delete", "x"), edit("delete", "y"), False),
        (edit("delete", "x"), edit("replace", "x", "x"), False),
        (edit("add", text="a b c"), Edit("back", "add", "", "a b c"), False),
    ],
)
def test_which_edits_want_the_same(one: Edit, other: Edit, same: bool) -> None:
    assert alike(one, other) == same


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
