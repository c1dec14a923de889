"""The `baggage` header: what is read of it, what is passed over, and what is masked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.baggage import LONGEST, entry, masked


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
