"""`cancel`, `requeue` and `doctor` take ids or a filter as their arguments: which of both is never in doubt."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.client.console import OPERATOR, CommandError, ids_or_filter
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.reading.filter_fields import FIELDS
from penstock.gateway.reading.filters import Term, parse

IDS = st.from_regex(ID_PATTERN, fullmatch=True)
FIELD = st.sampled_from(sorted(name for name, field in FIELDS["rollouts"].items() if ":" in field.operators))
TERMS = st.builds(
    Term,
    st.just("group") | st.just("model"),
    st.sampled_from([":", "=", "~"]),
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)),
    st.booleans(),
)


# What begins like an option is taken for a misspelt one; `rollout:=--x` is the term for such an id.
@given(st.lists(IDS.filter(lambda id: not id.startswith("--")), min_size=1, max_size=5))
def test_ids_are_ids(words: list[str]) -> None:
    assert ids_or_filter(words) == (list(dict.fromkeys(words)), "")


@given(IDS)
def test_no_id_has_an_operator(id: str) -> None:
    assert OPERATOR.search(id) is None


@given(st.lists(TERMS, min_size=1, max_size=4), st.booleans())
def test_terms_are_a_filter(terms: list[Term], one_word: bool) -> None:
    """However many words the shell makes of it."""
    words = [str(term) for term in terms]
    ids, filter = ids_or_filter([" ".join(words)] if one_word else words)
    assert ids == []
    assert parse(filter).terms == tuple(terms)


def test_every_field_makes_a_term() -> None:
    terms = [f"{name}{operator}1" for name, field in FIELDS["rollouts"].items() for operator in field.operators]
    assert [term for term in terms if ids_or_filter([term]) != ([], term)] == []


@pytest.mark.parametrize(
    ("words", "ids", "filter"),
    [
        (["not", "status:failed"], [], "not status:failed"),
        (["mode:train", "not", "status:failed"], [], "mode:train not status:failed"),
        (["not status:failed"], [], "not status:failed"),
        (["-status:failed"], [], "-status:failed"),
        (["not"], ["not"], ""),
        (["r1", "not"], ["r1", "not"], ""),
        (["r1", "r1"], ["r1"], ""),
    ],
)
def test_a_not_belongs_to_its_term(words: list[str], ids: list[str], filter: str) -> None:
    assert ids_or_filter(words) == (ids, filter)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "say which rollouts: by their ids, or by a filter"),
        (["r1", "status:failed"], "give ids or a filter, not both: 'r1' is an id, 'status:failed' a term; rollout:r1"),
        (["not", "r1", "status:failed"], "not both: 'not' is an id"),
        (["reward", ">", "0.5"], "not both: 'reward' is an id"),
        ([""], "'' is neither the id of a rollout nor a term of a filter such as group:q1"),
        (["a b"], "'a b' is neither"),
        (["r1", "r2/a1"], "'r2/a1' is neither"),
        (["--filter", "status:failed"], "unknown option '--filter'"),
    ],
)
def test_what_is_in_doubt_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(CommandError, match=re.escape(problem)) as raised:
        ids_or_filter(words)
    assert raised.value.code == 2
