"""A search for a text: which spans to read, and the place of the text in their passages. Pure.

A search has a filter of spans, which may have two more fields: `role:` (who says it) and `part:` (its type). They apply
to the passage that contains the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from penstock.gateway.model.passage import Passage
from penstock.gateway.reading.filters.matchers import Matcher, TermError, WordMatcherFactory, forms
from penstock.gateway.reading.filters.query import Query, QueryError, Term, parse, parsed_terms, quote

_FIELDS: Final[dict[str, tuple[WordMatcherFactory, Callable[[Passage], str]]]] = {
    "role": (
        WordMatcherFactory("system", "developer", "user", "assistant", "tool", "client", "server"),
        lambda passage: passage.role,
    ),
    "part": (
        WordMatcherFactory(
            "text", "reasoning", "tool_call", "tool_call_response", "refusal", "error", "unknown", "body", "attribute"
        ),
        lambda passage: passage.kind,
    ),
}
"""(allowed values, the value of a passage)."""


class PassageMatch(NamedTuple):
    """The first place of a text in a passage."""

    begin: int
    end: int
    times: int
    """The number of places."""


@dataclass(frozen=True, slots=True)
class TextSearch:
    """A search for a text: its filter of spans, and the tests of their passages."""

    query: Query
    """The filter of spans that may contain the text."""
    _parts: tuple[str, ...]
    _words: bool
    _tests: tuple[Callable[[Passage], bool], ...]

    def find(self, passage: Passage) -> PassageMatch | None:
        """The place of the text; None where the passage lacks it, or has it only within other words, or has another
        role or part."""
        if not all(test(passage) for test in self._tests):
            return None
        folded = passage.text.casefold()
        found = sorted(place for part in self._parts for place in _places(folded, part, self._words))
        if not found:
            return None
        begin, end = found[0]
        text = passage.text
        return PassageMatch(_unfolded(text, folded, begin), _unfolded(text, folded, end - 1) + 1, len(found))


def search(text: str, filter: str, words: bool, now_ns: int) -> TextSearch:
    """Parses a search for a text. `words`: only whole words. Raises `QueryError` for a filter that cannot be
    understood."""
    tests: list[Callable[[Passage], bool]] = []
    rest: list[Term] = []
    for term in parsed_terms(filter):
        if term.field in _FIELDS:
            tests.append(_test(term))
        else:
            rest.append(term)
    query = parse(" ".join([f"text~{quote(text)}", *map(str, rest)]), "spans", now_ns)
    return TextSearch(query, forms(text), words, tuple(tests))


def _test(term: Term) -> Callable[[Passage], bool]:
    choice, value = _FIELDS[term.field]
    if term.operator not in (":", "="):
        raise QueryError(str(term), f"{term.field!r} does not know the operator {term.operator!r}", (":", "="))
    try:
        matchers: list[Matcher] = [choice("=", one, 0) for one in term.values]
    except TermError as e:
        raise QueryError(str(term), e.problem, e.allowed, e.nearest) from None
    return lambda passage: any(matcher(value(passage)) for matcher in matchers) != term.negated


def _places(text: str, part: str, words: bool) -> Iterator[tuple[int, int]]:
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        stands = not (words and (_within(text, at) or _within(text, end)))
        if stands:
            yield at, end
        at = text.find(part, end if stands else at + 1)


def _within(text: str, at: int) -> bool:
    """True if a word continues across this place."""
    return 0 < at < len(text) and _of_word(text[at - 1]) and _of_word(text[at])


def _of_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _unfolded(text: str, folded: str, at: int) -> int:
    """The index in the text itself of an index in the casefolded one, which may be longer: some letters become two."""
    if len(text) == len(folded):
        return at
    ends = accumulate(len(letter.casefold()) for letter in text)
    return next((number for number, end in enumerate(ends) if end > at), len(text))
