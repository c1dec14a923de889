"""The filter language of the API and the CLI: `status:failed model:qwen* latency>2s text~"timeout"`.

A filter is a list of terms, all of which must hold. A term is `field operator value`, negated by a leading `-` or
`not`; a value may list alternatives with commas (`status:error,cancelled`) and is quoted when it holds spaces, commas
or quotes. `:` compares text as a pattern (`*` any run, `?` any character, case ignored), `=` compares exactly, `~` asks
for a part of the text. In long texts (`text`, `raw`, `input`) a pattern may match anywhere, and `=` is not known. A
field that a span does not have matches nothing, so its negation matches; `reward:none` finds a number that is missing.

The same text is parsed for one of two targets. For `spans` a term is about the span, its attempt or its rollout. For
`rollouts` the terms that can be about the rollout (status, mode, group, reward, worker ...) are about it and its
attempts, and one span of it must satisfy all the others together. `parse` refuses what it does not understand with a
`QueryError` that says what is allowed. `gateway.reading.filter_fields` is the table of the fields.

Pure: a parsed `Query` is a predicate, and states what it needs: a rollout alone, one with its attempts, or contents.
Contents are the most expensive part; they come from callables (`ContentReaders`), which are called last. `search` finds
a text in passages, `where` is a filter as SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

from penstock.gateway.model.base import TOOLS
from penstock.gateway.model.facts import SPAN_FACTS
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Passage
from penstock.gateway.reading import filter_fields
from penstock.gateway.reading.filter_fields import (
    Field,
    Matcher,
    MissingMatcher,
    NumberMatcher,
    SubstringMatcher,
    Target,
    TermError,
    TextPart,
    WordMatcher,
    WordMatcherFactory,
    forms,
)

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
    on_cost: tuple[Test, ...]
    """Those of its cost, which every call of it must be read for."""
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
    groups: dict[str, list[Any]] = {"rollout": [], "cost": [], "span": [], "tools": [], "texts": [], "bodies": []}
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
    on_rollout, on_cost, on_span, on_tools, on_texts, on_bodies = map(tuple, groups.values())
    return Query(terms, tuple(conditions), on_rollout, on_cost, on_span, on_tools, on_texts, on_bodies, needs)


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
    field = filter_fields.field(term.field, target)
    if term.operator not in field.operators:
        raise TermError(f"{term.field!r} does not know the operator {term.operator!r}", field.operators)
    matchers = tuple(filter_fields.matcher(target, field, term.operator, value, now_ns) for value in term.values)
    wanted = term.negated == (term.operator == "!=")
    return Predicate(term.field, field, matchers, wanted, field.about == "both" and target == "rollouts")


def _compile(condition: Predicate) -> tuple[str, Test | TextsTest]:
    """The group of a condition, and its test."""
    field, matchers, wanted = condition.field, condition.matchers, condition.wanted
    if field.about in ("tools", "texts", "bodies"):
        return field.about, lambda texts: any(m(text) for text in texts for m in matchers) == wanted
    of_rollout = "cost" if field.needs == "cost" else "rollout"
    return (of_rollout if condition.of_rollout else "span"), _test(field, matchers, wanted)


def _test(field: Field, matchers: Sequence[Matcher], wanted: bool) -> Test:
    read, missing = field.read, any(isinstance(m, MissingMatcher) for m in matchers)

    def test(rollout: Rollout | None, span: Span | None) -> bool:
        values = read(rollout, span)
        return (any(m(v) for v in values for m in matchers) or (missing and not values)) == wanted

    return test


# -- a search for a text: which spans to read, and the place of the text in their passages ----------------------------
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


# -- a filter as SQL over the columns of an index (`followers.index`) -------------------------------------------------
#
# The tables are `spans s`, `rollouts r`, `attempts a` and `inputs i`; `number` is that of the rollout. The SQL of a
# condition holds for every row that the condition itself matches; where columns do not decide (bodies, the cost of a
# rollout) it holds for more, and the caller tests the rows themselves. Conditions on texts join with tables that the
# caller has filled (`HITS`). Texts are compared in Python, as in a scan: `words` returns the distinct values of a
# column, and SQL selects those that a matcher takes. So patterns, case and foreign letters mean the same in both.

HITS: Final = "hits_{}"
"""The table of the cursors of spans that have a text which satisfies a condition, by the condition's index among those
on texts. It has no running spans, so all of these match."""
Words = Callable[[str, str], Iterable[str]]
"""Returns the distinct values of (table, expression), without NULL."""
FEW: Final = 100
"""Maximum number of values that are written in the text of a query; more are passed as a list."""
_TABLES: Final = {"s": "spans s", "r": "rollouts r", "a": "attempts a"}
_KEY: Final = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class SqlFragment:
    """A piece of SQL and the values of its placeholders."""

    text: str
    values: tuple[Any, ...] = ()


class FieldColumns(NamedTuple):
    """The SQL expressions of a field's values."""

    owner: Literal["s", "r", "a"]
    """The table of the values: spans, rollouts or attempts."""
    expressions: tuple[str, ...]
    """Expressions that each give one value, or NULL."""


