"""A text is one registered prompt or none; its split is the only one; time is linear whatever stands in the slots. One
that is nearly a registered one is told from every other, with the first place where it differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations_with_replacement
from random import Random

import pytest
from fakes.odd_json import joined, written
from fakes.some import some
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.families import FAMILIES, TEMPLATES, Maker, filled, similar
from penstock.gateway.model.resource import Template, TextDifference
from penstock.gateway.releases.prompt_recogniser import (
    KEPT_BYTES,
    NearestTextFinder,
    Recogniser,
    RegisteredText,
    SentVersion,
    TextMatch,
    difference,
    match,
    sha256,
)

SHORT = st.text("ab", max_size=3)
SHORT_TEMPLATES = st.integers(0, 2).flatmap(
    lambda slots: st.builds(Template, st.tuples(*[SHORT] * (slots + 1)), st.tuples(*[st.sampled_from("xyz")] * slots))
)


def splits(template: Template, text: str) -> list[tuple[str, ...]]:
    """Every way to split a text into slots, found by trying all."""
    found: list[tuple[str, ...]] = []
    count = len(template.slots)
    for cuts in combinations_with_replacement(range(len(text) + 1), 2 * count):
        values = tuple(text[cuts[2 * at] : cuts[2 * at + 1]] for at in range(count))
        edges = (0, *cuts, len(text))
        between = tuple(text[edges[2 * at] : edges[2 * at + 1]] for at in range(count + 1))
        if between == template.anchors:
            found.append(values)
    return sorted(set(found))


@settings(max_examples=100, deadline=None)
@given(SHORT_TEMPLATES, st.data())
def test_the_scan_finds_the_only_split_and_no_other(template: Template, data: st.DataObject) -> None:
    rendered = st.fixed_dictionaries({slot: SHORT for slot in template.slots}).map(template.render)
    text = data.draw(rendered | st.text("ab", max_size=7))
    ways = splits(template, text)
    found = match(template, text)
    if len(ways) > 1:
        assert found == "ambiguous"
    else:
        whole = [dict(zip(template.slots, way, strict=True)) for way in ways]
        fitting = [values for values in whole if template.render(values) == text]  # Not one name with two values.
        assert found == (fitting[0] if fitting else "miss")


PROMPT = Template.parse("You are {role}.\nThe customer is {name}.\nToday is {date}.\n")
TEXT = st.text(max_size=20) | st.sampled_from([".\n", "You are ", "{name}", "a\nb\n\nc", "Today is", ""])


@given(role=TEXT, name=TEXT, date=TEXT)
def test_what_is_recognised_comes_back_character_by_character(role: str, name: str, date: str) -> None:
    values = {"role": role, "name": name, "date": date}
    text = PROMPT.render(values)
    found = Recogniser([RegisteredText("planner", PROMPT)]).recognise(text)
    if isinstance(found, TextMatch):
        assert dict(found.slots) == values
        assert PROMPT.render(found.slots) == text
        assert found.sha256 == sha256(text)
    else:
        assert any(anchor in "".join(values.values()) + text[1:-1] for anchor in PROMPT.anchors if anchor)
        assert found == "ambiguous"


ANY = st.text(st.sampled_from('aé漢😀\ud83d\ude00"\\\n/{'), max_size=4)
"""Characters of one to four bytes, halves of pairs, and what JSON escapes."""


@settings(max_examples=100, deadline=None)
@given(anchors=st.lists(ANY.map(joined), min_size=1, max_size=3), data=st.data(), seed=st.integers(0, 9999))
def test_bytes_are_split_as_characters_are(anchors: list[str], data: st.DataObject, seed: int) -> None:
    """However the literal is escaped, and where a character's bytes could begin in another's."""
    first, *others = anchors
    template = Template((f"begin {first}", *others), tuple("xyz"[: len(others)]))
    piece = ANY | st.sampled_from(anchors)
    values = {slot: "".join(data.draw(st.lists(piece, max_size=3))) for slot in template.slots}
    text = joined(template.render(values) + data.draw(st.sampled_from(["", "a", "\ude00"])))
    literal = written(text, Random(seed)).strip().encode()
    told = Recogniser([RegisteredText("p", template)]).recognise_literal(literal).what
    split = match(template, text) if template.weakness is None else "miss"
    assert (told.slots if isinstance(told, TextMatch) else told) == split
    assert not isinstance(told, TextMatch) or told.sha256 == sha256(text)


def test_a_placeholder_is_seen_however_it_is_written() -> None:
    known = Recogniser([RegisteredText("p", PROMPT)])
    assert known.recognise_literal(rb'"a {{penstock:x}}"').marked
    assert known.recognise_literal(rb'"a \u007b{pen\u0073tock:x}}"').marked
    assert not known.recognise_literal(rb'"a {{penstock x}}"').marked
    assert not known.recognise_literal(rb'"a {{penstock\\u003ax}}"').marked


def recognised(sources: dict[str, str], text: str) -> str:
    """The resource, or why there is none."""
    found = Recogniser(RegisteredText(name, Template.parse(source)) for name, source in sources.items()).recognise(text)
    return found.known.resource if isinstance(found, TextMatch) else found


def test_two_prompts_that_a_text_could_be_are_none() -> None:
    sources = {"general": "You are an agent of {company}.", "special": "You are an agent of Acme."}
    assert recognised(sources, "You are an agent of Acme.") == "ambiguous"
    assert recognised(sources, "You are an agent of Bolt.") == "general"
    assert recognised(sources, "You are an agent of Bolt") == "miss"
    assert recognised({}, "You are an agent") == "miss"


def test_of_versions_of_one_resource_the_most_literal_counts() -> None:
    narrow, wide = Template.parse("Rules: be kind.\nUser: {name}\nBye."), Template.parse("Rules: {name}\nBye.")
    again = Template.parse("Rules: be kind.\nUser: {user}\nBye.")
    text = "Rules: be kind.\nUser: Ann\nBye."
    for versions in ((narrow, wide), (wide, narrow)):
        found = Recogniser(RegisteredText("p", template) for template in versions).recognise(text)
        assert isinstance(found, TextMatch)
        assert (found.known.template, found.slots) == (narrow, {"name": "Ann"})
    assert (
        Recogniser(RegisteredText("p", template) for template in (narrow, wide, again)).recognise(text) == "ambiguous"
    )
    assert Recogniser([RegisteredText("p", narrow), RegisteredText("q", wide)]).recognise(text) == "ambiguous"


def test_one_name_has_one_value() -> None:
    source = "Talk to {name}. Remember: {name}!"
    assert recognised({"p": source}, "Talk to Ann. Remember: Ann!") == "p"
    assert recognised({"p": source}, "Talk to Ann. Remember: Bob!") == "miss"


def test_a_value_that_looks_like_an_anchor_makes_a_text_ambiguous() -> None:
    source = "Customer: {name}\nDate: {date}\nBe kind."
    assert recognised({"p": source}, "Customer: Ann\nDate: today\nBe kind.") == "p"
    assert recognised({"p": source}, "Customer: Ann\nDate: x\nDate: today\nBe kind.") == "ambiguous"


def test_templates_that_tell_nothing_are_not_used() -> None:
    assert recognised({"all": "{text}", "p": "You are an {agent}."}, "You are an X.") == "p"
    assert not Recogniser([RegisteredText("all", Template.parse("{text}"))])


def test_tools_have_their_own_texts() -> None:
    find = Template.parse("Finds a flight.")
    known = Recogniser([RegisteredText("find-text", find, "find"), RegisteredText("prompt", find)])
    assert known.tools == {"find"}
    for tool, resource in (("find", "find-text"), (None, "prompt")):
        found = known.recognise("Finds a flight.", tool)
        assert isinstance(found, TextMatch)
        assert found.known.resource == resource
    assert known.recognise("Finds a flight.", "other") == "miss"


@pytest.mark.parametrize("seed", range(3))
def test_fifty_similar_templates_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    known = [RegisteredText(f"p{number}", template) for number, template in enumerate(similar(50, seed))]
    recogniser = Recogniser(known)
    for it in known * 4:
        text = filled(it.template, rng)
        found = recogniser.recognise(text)
        assert isinstance(found, TextMatch)
        assert found.known == it
        assert it.template.render(found.slots) == text


HOSTILE: dict[str, tuple[Template, Callable[[int], str]]] = {
    "anchors in slots": (Template.parse("Begin {a} middle {b} finish {c} end."), lambda n: " middle  finish " * n),
    "half an anchor": (Template(("x", "a" * 90 + "b", "z"), ("p", "q")), lambda n: "a" * (16 * n)),
    "half a long anchor": (Template(("x", "ab" * 400 + "c", "z"), ("p", "q")), lambda n: "ab" * (8 * n)),
    "one anchor again": (Template(("x", *["-----,"] * 9, "z"), tuple("abcdefghij")), lambda n: "-----," * n),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_read_through_once(name: str) -> None:
    """With a square of its length it would take minutes, and the limit of a test end it."""
    template, filling = HOSTILE[name]
    match(template, template.anchors[0] + filling(200_000) + template.anchors[-1])


def test_a_text_too_long_to_be_kept_is_recognised_all_the_same() -> None:
    known = Recogniser([RegisteredText("p", PROMPT)])
    values = {"role": "x" * KEPT_BYTES, "name": "", "date": ""}
    found = known.recognise(PROMPT.render(values))
    assert isinstance(found, TextMatch)
    assert dict(found.slots) == values


def test_one_resource_can_be_asked_for_alone() -> None:
    known = Recogniser(
        [RegisteredText("a", Template.parse("You are {x}.")), RegisteredText("b", Template.parse("You are an {x}."))]
    )
    assert known.recognise("You are an owl.") == "ambiguous"
    found = known.only("b").recognise("You are an owl.")
    assert isinstance(found, TextMatch)
    assert found.slots == {"x": "owl"}


# -- nearly one --

FROZEN = Template.parse("Today is 2026-11-22. You are a helpful agent of {shop}. Be brief, and never promise a refund.")
SENT = SentVersion("travel", "v1", FROZEN)
LATER = FROZEN.render({"shop": "Acme"}).replace("22", "23")


def test_a_date_that_was_written_as_text_is_the_difference() -> None:
    nearest = NearestTextFinder([SENT, SentVersion("other", "v1", TEMPLATES["support"])])
    assert nearest.of(LATER) == SENT
    assert difference(SENT, LATER) == TextDifference(
        version="v1", at=9, found=LATER[9:57], wanted="2026-11-22. You are a helpful agent of "
    )


def test_where_the_end_differs() -> None:
    said = FROZEN.render({"shop": "Acme"})
    for text, found, wanted in ((f"{said} Hurry.", "refund. Hurry.", "refund."), (said[:-8], "a", "a refund.")):
        told = some(difference(SENT, text))
        assert (told.found, told.wanted) == (found, wanted)


def test_messages_of_other_prompts_are_nobodys_miss() -> None:
    """Each prompt is registered alone; the others are not near it, and a changed message of its own is."""
    maker = Maker(7)
    for family, template in TEMPLATES.items():
        nearest = NearestTextFinder([SentVersion(family, "v1", template)])
        for other in FAMILIES.keys() - {family}:
            assert nearest.of(maker.message(other)) is None
        changed = maker.message(family)
        changed = changed[:-1] if changed.endswith("\n") else f"Note. {changed}"
        assert nearest.of(changed) is not None, changed


def test_a_tool_is_compared_with_what_is_registered_of_it() -> None:
    sent = SentVersion("find", "v1", Template.parse("Finds flights between two airports."), "find")
    nearest = NearestTextFinder([sent, SENT])
    changed = "Finds flights between three airports."
    assert nearest.of(changed, ("mcp__air__find", "find")) == sent
    assert nearest.of(changed) is None
    assert nearest.of(changed, ("other", "other")) is None


@given(st.text(max_size=12), st.text(max_size=80))
def test_a_difference_is_where_it_is_said_to_be(shop: str, text: str) -> None:
    whole = FROZEN.render({"shop": shop})
    if match(FROZEN, whole) != "ambiguous":
        assert difference(SENT, whole) is None
    told = difference(SENT, text)
    if told is None:
        assert match(FROZEN, text) != "miss"
    else:
        assert text[told.at :].startswith(told.found)
        assert told.wanted in FROZEN.anchors[0] + FROZEN.anchors[1]
