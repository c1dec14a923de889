"""A text that is nearly a registered one is told from every other, with the first place where it differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.families import FAMILIES, TEMPLATES, Maker
from penstock.gateway.model.coverage import Difference
from penstock.gateway.model.template import Template
from penstock.gateway.prompts.match import match
from penstock.gateway.prompts.nearest import Nearest, Sent, difference

FROZEN = Template.parse("Today is 2026-11-22. You are a helpful agent of {shop}. Be brief, and never promise a refund.")
SENT = Sent("travel", "v1", FROZEN)
LATER = FROZEN.render({"shop": "Acme"}).replace("22", "23")


def test_a_date_that_was_written_as_text_is_the_difference() -> None:
    nearest = Nearest([SENT, Sent("other", "v1", TEMPLATES["support"])])
    assert nearest.of(LATER) == SENT
    assert difference(SENT, LATER) == Difference(
        version="v1", at=9, found=LATER[9:57], wanted="2026-11-22. You are a helpful agent of "
    )


def test_where_the_end_differs() -> None:
    said = FROZEN.render({"shop": "Acme"})
    for text, found, wanted in ((f"{said} Hurry.", "refund. Hurry.", "refund."), (said[:-8], "a", "a refund.")):
        told = difference(SENT, text)
        assert told is not None
        assert (told.found, told.wanted) == (found, wanted)


def test_messages_of_other_prompts_are_nobodys_miss() -> None:
    """Each prompt is registered alone; the others are not near it, and a changed message of its own is."""
    maker = Maker(7)
    for family, template in TEMPLATES.items():
        nearest = Nearest([Sent(family, "v1", template)])
        for other in FAMILIES.keys() - {family}:
            assert nearest.of(maker.message(other)) is None
        changed = maker.message(family)
        changed = changed[:-1] if changed.endswith("\n") else f"Note. {changed}"
        assert nearest.of(changed) is not None, changed


def test_a_tool_is_compared_with_what_is_registered_of_it() -> None:
    sent = Sent("find", "v1", Template.parse("Finds flights between two airports."), "find")
    nearest = Nearest([sent, SENT])
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
