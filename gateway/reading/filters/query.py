"""The filter language of the API and the CLI: `status:failed model:qwen* latency>2s text~"timeout"`.

A filter is a list of terms, all of which must hold. A term is `field operator value`, negated by a leading `-` or
`not`; a value may list alternatives with commas (`status:error,cancelled`) and is quoted when it holds spaces, commas
or quotes. `:` compares text as a pattern (`*` any run, `?` any character, case ignored), `=` compares exactly, `~` asks
for a part of the text. A field that a span does not have matches nothing, so its negation matches.

The same text is parsed for one of two targets. For `spans` a term is about the span, its attempt or its rollout. For
`rollouts` the terms that can be about the rollout (status, mode, group, reward, worker ...) are about it and its
attempts, and one span of it must satisfy all the others together. `parse` refuses what it does not understand with a
`QueryError` that says what is allowed. `gateway.reading.filters.fields` is the table of the fields.

Pure: a parsed `Query` is a predicate, and states what it needs: a rollout alone, one with its attempts, or contents.
Contents are the most expensive part; they come from callables (`ContentReaders`), which are called last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Passage
from penstock.gateway.reading.filters import fields
from penstock.gateway.reading.filters.fields import FIELDS, Field, Matcher, Target, TermError, WordMatcherFactory, forms

__all__ = ["FIELDS", "Query", "QueryError", "Target", "Term", "parse", "quote"]

Test = Callable[[Rollout | None, Span | None], bool]
TextsTest = Callable[[Sequence[str]], bool]


class ContentReaders(NamedTuple):
    """Readers of the values of a span that heads lack."""

    tools: Callable[[Span], Sequence[str]]
    """Names of the tool that it ran, or of those that its answer asked for."""
    texts: Callable[[Span], Sequence[str]]
    """The texts that it adds to the conversation, passage by passage."""
    bodies: Callable[[Span], Sequence[str]]
    """Its request and response bodies as recorded, if they are there."""


ITEM = r'"(?:[^"\\]|\\.)*"|[^\s",]+'
VALUE = re.compile(rf"(?:{ITEM})(?:,(?:{ITEM}))*(?=\s|$)", re.DOTALL)
HEAD = re.compile(r"(?P<no>-\s*|not\s+)?(?P<field>[A-Za-z_][\w.-]*)(?P<op>!=|>=|<=|[:=<>~])")


MOST_TEXTS, MOST_ALTERNATIVES = 8, 32
"""Maximum numbers of terms on contents, and of texts in all of them: each text is searched for in everything."""


class QueryError(ValueError):
    """A filter that cannot be understood: the term, the problem, the nearest right name, and what is allowed."""

    def __init__(self, term: str, problem: str, allowed: Sequence[str] = (), nearest: str | None = None) -> None:
        self.term, self.problem, self.allowed, self.nearest = term, problem, tuple(allowed), nearest
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        rest = f"; allowed: {' '.join(self.allowed)}" if self.allowed else ""
        super().__init__(f"filter term {term!r}: {problem}{hint}{rest}")


@dataclass(frozen=True, slots=True)
class Term:
    """One condition as written; `str` gives text that parses to the same term."""

    field: str
    operator: str
    values: tuple[str, ...]
    negated: bool = False

    def __str__(self) -> str:
        return f"{'-' * self.negated}{self.field}{self.operator}{','.join(map(quote, self.values))}"


@dataclass(frozen=True, slots=True)
class Predicate:
    """The meaning of a term: some value of a field satisfies one of the matchers, or none does."""

    name: str
    """The name of the field."""
    field: Field
    matchers: tuple[Matcher, ...]
    wanted: bool
    """False if no value may satisfy any matcher."""
    of_rollout: bool
    """Whether it tests the rollout itself, because rollouts are listed."""


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed filter. An empty one matches everything."""

    terms: tuple[Term, ...]
    conditions: tuple[Predicate, ...]
    """The meanings of the terms."""
    on_rollout: tuple[Test, ...]
    """Tests of the rollout alone; filled when the target is rollouts."""
    on_span: tuple[Test, ...]
    on_tools: tuple[TextsTest, ...]
    on_texts: tuple[TextsTest, ...]
    on_bodies: tuple[TextsTest, ...]
    needs: frozenset[str]
    """The `needs` of its fields."""

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))

    @property
    def needs_bodies(self) -> bool:
        """True when `matches` reads bodies: then scan in smaller steps."""
        return bool(self.on_tools or self.on_texts or self.on_bodies)

    @property
    def needs_spans(self) -> bool:
        """True when the rollout alone does not decide."""
        return bool(self.on_span or self.needs_bodies)

    @property
    def needs_rollout(self) -> bool:
        """True when a span's rollout must be looked up to decide."""
        return bool(self.needs & {"rollout", "attempts"})

    @property
    def needs_attempts(self) -> bool:
        """True when a rollout must be given as a `RolloutSummary`."""
        return "attempts" in self.needs

    def matches_rollout(self, rollout: Rollout) -> bool:
        """True if the terms about the rollout itself hold."""
        return all(test(rollout, None) for test in self.on_rollout)

    def matches(self, rollout: Rollout | None, span: Span, contents: ContentReaders) -> bool:
        """True if the terms about a span hold; each of `contents` is called at most once and only if all else holds."""
        if not all(test(rollout, span) for test in self.on_span):
            return False
        if self.on_tools and not _all_hold(self.on_tools, contents.tools(span)):
            return False
        if self.on_texts and not _all_hold(self.on_texts, _folded(contents.texts(span))):
            return False
        return not self.on_bodies or _all_hold(self.on_bodies, _folded(contents.bodies(span)))


