"""Templates that are looked for together are found as each of them is alone, and the work is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.families import filled, similar
from penstock.gateway.model.resource import Template
from penstock.gateway.releases.prompt_recogniser import (
    ALIKE,
    LONG,
    TRIES,
    Recogniser,
    RegisteredText,
    TemplateTree,
    TextMatch,
    find_anchor,
    match,
)

PIECE = st.sampled_from(["a", "b", "c", "ab" * ALIKE, "ab" * LONG, "a" * LONG])
"""Texts made of them begin alike for a while: shorter and longer than what templates are grouped and searched by."""
ANCHOR = st.lists(PIECE, max_size=3).map("".join)
TEMPLATE = st.lists(ANCHOR, min_size=1, max_size=4).map(
    lambda anchors: Template(tuple(anchors), tuple(f"s{at}" for at in range(1, len(anchors))))
)


def alone(templates: list[Template], text: str) -> set[Template]:
    """Those that match, or are ambiguous, when each is tried by itself."""
    return {it for it in templates if match(it, text) != "miss"}


@settings(max_examples=120, deadline=None)
@given(st.lists(TEMPLATE, min_size=1, max_size=8, unique=True), st.data())
def test_together_is_as_alone(templates: list[Template], data: st.DataObject) -> None:
    """The text is that of one of them, with anchors of all in its slots again and again, or any."""
    pieces = st.lists(PIECE | st.sampled_from([anchor for it in templates for anchor in it.anchors]), max_size=3)
    again = st.integers(1, 2 * TRIES)
    template = data.draw(st.sampled_from(templates))
    values = {slot: "".join(data.draw(pieces)) * data.draw(again) for slot in template.slots}
    text = template.render(values) + data.draw(st.sampled_from(["", "a"]))
    found = list(TemplateTree(templates).possible(text))
    assert len(found) == len(set(found))
    assert alone(found, text) == alone(templates, text)


@settings(max_examples=100, deadline=None)
@given(anchor=ANCHOR, text=st.lists(PIECE, max_size=8).map("".join), at=st.integers(0, 40), cut=st.integers(0, 40))
@example(anchor="ab" * LONG + "c", text="ab" * (LONG + 3) + "c", at=0, cut=0)
def test_a_long_anchor_is_found_where_it_stands(anchor: str, text: str, at: int, cut: int) -> None:
    stop = max(len(text) - cut, 0)
    assert find_anchor(text, anchor, at, stop) == text.find(anchor, at, stop)


@pytest.mark.parametrize("before", range(3 * TRIES))
def test_what_anchors_begin_with_may_stand_in_itself(before: int) -> None:
    templates = [Template(("<", "a" * LONG + end, ">"), ("p", "q")) for end in "cd"]
    assert list(TemplateTree(templates).possible(f"<{'a' * (before + LONG)}c>")) == templates[:1]


@pytest.mark.parametrize("seed", range(3))
def test_of_fifty_similar_templates_one_is_left(seed: int) -> None:
    """However the slots are filled, and where the others' beginnings stand in them as often as one likes."""
    rng, templates = random.Random(seed), similar(50, seed, 2_000)
    tree = TemplateTree(templates)
    for template in templates:
        assert list(tree.possible(filled(template, rng))) == [template]
        text = template.render({"name": template.anchors[1][:LONG] * 500, "date": "", "notes": ""})
        assert list(tree.possible(text)) == [template]


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_quotes_another_is_told_as_by_itself(seed: int) -> None:
    rng, templates = random.Random(seed), similar(50, seed, 600)
    recogniser = Recogniser(RegisteredText(str(at), it) for at, it in enumerate(templates))
    told = 0
    for at, template in enumerate(templates):
        values = {slot: rng.choice([filled(rng.choice(templates), rng), "x", ""]) for slot in template.slots}
        text = template.render(values)
        found = recogniser.recognise(text)
        if isinstance(found, TextMatch):
            told += 1
            assert (found.known.resource, found.slots) == (str(at), values)
        else:
            assert len(alone(templates, text)) > 1 or match(template, text) == "ambiguous"
    assert told > 10


def test_many_slots_in_common_are_no_trouble() -> None:
    shared = tuple(f"field {at}: " for at in range(3_000))
    one, other = (Template((*shared, end, ""), tuple(f"s{at}" for at in range(3_001))) for end in ("so", "thus"))
    text = other.render(dict.fromkeys(other.slots, "x"))
    assert list(TemplateTree([one, other]).possible(text)) == [other]
    assert match(other, text) == dict.fromkeys(other.slots, "x")
