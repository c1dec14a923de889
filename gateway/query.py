"""The filter language of the API and the CLI: `status:failed model:qwen* latency>2s text~"timeout"`.

A filter is a list of terms, all of which must hold. A term is `field operator value`, negated by a leading `-` or
`not`; a value may list alternatives with commas (`status:error,cancelled`) and is quoted when it holds spaces, commas
or quotes. `:` compares text as a pattern (`*` any run, `?` any character, case ignored), `=` compares exactly, `~` asks
for a part of the text. A field that a span does not have matches nothing, so its negation matches.

The same text is parsed for one of two targets. For `spans` a term speaks of the span or of its rollout. For `rollouts`
the terms rollout, status, mode, origin, started and metadata speak of the rollout, and one call of it must satisfy all
the others together. `parse` refuses what it does not understand with a `QueryError` that says what is allowed.

Pure: a parsed `Query` is a predicate. Bodies, the only expensive part, come from a callable, and are asked for last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import translate
from typing import Any, Literal, cast, get_args

from gateway.model import Kind, Mode, Origin, Rollout, RolloutStatus, Span, SpanStatus

Target = Literal["spans", "rollouts"]
Bodies = Callable[[Span], str]
"""Gives the searchable text of a span's request and response."""
Matcher = Callable[[Any], bool]
"""Says of one value of a field whether it is asked for."""
Test = Callable[[Rollout | None, Span | None], bool]
TextTest = Callable[[str], bool]