class WhereClause(NamedTuple):
    """The SQL conditions of a row."""

    row: SqlFragment
    """Condition on `spans s`, or on `rollouts r`."""
    within: SqlFragment | None = None
    """Condition on `spans s` that one span of the rollout must satisfy besides; only where rollouts are listed."""


TRUE: Final = SqlFragment("true")


def where(query: Query, target: Target, words: Words) -> WhereClause:
    """The SQL of a filter of one of the lists."""
    said = [_hit(at, one.wanted) for at, one in enumerate(_on_texts(query))]
    spans = [
        one for one in query.conditions if (target == "spans" or not one.of_rollout) and one.field.about != "texts"
    ]
    of_spans = [*(_condition(one, words, "s") for one in spans), *said]
    if target == "spans":
        return WhereClause(_all(of_spans))
    own = [_condition(one, words, "r") for one in query.conditions if one.of_rollout]
    return WhereClause(_all(own), _all(of_spans) if of_spans else None)


def needles(query: Query) -> list[tuple[TextPart, ...]]:
    """For each condition on texts its parts, casefolded; a text must contain one of them."""
    return [_flat_parts(one) for one in _on_texts(query)]


def _flat_parts(one: Predicate) -> tuple[TextPart, ...]:
    return tuple(_flat(matcher.parts for matcher in one.matchers if isinstance(matcher, SubstringMatcher)))


def _on_texts(query: Query) -> list[Predicate]:
    return [one for one in query.conditions if one.field.about == "texts"]


def _hit(at: int, wanted: bool) -> SqlFragment:
    return SqlFragment(
        f"(s.cursor {'' if wanted else 'not '}in (select cursor from {HITS.format(at)}) or s.status = 'open')"
    )


def _condition(one: Predicate, words: Words, row: str) -> SqlFragment:
    """The SQL of a condition. `row`: the table of the rows, s or r."""
    if one.field.about == "bodies" or (one.field.needs == "cost" and row == "r"):
        return TRUE
    found = _wrap("({})", _any(_asked(one, matcher, words, row) for matcher in one.matchers))
    return _wrap("{} is true" if one.wanted else "{} is not true", found)


def _asked(one: Predicate, matcher: Matcher, words: Words, row: str) -> SqlFragment:
    """SQL that holds if some value of the field satisfies the matcher, or if it has none and that is asked for."""
    found = _values(one, matcher, words, row)
    return _wrap("({}) is not true", found) if isinstance(matcher, MissingMatcher) else found


def _values(one: Predicate, matcher: Matcher, words: Words, row: str) -> SqlFragment:
    """SQL that holds if some value of the field satisfies the matcher; `MissingMatcher`: if there is one."""
    if one.name == "input":
        assert isinstance(matcher, SubstringMatcher)
        parts = _any(_part_of_input(part) for part in matcher.parts)
        return _wrap(f"{row}.number in (select i.number from inputs i where {{}})", parts)
    if one.name == "reward" and row == "s":
        given = _compared("s", "s.reward", matcher, words)
        earned = _wrap(_OF_ATTEMPT, _compared("a", "a.reward", matcher, words))
        return _any([_wrap("s.kind = 'reward' and {}", given), _wrap("s.kind <> 'reward' and {}", earned)])
    owner, expressions = _SPAN[one.name] if row == "s" and one.name in _SPAN else _of_others(one.name)
    found = _any(_compared(owner, expression, matcher, words) for expression in expressions)
    return _wrap(_OWNED[row, owner], found)


def _part_of_input(part: TextPart) -> SqlFragment:
    if isinstance(part, str):
        return SqlFragment("contains(i.folded, ?)", (part,))
    return SqlFragment("regexp_matches(i.folded, ?, 's')", (part.expression,))


def _of_others(name: str) -> FieldColumns:
    """The values of a field of the rollout or its attempts."""
    if name.startswith("metadata."):
        key = name.removeprefix("metadata.")
        assert _KEY.fullmatch(key), key
        return FieldColumns("r", (f"r.metadata['{key}']",))
    return _OTHERS[name]


