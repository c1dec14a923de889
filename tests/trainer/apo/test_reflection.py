"""Questions show what they must, and no answer of a model can do harm: what cannot be used is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.trainer.apo.protocol import Candidate, Trial
from penstock.trainer.apo.reflection import (
    MOST_TRANSCRIPT,
    Edit,
    Hypothesis,
    applied,
    ask_hypotheses,
    ask_scratch,
    fenced,
    format_trials,
    read_hypotheses,
    read_texts,
)

TEXTS = {"desk": "You answer.\n\nBe kind, {name}.", "back": "One line"}
odd: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["desk", "back", "add", "delete", "replace", "\ud800", "\x00", "", " ", "a\nb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
proposals = st.fixed_dictionaries(
    {},
    optional={
        "failure": odd | st.text(max_size=10),
        "resource": odd | st.sampled_from(["desk", "back"]),
        "kind": odd | st.sampled_from(["add", "delete", "replace"]),
        "line": odd | st.integers(-2, 5),
        "text": odd | st.text(max_size=10),
    },
)
answers = st.one_of(
    st.text(max_size=40),
    odd.map(json.dumps),
    st.fixed_dictionaries({"hypotheses": odd | st.lists(proposals | odd, max_size=4)}).map(json.dumps),
    st.fixed_dictionaries({"texts": odd | st.dictionaries(st.sampled_from(["desk", "back"]), odd)}).map(json.dumps),
)
wrapped = st.tuples(st.text(max_size=10), answers, st.text(max_size=10)).map("".join)
TEXT_PAIRS = st.sampled_from([TEXTS, {"desk": ""}, {"desk": "\n\n"}])
DEEP = '{"hypotheses": ' + "[" * 100_000 + "}"


def trial(**more: Any) -> Trial:
    return replace(Trial("c", "t3", 0, 0.25), **more)


def named(**more: Any) -> str:
    """An answer with one hypothesis."""
    proposal = {"failure": "f", "resource": "desk", "kind": "add", "line": 0, "text": "new"} | more
    return json.dumps({"hypotheses": [proposal]})


# --- any answer ---


@given(answer=answers | wrapped, texts=TEXT_PAIRS)
@example(answer=DEEP, texts=TEXTS)
@example(answer='{"a":' * 2_000 + "}", texts=TEXTS)
@example(answer='{"a":' * 500 + "1" + "}" * 500, texts=TEXTS)
@example(answer='{"hypotheses": [' + "9" * 10_000 + "]}", texts=TEXTS)
@example(answer=named(text="\ud800", failure="\udfff"), texts=TEXTS)
@example(answer=named(line=True), texts=TEXTS)
@example(answer=named(line=10**400), texts=TEXTS)
@example(answer="}{", texts=TEXTS)
def test_no_answer_raises_and_what_is_read_can_be_applied_and_sent(answer: str, texts: dict[str, str]) -> None:
    for hypothesis in read_hypotheses(answer, texts):
        edit = hypothesis.edit
        assert edit.resource in texts
        assert "\n" not in edit.text
        assert edit.text.strip() == edit.text
        assert bool(edit.text) == (edit.kind != "delete")
        if edit.kind != "add":
            assert edit.line.strip()
        if edit.line:
            assert edit.line in texts[edit.resource].split("\n")
        after = applied(texts, [edit])
        assert "".join([*after.values(), hypothesis.failure]).encode()
    read = read_texts(answer, texts)
    if read is not None:
        assert read.keys() == texts.keys()
        assert all(text.strip() and text.encode() for text in read.values())
        assert Candidate(read).id


@given(st.text(max_size=60))
def test_a_fenced_text_is_a_part_of_the_answer(answer: str) -> None:
    assert fenced(answer) in answer


# --- what is read ---


@pytest.mark.parametrize(
    ("given", "edit"),
    [
        ({}, Edit("desk", "add", "", "new")),
        ({"line": 1}, Edit("desk", "add", "You answer.", "new")),
        ({"line": 99}, Edit("desk", "add", "", "new")),
        ({"line": "1"}, Edit("desk", "add", "", "new")),
        ({"kind": "replace", "line": 3}, Edit("desk", "replace", "Be kind, {name}.", "new")),
        ({"kind": "delete", "line": 1}, Edit("desk", "delete", "You answer.", "")),
        ({"text": " two\nlines "}, Edit("desk", "add", "", "two lines")),
        ({"kind": "replace", "line": 2}, None),
        ({"kind": "replace", "line": 0}, None),
        ({"kind": "delete", "line": 4}, None),
        ({"kind": "move"}, None),
        ({"resource": "door"}, None),
        ({"resource": None}, None),
        ({"text": " \n "}, None),
        ({"text": 7}, None),
    ],
)
def test_what_is_read_of_a_hypothesis(given: dict[str, Any], edit: Edit | None) -> None:
    found = read_hypotheses(named(**given), TEXTS)
    assert found == ([] if edit is None else [Hypothesis("f", edit)])


def test_where_there_is_one_text_it_need_not_be_named() -> None:
    (found,) = read_hypotheses(named(resource="another"), {"back": "One line"})
    assert found.edit == Edit("back", "add", "", "new")


def test_a_hypothesis_that_cannot_be_used_takes_no_other_with_it() -> None:
    good = json.loads(named())["hypotheses"][0]
    answer = json.dumps({"hypotheses": [None, good | {"kind": "move"}, "text", good, [good]]})
    assert [one.edit.text for one in read_hypotheses(answer, TEXTS)] == ["new"]


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        "```json\n{}\n```",
        "I have kept {{name}} as it is: {}",
        'Perhaps {{"hypotheses": [], "texts": {{}}}}? No: {}',
        "<think>The slot {{name}} stays, {{0}} too.</think>\n{}\nThat is all {{of it}}.",
    ],
)
def test_an_object_is_found_wherever_it_stands_in_an_answer(answer: str) -> None:
    assert len(read_hypotheses(answer.format(named()), TEXTS)) == 1
    texts = {"desk": "a", "back": "b"}
    assert read_texts(answer.format(json.dumps({"texts": texts})), TEXTS) == texts


@pytest.mark.parametrize(
    "texts", [{"desk": "a"}, {"desk": "a", "back": " "}, {"desk": "a", "back": 3}, ["a", "b"], None, {}]
)
def test_texts_of_which_one_is_missing_are_none(texts: Any) -> None:
    assert read_texts(json.dumps({"texts": texts}), TEXTS) is None


def test_halves_of_characters_are_left_out_and_whole_ones_are_kept() -> None:
    (found,) = read_hypotheses(named(text="a\ud83d b\ud83d\ude00", failure="\ude00c"), TEXTS)
    assert (found.edit.text, found.failure) == ("a b\U0001f600", "c")
    assert read_hypotheses(named(text="\ud83d"), TEXTS) == []


def test_texts_that_nobody_asked_for_are_left_out() -> None:
    answer = json.dumps({"texts": {"desk": "a\nb", "back": "c", "door": "d"}})
    assert read_texts(answer, TEXTS) == {"desk": "a\nb", "back": "c"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("before\n```\na\nb\n```\nafter", "a\nb"),
        ("```text\na\n```", "a"),
        ("```\na\n```py\nb\n```\nc\n```", "a\n```py\nb\n```\nc"),
        (" no fences ", "no fences"),
        ("``` ", "```"),
    ],
)
def test_a_text_is_taken_out_of_its_fences(answer: str, text: str) -> None:
    assert fenced(answer) == text


# --- what is asked ---


def test_a_question_shows_texts_with_numbers_and_each_rollout_with_its_reason() -> None:
    trials = [trial(transcript="asks", reason="no price"), trial(task="t4", reward=None)]
    asked = ask_hypotheses(TEXTS, trials, 3)
    assert "At most 3 hypotheses" in asked
    assert "## Text back\n1| One line\n\n## Text desk\n1| You answer.\n2| \n3| Be kind, {name}.\n" in asked
    assert "# Rollout 1, task t3, reward 0.25\nasks\nReason: no price\n" in asked
    assert "# Rollout 2, task t4, reward none\n\nReason: not given\n" in asked


def test_a_question_from_scratch_shows_no_text_but_names_and_slots() -> None:
    asked = ask_scratch(TEXTS, ["{name}"], [trial(transcript="asks")])
    assert "as it is: {name}." in asked
    assert "with these names: back, desk" in asked
    assert "# Rollout 1, task t3" in asked
    assert "You answer" not in asked
    assert "stands in them" not in ask_scratch(TEXTS, [], [])


@given(st.dictionaries(st.sampled_from(["desk", "back"]), st.text(max_size=20), min_size=1), st.text(max_size=20))
def test_a_percent_sign_or_a_brace_in_a_text_or_a_rollout_changes_no_question(texts: dict[str, str], said: str) -> None:
    assert ask_hypotheses(texts, [trial(transcript=said)], 2).startswith("You improve the texts")
    assert said in ask_scratch(texts, ["%s"], [trial(transcript=said)])


@given(st.integers(0, 3 * MOST_TRANSCRIPT))
def test_a_long_transcript_is_shown_by_its_beginning_and_its_end(length: int) -> None:
    said = "".join(chr(97 + at % 26) for at in range(length))
    text = format_trials([trial(transcript=said)])
    assert len(text) <= MOST_TRANSCRIPT + 100
    assert said[: MOST_TRANSCRIPT // 2] in text
    assert said[-MOST_TRANSCRIPT // 2 :] in text
    assert ("[...]" in text) == (length > MOST_TRANSCRIPT)
