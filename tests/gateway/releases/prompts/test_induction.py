"""Prompts are found in messages without being told which is which, and recognise messages that were not seen before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import trajectories
from bench.families import FAMILIES, WORDS, Maker
from penstock.gateway.model.resource import Template
from penstock.gateway.releases.prompt_induction import PromptProposal, PromptSample, aligned, propose
from penstock.gateway.releases.prompt_recogniser import Recogniser, RegisteredText, TextMatch, tokens


def recogniser(found: list[PromptProposal]) -> Recogniser:
    """Knows the proposals by their number."""
    return Recogniser(RegisteredText(str(at), proposal.template) for at, proposal in enumerate(found))


def known_as(recogniser: Recogniser, text: str) -> str:
    """The proposal that a text is recognised as, or why it is none."""
    found = recogniser.recognise(text)
    if not isinstance(found, TextMatch):
        return found
    assert found.known.template.render(found.slots) == text
    return found.known.resource


@pytest.mark.parametrize("seed", range(4))
def test_twenty_messages_of_each_prompt_are_enough(seed: int) -> None:
    """All prompts of one call-site, mixed: 99 of 100 messages that were not seen are recognised, none as another."""
    maker = Maker(seed)
    found = propose([PromptSample(maker.message(family)) for _ in range(20) for family in FAMILIES])
    assert len(found) == len(FAMILIES)
    assert all(it.coverage == 1 and it.messages == 20 for it in found)
    known = recogniser(found)
    names = {family: known_as(known, maker.message(family)) for family in FAMILIES}
    assert len(set(names.values())) == len(FAMILIES)
    for family in FAMILIES:
        said = [known_as(known, maker.message(family)) for _ in range(200)]
        assert said.count(names[family]) >= 198
        assert set(said) <= {names[family], "miss", "ambiguous"}


def test_a_proposal_says_what_was_found() -> None:
    maker = Maker(1)
    [found] = propose([PromptSample(maker.message("support"), "desk", frozenset({"search"})) for _ in range(30)])
    assert found.template.slots == ("customer", "date", "slot3", "slot4")
    assert found.template.anchors[0] == "You are a support agent of Acme Air.\n\nCustomer: "
    assert found.template.anchors[3].endswith("Be kind and brief. Answer in ")
    assert all(1 <= len(values) <= 3 for values in found.slots.values())
    assert (found.agent, len(found.call_site)) == ("desk", 16)
    assert Template.parse(found.template.source) == found.template


def test_a_prompt_without_slots_is_one() -> None:
    [found] = propose([PromptSample("You are a helpful agent.", rollout=str(at)) for at in range(20)])
    assert (found.template.source, found.coverage, found.slots) == ("You are a helpful agent.", 1, {})


def test_the_calls_of_one_rollout_count_once() -> None:
    assert propose([PromptSample("You are a helpful agent.", rollout="r") for _ in range(100)]) == []
    assert propose([]) == []


def test_agents_and_tools_keep_call_sites_apart() -> None:
    maker = Maker(2)
    sites = [("a", frozenset({"x"})), ("a", frozenset({"y"})), ("b", frozenset({"x"}))]
    found = propose([PromptSample(maker.message("planner"), *site) for _ in range(20) for site in sites])
    assert len({it.call_site for it in found}) == 3
    assert [it.messages for it in found] == [20, 20, 20]


POLICY = "\n".join(f"{at}. Never {' '.join(WORDS[at % 9 : 17])} before {WORDS[at % 7]} {at}." for at in range(30))


def test_prompts_that_share_most_of_their_text_are_told_apart() -> None:
    """Two roles below the same policy: the role is no slot, although it would fit into one."""
    maker = Maker(3)
    roles = [
        "You are the planner agent: split {} into steps and hand each of them on to somebody who can do it.",
        "You are the critic: read every answer of the others, about {} in particular, and politely name mistakes.",
    ]
    found = propose(
        [PromptSample(f"{POLICY}\n\n{roles[at % 2].format(maker.notes())}\nBegin now.") for at in range(60)]
    )
    assert sorted(it.messages for it in found) == [30, 30]
    assert all("{" in it.template.source and it.coverage == 1 for it in found)


def test_a_section_that_is_not_always_there_is_a_slot() -> None:
    section = "\nThe customer is a VIP: treat them with special care and offer an upgrade whenever you can.\n"
    [found] = propose(
        [PromptSample(POLICY + section * (at % 3 > 0) + f"\nUser: {at * 7}\nBegin now.") for at in range(60)]
    )
    assert found.coverage == 1
    assert len(found.template.slots) == 2


def test_the_days_of_one_month_do_not_make_it_part_of_the_prompt() -> None:
    [found] = propose(
        [PromptSample(f"You are an agent.\nDate: 2026-05-{at:02}T10:00\nBe brief.") for at in range(1, 29)]
    )
    assert found.template.source == "You are an agent.\nDate: {date}\nBe brief."


def test_messages_that_share_nothing_are_no_prompt() -> None:
    rng = random.Random(4)
    assert propose([PromptSample(" ".join(rng.choices(WORDS, k=80))) for _ in range(60)]) == []


FILLINGS: dict[str, Callable[[int], str]] = {
    "one word": lambda at: "ab " * (at * 300) + "x" * at,
    "one line": lambda at: "\n- item" * (at * 100),
    "one number": lambda at: f"{at} " * 5000,
}


@pytest.mark.parametrize("filling", FILLINGS.values(), ids=FILLINGS)
def test_repetitive_text_is_worked_through_in_bounded_time(filling: Callable[[int], str]) -> None:
    """The default limit of a test would end it otherwise."""
    head, end = "You are an agent of many words.\nNotes follow:", "\nThat is the end of the notes."
    found = propose([PromptSample(head + filling(at) + end) for at in range(40)])
    assert [(it.messages, it.coverage) for it in found] == [(40, 1.0)]


@given(st.lists(st.sampled_from("abc "), max_size=40), st.lists(st.sampled_from("abc "), max_size=40))
def test_an_alignment_is_in_the_order_of_both(one: list[str], other: list[str]) -> None:
    a_end = b_end = 0
    for a, b, size in aligned(one, other):
        assert a >= a_end
        assert b >= b_end
        assert size > 0
        assert one[a : a + size] == other[b : b + size]
        a_end, b_end = a + size, b + size
    assert aligned(one, one) == ([(0, 0, len(one))] if one else [])


@given(st.text())
def test_tokens_are_the_text(text: str) -> None:
    assert "".join(tokens(text)) == text


@pytest.mark.skipif(not trajectories.DATA.exists(), reason="no trajectories at ../shared/data")
def test_the_prompt_of_real_agents_is_one_template() -> None:
    samples: list[PromptSample] = []
    for number, agent in enumerate(trajectories.agents()):
        for request, _ in agent:
            samples.append(PromptSample(json.loads(request)["messages"][0]["content"], rollout=str(number)))
    [found] = propose(samples)
    assert (found.coverage, found.messages) == (1.0, len({it.rollout for it in samples}))
    assert {known_as(recogniser([found]), it.text) for it in samples} == {"0"}