def _compared(owner: str, expression: str, matcher: Matcher, words: Words) -> SqlFragment:
    if isinstance(matcher, MissingMatcher):
        return SqlFragment(f"{expression} is not null")
    if isinstance(matcher, NumberMatcher):
        return SqlFragment(f"{expression} {matcher.operator} ?", (matcher.limit,))
    if isinstance(matcher, WordMatcher):
        return _among(expression, matcher.words)
    source = f"unnest({expression})" if expression in _LISTS else expression
    return _among(expression, [word for word in words(_TABLES[owner], source) if matcher(word)])


def _among(expression: str, values: Sequence[str]) -> SqlFragment:
    if not values:
        return SqlFragment("false")
    if expression in _LISTS:
        return SqlFragment(f"list_has_any({expression}, cast(? as varchar[]))", (list(values),))
    if len(values) <= FEW:
        return SqlFragment(f"{expression} in ({', '.join('?' * len(values))})", tuple(values))
    return SqlFragment(f"{expression} in (select unnest(cast(? as varchar[])))", (list(values),))


def _all(parts: Iterable[SqlFragment]) -> SqlFragment:
    return _joined(" and ", parts, "true")


def _any(parts: Iterable[SqlFragment]) -> SqlFragment:
    return _joined(" or ", parts, "false")


def _joined(word: str, parts: Iterable[SqlFragment], none: str) -> SqlFragment:
    found = list(parts)
    return SqlFragment(word.join(f"({one.text})" for one in found) or none, tuple(_flat(one.values for one in found)))


def _flat(values: Iterable[Sequence[Any]]) -> Iterator[Any]:
    for some in values:
        yield from some


def _wrap(around: str, inner: SqlFragment) -> SqlFragment:
    return SqlFragment(around.format(inner.text), inner.values)


def _flag(expression: str) -> str:
    return f"(case when {expression} then 'true' else 'false' end)"


_LISTS: Final = tuple(f"s.{fact.index_column}" for fact in SPAN_FACTS if fact.type == "varchar[]")
_TOKENS: Final = "(case when s.input_tokens is null and s.output_tokens is null then null else "
_OF_ATTEMPT: Final = "(s.number, s.attempt) in (select (a.number, a.attempt) from attempts a where {})"
_OWNED: Final = {
    ("s", "s"): "{}",
    ("r", "r"): "{}",
    ("s", "r"): "s.number in (select r.number from rollouts r where {})",
    ("s", "a"): _OF_ATTEMPT,
    ("r", "a"): "r.number in (select a.number from attempts a where {})",
}
"""(table of the row, table of the value) -> SQL that joins the two."""
_SPAN: Final[dict[str, FieldColumns]] = {
    **{
        fact.filter.name or fact.name: FieldColumns(
            "s", (_flag(f"s.{fact.index_column}") if fact.type == "boolean" else f"s.{fact.index_column}",)
        )
        for fact in SPAN_FACTS
        if fact.filter is not None
    },
    "status": FieldColumns("s", ("s.status",)),
    "rollout": FieldColumns("s", ("s.rollout",)),
    "ambiguous": FieldColumns("s", (_flag("s.ambiguous"),)),
    "cost": FieldColumns("s", ("s.cost",)),
    "started": FieldColumns("s", ("s.start_ns",)),
    "since": FieldColumns("s", ("s.start_ns",)),
    "model": FieldColumns("s", ("nullif(s.model, '')", "nullif(s.model_served, '')")),
    "source": FieldColumns("s", ("s.reward_source",)),
    "server": FieldColumns("s", (f"(case when s.kind in ({', '.join(map(repr, TOOLS))}) then s.upstream end)",)),
    "tool": FieldColumns("s", ("s.tools",)),
    "tokens": FieldColumns("s", (f"{_TOKENS}coalesce(s.input_tokens, 0) + coalesce(s.output_tokens, 0) end)",)),
    "bytes": FieldColumns("s", ("s.request_bytes + s.response_bytes",)),
}  # fmt: skip
"""The values of a span's own fields."""
_OTHERS: Final[dict[str, FieldColumns]] = {
    **{
        name: FieldColumns("r", (f'r."{name}"',))
        for name in ("rollout", "mode", "origin", "group", "priority", "tries", "reward")
    },
    "status": FieldColumns("r", ("r.status", "(case when r.claimed then 'claimed' end)")),
    "ambiguous": FieldColumns("r", (_flag("r.ambiguous"),)),
    "started": FieldColumns("r", ("r.created_ns",)),
    "since": FieldColumns("r", ("r.created_ns",)),
    "worker": FieldColumns("a", ("a.worker",)),
    "attempt_status": FieldColumns("a", ("a.status",)),
}
"""The values of fields of a rollout or its attempts."""
