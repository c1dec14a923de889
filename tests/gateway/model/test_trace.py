"""W3C trace context (https://www.w3.org/TR/trace-context/ §3.2) and baggage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model import span
from penstock.gateway.model.span import LONGEST, entry, masked

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_valid() -> None:
    later = f"01-{TRACE}-{SPAN}-01-of-a-later-version"
    for header in (f"00-{TRACE}-{SPAN}-01", f" 00-{TRACE.upper()}-{SPAN}-00\t", later):
        assert span.parse(header) == (TRACE, SPAN)


NONE, NOWHERE = "0" * 32, "0" * 16
INVALID = [
    *["", TRACE, f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01-more"],
    *[f"00-{TRACE}-{SPAN}-01\n-x", f"ff-{TRACE}-{SPAN}-01", f" ff-{TRACE}-{SPAN}-01"],
    *[f"00-{NONE}-{SPAN}-01", f"00-{TRACE}-{NOWHERE}-01", f"00-{TRACE[:-1]}g-{SPAN}-01", f"00-{TRACE}0-{SPAN}-01"],
]


@pytest.mark.parametrize("header", INVALID)
def test_invalid(header: str) -> None:
    assert span.parse(header) is None


def test_derived_ids_are_stable_and_tell_calls_apart() -> None:
    made = span.trace_id("r", "a")
    assert span.trace_id("r", "a") == made
    assert span.parse(f"00-{made}-{span.span_id(made, 'r', 'a', 1)}-01") is not None
    ids = {span.span_id(span.trace_id(r, a), r, a, n) for r in "xy" for a in "xy" for n in (1, 2)}
    assert len(ids) == 8
    assert span.trace_id("ab", "c") != span.trace_id("a", "bc")


# -- baggage: what is read of it, what is passed over, and what is masked ----------------------------------------------


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("user.id=ada", "ada"),
        ("color=blue , user.id = ada;ttl=3, user.id=eve", "ada"),
        ("user.id=ada%20l%C3%B6", "ada lö"),
        ("user.id=a=b", "a=b"),
        ("user.id=" + "a" * LONGEST, "a" * LONGEST),
        ("user.id=" + "a" * (LONGEST + 1), None),
        ("user.id=", None),
        ("user.id=%20", None),
        ("user.id", None),
        ("user.id=%ff%fe", None),
        ("USER.ID=ada", None),
        ("other=user.id=ada", None),
        ("", None),
        (",,;;==,", None),
    ],
)
def test_what_a_header_says_of_a_name(header: str, value: str | None) -> None:
    assert entry(header, "user.id") == value


def test_only_the_named_members_are_masked() -> None:
    header = "color=blue, user.id = ada;of=eve,team=a"
    assert masked(header, {"user.id"}, "***") == "color=blue, user.id =***,team=a"
    assert masked(header, {"none"}, "***") == header


@given(st.text(alphabet="user.id=;, %4a*"))
def test_nothing_that_names_somebody_is_left(header: str) -> None:
    assert entry(masked(header, {"user.id"}, "***"), "user.id") in (None, "***")