UNITS = {"us": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9, "d": 86400e9}
FAILED = (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
ORDER = (">", ">=", "<", "<=")
TEXT, NUMBER, CHOICE = (":", "=", "!=", "~"), (":", "=", "!=", *ORDER), (":", "=", "!=")

ITEM = r'"(?:[^"\\]|\\.)*"|[^\s",]+'
VALUE = re.compile(rf"(?:{ITEM})(?:,(?:{ITEM}))*(?=\s|$)", re.DOTALL)
HEAD = re.compile(r"(?P<no>-\s*|not\s+)?(?P<field>[A-Za-z_][\w.-]*)(?P<op>!=|>=|<=|[:=<>~])")


class QueryError(ValueError):
    """A filter that cannot be understood: the term, what is wrong with it, the nearest right name, what is allowed."""

    def __init__(self, term: str, problem: str, allowed: Sequence[str] = (), nearest: str | None = None) -> None:
        self.term, self.problem, self.allowed, self.nearest = term, problem, tuple(allowed), nearest
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        rest = f"; allowed: {' '.join(self.allowed)}" if self.allowed else ""
        super().__init__(f"filter term {term!r}: {problem}{hint}{rest}")


class Refused(ValueError):
    """Raised where the term is not known; `parse` adds it."""

    def __init__(self, problem: str, allowed: Sequence[str] = (), nearest: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.allowed, self.nearest = problem, allowed, nearest


@dataclass(frozen=True, slots=True)
class Field:
    """A name that a term may use."""

    help: str
    """What it is, for the documentation."""
    operators: tuple[str, ...]
    read: Callable[[Rollout | None, Span | None], Sequence[Any]]
    """Its values, none where there is nothing to compare."""
    matcher: Callable[[str, str, int], Matcher]
    """(operator, value, now in ns) -> matcher; raises Refused."""
    about: Literal["span", "both", "bodies"] = "span"
    """`both`: when rollouts are listed, it speaks of the rollout itself."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition, as it was written; `str` gives text that parses to the same term."""

    field: str
    operator: str
    values: tuple[str, ...]
    negated: bool = False

    def __str__(self) -> str:
        return f"{'-' * self.negated}{self.field}{self.operator}{','.join(map(quote, self.values))}"


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed filter. An empty one matches everything."""

    terms: tuple[Term, ...]
    on_rollout: tuple[Test, ...]
    """Tests of the rollout alone; filled when the target is rollouts."""
    on_span: tuple[Test, ...]
    on_bodies: tuple[TextTest, ...]
    target: Target

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))

    @property
    def needs_bodies(self) -> bool:
        """True when `matches` reads bodies: worth scanning in smaller steps."""
        return bool(self.on_bodies)

    @property
    def needs_spans(self) -> bool:
        """True when the rollout alone does not decide."""
        return bool(self.on_span or self.on_bodies)

    @property
    def needs_rollout(self) -> bool:
        """True when a span's rollout must be looked up to decide."""
        return any(term.field.partition(".")[0] in ("mode", "origin", "metadata") for term in self.terms)

    def matches_rollout(self, rollout: Rollout) -> bool:
        """The terms that speak of the rollout itself."""
        return all(test(rollout, None) for test in self.on_rollout)

    def matches(self, rollout: Rollout | None, span: Span, bodies: Bodies) -> bool:
        """The terms that speak of a span; `bodies` is called at most once and only if all else holds."""
        if not all(test(rollout, span) for test in self.on_span):
            return False
        return not self.on_bodies or self._matches_text(bodies(span))

    def _matches_text(self, text: str) -> bool:
        folded = text.casefold()
        return all(test(folded) for test in self.on_bodies)


def quote(value: str) -> str:
    """A value as it must be written in a filter."""
    plain = value and not re.search(r'[\s",=\\]', value)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def parse(text: str, target: Target = "spans", now_ns: int = 0) -> Query:
    """Understand a filter. `now_ns` is what `started>2h` counts back from."""
    terms = tuple(_terms(text))
    groups: dict[str, list[Any]] = {"rollout": [], "span": [], "bodies": []}
    for term in terms:
        try:
            group, test = _compile(term, target, now_ns)
        except Refused as e:
            raise QueryError(str(term), e.problem, e.allowed, e.nearest) from None
        groups[group].append(test)
    return Query(terms, tuple(groups["rollout"]), tuple(groups["span"]), tuple(groups["bodies"]), target)


def _terms(text: str) -> Iterator[Term]:
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


def _compile(term: Term, target: Target, now_ns: int) -> tuple[str, Test | TextTest]:
    """The test that a term stands for and the group it belongs to."""
    field = _field(term.field, target)
    if term.operator not in field.operators:
        raise Refused(f"{term.field!r} does not know the operator {term.operator!r}", field.operators)
    operator = "=" if term.operator == "!=" else term.operator
    matchers = [field.matcher(operator, value, now_ns) for value in term.values]
    wanted = term.negated == (term.operator == "!=")
    if field.about == "bodies":
        return "bodies", _test_text(matchers, wanted)
    return ("rollout" if field.about == "both" and target == "rollouts" else "span"), _test(field, matchers, wanted)


def _test(field: Field, matchers: list[Matcher], wanted: bool) -> Test:
    read = field.read
    return lambda rollout, span: any(m(v) for v in read(rollout, span) for m in matchers) == wanted


def _test_text(matchers: list[Matcher], wanted: bool) -> TextTest:
    return lambda text: any(m(text) for m in matchers) == wanted


def _field(name: str, target: Target) -> Field:
    if name.startswith("metadata.") and len(name) > len("metadata."):
        return _metadata(name.removeprefix("metadata."))
    fields = FIELDS[target]
    if name in fields:
        return fields[name]
    near = get_close_matches(name, fields, n=1)
    raise Refused(f"unknown field {name!r}", (*fields, "metadata.KEY"), near[0] if near else None)


# --- matchers: (operator, value, now) -> predicate over one value of the field ---


def _text(operator: str, value: str, now_ns: int) -> Matcher:
    if operator == "=":
        return lambda v: v == value
    if operator == "~":
        part = value.casefold()
        return lambda v: part in v.casefold()
    pattern = re.compile(translate(value.replace("[", "[[]")), re.IGNORECASE)
    return lambda v: pattern.match(v) is not None


def _body_text(operator: str, value: str, now_ns: int) -> Matcher:
    """Bodies are JSON: the text may stand there as it is, or escaped in either of the two usual ways."""
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    parts = [form.casefold() for form in forms]
    return lambda text: any(part in text for part in parts)


def _number(operator: str, value: str, now_ns: int) -> Matcher:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise Refused(f"{value!r} is not a whole number", ("0", "1", "2", "..."))
    return _compare(operator, int(value))


def _latency(operator: str, value: str, now_ns: int) -> Matcher:
    ns = _span_of_time(value)
    if ns is None:
        raise Refused(f"{value!r} is not a number with a unit, such as 250ms", tuple(UNITS))
    return _compare(operator, ns)


def _started(operator: str, value: str, now_ns: int) -> Matcher:
    ago = _span_of_time(value)
    return _compare(operator, now_ns - ago if ago is not None else _instant(value))


def _span_of_time(value: str) -> int | None:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s|m|h|d)", value)
    return round(float(match[1]) * UNITS[match[2]]) if match else None


def _instant(value: str) -> int:
    try:
        when = datetime.fromisoformat(value)
        seconds = when.timestamp() if when.tzinfo else when.replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        forms = ("2026-08-01", "2026-08-01T12:30:00Z", "2h", "30m")
        raise Refused(f"{value!r} is neither an ISO time (UTC unless it says) nor a time ago", forms) from None
    return int(seconds * 1e9)


def _compare(operator: str, limit: int) -> Matcher:
    comparisons: dict[str, Matcher] = {
        ">": lambda v: v > limit,
        ">=": lambda v: v >= limit,
        "<": lambda v: v < limit,
        "<=": lambda v: v <= limit,
    }
    return comparisons.get(operator, lambda v: v == limit)


def _choice(*allowed: str, **groups: Sequence[str]) -> Callable[[str, str, int], Matcher]:
    """One of a few words; a group is a word that stands for several of them."""

    def matcher(operator: str, value: str, now_ns: int) -> Matcher:
        words = (*map(str, allowed), *(group for group in groups if group not in allowed))
        if value not in words:
            near = get_close_matches(value, words, n=1)
            raise Refused(f"{value!r} is not one of its values", words, near[0] if near else None)
        wanted = groups.get(value, (value,))
        return lambda v: v in wanted

    return matcher


# --- the table ---


def _of_span(read: Callable[[Span], Any]) -> Callable[[Rollout | None, Span | None], Sequence[Any]]:
    """Reader of a value of the span that may be None."""

    def values(rollout: Rollout | None, span: Span | None) -> Sequence[Any]:
        value = None if span is None else read(span)
        return () if value is None else (value,)

    return values


def _of_rollout(read: Callable[[Rollout], Any]) -> Callable[[Rollout | None, Span | None], Sequence[Any]]:
    def values(rollout: Rollout | None, span: Span | None) -> Sequence[Any]:
        value = None if rollout is None else read(rollout)
        return () if value is None else (value,)

    return values


def _rollout_id(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    return (span.rollout,) if span else (rollout.id,) if rollout else ()


def _started_ns(rollout: Rollout | None, span: Span | None) -> Sequence[int]:
    return (span.start_ns,) if span else (rollout.created_ns,) if rollout else ()


def _models(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    return [name for name in (span.model, span.model_served) if name] if span else ()


def _tokens(span: Span) -> int | None:
    if span.usage is None:
        return None
    counts = [n for n in (span.usage.input_tokens, span.usage.output_tokens) if n is not None]
    return sum(counts) if counts else None


def _metadata(key: str) -> Field:
    def values(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
        found = None if rollout is None else _lookup(rollout.metadata or {}, key)
        return () if found is None else (found if isinstance(found, str) else json.dumps(found),)

    return Field("a key of the rollout's metadata", TEXT, values, _text, "both")


def _lookup(metadata: dict[str, Any], key: str) -> Any:
    """The key itself, else a dotted path into nested objects."""
    if key in metadata:
        return metadata[key]
    head, _, rest = key.partition(".")
    inner = metadata.get(head)
    return _lookup(cast(dict[str, Any], inner), rest) if rest and isinstance(inner, dict) else None


_BOTH: dict[str, Field] = {
    "rollout": Field("its rollout", TEXT, _rollout_id, _text, "both"),
    "mode": Field("what the rollout is for", CHOICE, _of_rollout(lambda r: r.mode), _choice(*get_args(Mode)), "both"),
    "origin": Field(
        "how the rollout came to be", CHOICE, _of_rollout(lambda r: r.origin), _choice(*get_args(Origin)), "both"
    ),
    "started": Field("when it began: an ISO time, or how long ago (2h)", ORDER, _started_ns, _started, "both"),
    "attempt": Field("its attempt", TEXT, _of_span(lambda s: s.attempt), _text),
    "model": Field("model asked for or served", TEXT, _models, _text),
    "dialect": Field("wire format", TEXT, _of_span(lambda s: s.dialect), _text),
    "kind": Field("what happened", CHOICE, _of_span(lambda s: s.kind), _choice(*get_args(Kind))),
    "agent": Field("name of the agent", TEXT, _of_span(lambda s: s.agent), _text),
    "upstream": Field("name of the upstream", TEXT, _of_span(lambda s: s.upstream), _text),
    "error": Field("reason of a failure, such as http_429", TEXT, _of_span(lambda s: s.error), _text),
    "finish": Field("finish reason", TEXT, _of_span(lambda s: s.finish), _text),
    "stream": Field("was it streamed", CHOICE, _of_span(lambda s: str(s.stream).lower()), _choice("true", "false")),
    "latency": Field("length of the call, with a unit: 250ms, 2s", NUMBER, _of_span(lambda s: s.duration_ns), _latency),
    "tokens": Field("input and output tokens", NUMBER, _of_span(_tokens), _number),
    "input_tokens": Field("prompt tokens", NUMBER, _of_span(lambda s: s.usage and s.usage.input_tokens), _number),
    "output_tokens": Field("generated tokens", NUMBER, _of_span(lambda s: s.usage and s.usage.output_tokens), _number),
    "tool_calls": Field("tool calls asked for", NUMBER, _of_span(lambda s: s.tool_calls), _number),
    "bytes": Field("size of both bodies", NUMBER, _of_span(lambda s: s.request_bytes + s.response_bytes), _number),
    "http": Field("HTTP status", NUMBER, _of_span(lambda s: s.http_status), _number),
    "text": Field("part of the request or response body", ("~",), lambda rollout, span: (), _body_text, "bodies"),
}

FIELDS: dict[Target, dict[str, Field]] = {
    "spans": {
        "status": Field(
            "how it ended; failed is error or interrupted",
            CHOICE,
            _of_span(lambda s: s.status),
            _choice(*SpanStatus, failed=FAILED),
        ),
        **_BOTH,
    },
    "rollouts": {
        "status": Field(
            "where the rollout stands", CHOICE, _of_rollout(lambda r: r.status), _choice(*RolloutStatus), "both"
        ),
        **_BOTH,
    },
}
