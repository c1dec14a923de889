"""A filter as SQL over the columns of an index (`followers.index`). Pure.

The tables are `spans s`, `rollouts r`, `attempts a` and `inputs i`; `number` is that of the rollout. The SQL of a
condition holds for every row that the condition itself matches; where columns do not decide (bodies) it holds for more,
and the caller tests the rows themselves. Conditions on texts join with tables that the caller has filled (`HITS`).
Texts are compared in Python, as in a scan: `words` returns the distinct values of a column, and SQL selects those that
a matcher takes. So patterns, case and foreign letters mean the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from penstock.gateway.model.base import TOOLS
from penstock.gateway.model.facts import SPAN_FACTS
from penstock.gateway.reading.filters.fields import Matcher, NumberMatcher, SubstringMatcher, Target, WordMatcher
from penstock.gateway.reading.filters.query import Predicate, Query

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


def needles(query: Query) -> list[tuple[str, ...]]:
    """For each condition on texts its parts, casefolded; a text must contain one of them."""
    return [_flat_parts(one) for one in _on_texts(query)]


def _flat_parts(one: Predicate) -> tuple[str, ...]:
    return tuple(_flat(matcher.parts for matcher in one.matchers if isinstance(matcher, SubstringMatcher)))


def _on_texts(query: Query) -> list[Predicate]:
    return [one for one in query.conditions if one.field.about == "texts"]


def _hit(at: int, wanted: bool) -> SqlFragment:
    return SqlFragment(
        f"(s.cursor {'' if wanted else 'not '}in (select cursor from {HITS.format(at)}) or s.status = 'open')"
    )


def _condition(one: Predicate, words: Words, row: str) -> SqlFragment:
    """The SQL of a condition. `row`: the table of the rows, s or r."""
    if one.field.about == "bodies":
        return TRUE
    found = _wrap("({})", _any(_asked(one, matcher, words, row) for matcher in one.matchers))
    return _wrap("{} is true" if one.wanted else "{} is not true", found)


def _asked(one: Predicate, matcher: Matcher, words: Words, row: str) -> SqlFragment:
    """SQL that holds if some value of the field satisfies the matcher."""
    if one.name == "input":
        assert isinstance(matcher, SubstringMatcher)
        parts = _any(SqlFragment("contains(i.folded, ?)", (part,)) for part in matcher.parts)
        return _wrap(f"{row}.number in (select i.number from inputs i where {{}})", parts)
    if one.name == "reward" and row == "s":
        given = _compared("s", "s.reward", matcher, words)
        earned = _wrap(_OF_ATTEMPT, _compared("a", "a.reward", matcher, words))
        return _any([_wrap("s.kind = 'reward' and {}", given), _wrap("s.kind <> 'reward' and {}", earned)])
    owner, expressions = _SPAN[one.name] if row == "s" and one.name in _SPAN else _of_others(one.name)
    found = _any(_compared(owner, expression, matcher, words) for expression in expressions)
    return _wrap(_OWNED[row, owner], found)


def _of_others(name: str) -> FieldColumns:
    """The values of a field of the rollout or its attempts."""
    if name.startswith("metadata."):
        key = name.removeprefix("metadata.")
        assert _KEY.fullmatch(key), key
        return FieldColumns("r", (f"r.metadata['{key}']",))
    return _OTHERS[name]


def _compared(owner: str, expression: str, matcher: Matcher, words: Words) -> SqlFragment:
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