def _all_hold(tests: Sequence[TextsTest], texts: Sequence[str]) -> bool:
    return all(test(texts) for test in tests)


def _folded(texts: Sequence[str]) -> list[str]:
    return [text.casefold() for text in texts]


def quote(value: str) -> str:
    """A value in the form in which a filter must contain it."""
    plain = value and not re.search(r'[\s",=\\]', value)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def parse(text: str, target: Target = "spans", now_ns: int = 0) -> Query:
    """The query for a filter; raises `QueryError`. `now_ns`: the time that `started>2h` counts back from."""
    terms = tuple(parsed_terms(text))
    conditions: list[Predicate] = []
    groups: dict[str, list[Any]] = {"rollout": [], "span": [], "tools": [], "texts": [], "bodies": []}
    for term in terms:
        try:
            condition = _understood(term, target, now_ns)
        except TermError as e:
            raise QueryError(str(term), e.problem, e.allowed, e.nearest) from None
        conditions.append(condition)
        group, test = _compile(condition)
        groups[group].append(test)
    _check_texts(conditions)
    needs = frozenset(condition.field.needs for condition in conditions)
    on_rollout, on_span, on_tools, on_texts, on_bodies = map(tuple, groups.values())
    return Query(terms, tuple(conditions), on_rollout, on_span, on_tools, on_texts, on_bodies, needs)


def _check_texts(conditions: Sequence[Predicate]) -> None:
    said = [one for one in conditions if one.field.about in ("texts", "bodies")]
    if len(said) > MOST_TEXTS or sum(len(one.matchers) for one in said) > MOST_ALTERNATIVES:
        few = f"at most {MOST_TEXTS} such terms with {MOST_ALTERNATIVES} texts together"
        raise QueryError(said[-1].name, f"there are too many texts to look for: {few}")


def parsed_terms(text: str) -> Iterator[Term]:
    """The terms of a filter, as written; raises `QueryError`."""
    at = _skip(text, 0)
    while at < len(text):
        head = HEAD.match(text, at)
        if head is None:
            raise QueryError(_word(text, at), "is not `field:value`", ("model:qwen*", "latency>2s", 'text~"two words"'))
        value = VALUE.match(text, head.end())
        if value is None:
            raise QueryError(_word(text, at), "its value is missing, or a quote or comma in it is misplaced")
        yield Term(head["field"], head["op"], tuple(_items(value[0])), head["no"] is not None)
        at = _skip(text, value.end())


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _word(text: str, at: int) -> str:
    return text[at:].split(maxsplit=1)[0]


def _items(value: str) -> Iterator[str]:
    for item in re.findall(ITEM, value, re.DOTALL):
        yield re.sub(r"\\(.)", r"\1", item[1:-1], flags=re.DOTALL) if item.startswith('"') else item


def _understood(term: Term, target: Target, now_ns: int) -> Predicate:
    field = fields.field(term.field, target)
    if term.operator not in field.operators:
        raise TermError(f"{term.field!r} does not know the operator {term.operator!r}", field.operators)
    operator = "=" if term.operator == "!=" else term.operator
    matchers = tuple(field.matcher(operator, value, now_ns) for value in term.values)
    wanted = term.negated == (term.operator == "!=")
    return Predicate(term.field, field, matchers, wanted, field.about == "both" and target == "rollouts")


def _compile(condition: Predicate) -> tuple[str, Test | TextsTest]:
    """The group of a condition, and its test."""
    field, matchers, wanted = condition.field, condition.matchers, condition.wanted
    if field.about in ("tools", "texts", "bodies"):
        return field.about, lambda texts: any(m(text) for text in texts for m in matchers) == wanted
    return ("rollout" if condition.of_rollout else "span"), _test(field, matchers, wanted)


def _test(field: Field, matchers: Sequence[Matcher], wanted: bool) -> Test:
    read = field.read
    return lambda rollout, span: any(m(v) for v in read(rollout, span) for m in matchers) == wanted


# A search for a text: which spans to read, and the place of the text in their passages. Pure.
#
# A search has a filter of spans, which may have two more fields: `role:` (who says it) and `part:` (its type). They
# apply to the passage that contains the text.

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
            tests.append(_search_test(term))
        else:
            rest.append(term)
    query = parse(" ".join([f"text~{quote(text)}", *map(str, rest)]), "spans", now_ns)
    return TextSearch(query, forms(text), words, tuple(tests))


def _search_test(term: Term) -> Callable[[Passage], bool]:
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
