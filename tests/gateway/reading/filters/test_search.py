"""Where a text stands in what is said."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Passage
from penstock.gateway.reading.filter_fields import forms
from penstock.gateway.reading.filters import QueryError, search


def passage(text: str, role: str = "user", kind: str = "text") -> Passage:
    return Passage(False, role, kind, None, None, text)


def found(text: str, said: str, filter: str = "", words: bool = False) -> str | None:
    place = search(text, filter, words, 0).find(passage(said))
    return None if place is None else said[place.begin : place.end]


@pytest.mark.parametrize(
    ("text", "said", "where"),
    [
        ("to rome", "Fly To Rome", "To Rome"),
        ("STRASSE", "die Straße dort", "Straße"),
        ("ss", "die Straße", "ß"),
        ("e dort", "die Straße dort", "e dort"),
        ("ſ", "say", "s"),
        ('"hot"', 'say \\"hot\\" now', '\\"hot\\"'),
        ("ß", '"stra\\u00dfe"', "\\u00df"),
        ("rome", "Paris", None),
    ],
)
def test_it_stands_there_whatever_its_case_and_escaping(text: str, said: str, where: str | None) -> None:
    assert found(text, said) == where


@pytest.mark.parametrize(
    ("text", "said", "stands"),
    [
        ("art", "art", True),
        ("art", "state of the art.", True),
        ("art", "start", False),
        ("art", "artful start, art", True),
        ("to rome", "go to rome, now", True),
        ("to rome", "to romeo", False),
        ("$5", "for $5", True),
        ("a_b", "x a_b y", True),
        ("a", "a_b", False),
        ("no no", "casino no no", True),
    ],
)
def test_whole_words(text: str, said: str, stands: bool) -> None:
    assert (found(text, said, words=True) is not None) == stands


def test_it_counts() -> None:
    place = search("a", "", False, 0).find(passage("banana"))
    assert place is not None
    assert place.times == 3


@pytest.mark.parametrize(
    ("filter", "stands"),
    [
        ("role:user", True),
        ("role:tool", False),
        ("-role:tool,system part:text", True),
        ("-role:user", False),
        ("part:error", False),
        ("model:x status:ok", True),
    ],
)
def test_a_filter_may_be_about_the_passage(filter: str, stands: bool) -> None:
    assert (found("rome", "Rome", filter) is not None) == stands
    assert "role" not in str(search("rome", filter, False, 0).query)


@pytest.mark.parametrize(
    ("filter", "said"),
    [
        ("role:tol", "did you mean 'tool'"),
        ("role~t", "does not know the operator '~'"),
        ("colour:red", "unknown field"),
    ],
)
def test_a_wrong_filter_is_refused(filter: str, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        search("x", filter, False, 0)


letters = st.text(st.sampled_from('aAsSßſKkİi\u0307é \\"n_'), max_size=12)


@given(letters.filter(bool), letters)
@example("ss", "ß")
@example("i", "İ")
def test_it_stands_where_the_filter_says_so(text: str, said: str) -> None:
    place = search(text, "", False, 0).find(passage(said))
    assert (place is not None) == any(form in said.casefold() for form in forms(text))
    if place is not None:
        assert 0 <= place.begin < place.end <= len(said)
        assert any(form in said[place.begin : place.end].casefold() for form in forms(text))
