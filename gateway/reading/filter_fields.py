"""The fields of the filter language: for each its name, its operators, the place of its values, and how they are
compared.
"""

from __future__ import annotations

import json
import operator as comparisons
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import translate
from typing import Any, Final, Literal, cast, get_args

from penstock.gateway.model.answers import FilterField
from penstock.gateway.model.base import TOOLS, Mode, Origin
from penstock.gateway.model.facts import SPAN_FACTS, Fact, is_ambiguous, reader
from penstock.gateway.model.rollout import (
    FINAL,
    WAITING,
    Attempt,
    AttemptStatus,
    Reward,
    RewardSource,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    is_claimed,
)
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.times import UNITS, nanoseconds

# Makes predicates of the values in a filter: (operator, value as written, now in ns) -> a predicate over a field's
# values.
#
# A predicate is an object whose fields show what it compares, so that an index can compare its columns in the same
# way (`reading.filters`). Its maker raises `TermError` for a value that it does not understand, with the values that it
# allows.

Matcher = Callable[[Any], bool]
"""True if one value of a field matches."""
MatcherFactory = Callable[[str, str, int], Matcher]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": comparisons.gt,
    ">=": comparisons.ge,
    "<": comparisons.lt,
    "<=": comparisons.le,
    "=": comparisons.eq,
}


LONGEST_WILD: Final = 64
"""Characters of a pattern for long texts with `?` in it: each may be compared at each place of a text."""


class TermError(ValueError):
    """An unusable field, operator or value. The term is not known here; `parse` adds it."""

    def __init__(self, problem: str, allowed: Sequence[str] = (), nearest: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.allowed, self.nearest = problem, allowed, nearest


@dataclass(frozen=True, slots=True)
class NumberMatcher:
    """Matches numbers on one side of a limit, or equal to it."""

    operator: str
    """One of > >= < <= =."""
    limit: float

    def __call__(self, value: float) -> bool:
        return _COMPARE[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class MissingMatcher:
    """Stands for a field without a value, as `none` does, and so matches no value."""

    def __call__(self, value: object) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class WordMatcher:
    """Matches any of some words."""

    words: tuple[str, ...]

    def __call__(self, value: str) -> bool:
        return value in self.words


@dataclass(frozen=True, slots=True)
class Wildcards:
    """A casefolded pattern with `*` or `?` that may match anywhere in a casefolded text."""

    pattern: str

    def is_in(self, text: str) -> bool:
        """True if the pattern matches a part of the text: its runs between `*` one after the other. The first place of
        each is the right one, so a text is read once."""
        at = 0
        for run in self.pattern.split("*"):
            if "?" in run:
                found = re.compile(_expression(run), re.DOTALL).search(text, at)
                begin = -1 if found is None else found.start()
            else:
                begin = text.find(run, at)
            if begin < 0:
                return False
            at = begin + len(run)
        return True

    @property
    def pieces(self) -> list[str]:
        """Parts of every text that it matches."""
        return re.findall(r"[^*?]+", self.pattern)

    @property
    def expression(self) -> str:
        """The same as a regular expression, in Python and in RE2, to be searched for."""
        return _expression(self.pattern)


def _expression(pattern: str) -> str:
    return "".join({"*": ".*?", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)


TextPart = str | Wildcards
"""What is looked for in a casefolded text."""


def is_in(part: TextPart, text: str) -> bool:
    """True if a casefolded text has the part."""
    return part in text if isinstance(part, str) else part.is_in(text)


@dataclass(frozen=True, slots=True)
class SubstringMatcher:
    """Matches texts that have one of these parts. `folded`: the text is casefolded already."""

    parts: tuple[TextPart, ...]
    folded: bool

    def __call__(self, value: str) -> bool:
        text = value if self.folded else value.casefold()
        return any(is_in(part, text) for part in self.parts)


@dataclass(frozen=True, slots=True)
class GlobMatcher:
    """Matches texts of this pattern, case ignored."""

    wanted: re.Pattern[str]

    def __call__(self, value: str) -> bool:
        return self.wanted.match(value) is not None


def pattern(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of texts: `=` exactly, `~` a part, else a pattern with `*` and `?`, case ignored."""
    if operator == "=":
        return WordMatcher((value,))
    if operator == "~":
        return SubstringMatcher((value.casefold(),), folded=False)
    return GlobMatcher(re.compile(translate(value.replace("[", "[[]")), re.IGNORECASE))


def part(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of a part of a casefolded text, which may be JSON: `~` exactly, `:` with `*` and `?`."""
    found = forms(value)
    wild = operator == ":" and re.search(r"[*?]", value)
    if wild and "?" in value and len(value) > LONGEST_WILD:
        raise TermError(f"with a `?` it has at most {LONGEST_WILD} characters; `*` may stand for any number")
    return SubstringMatcher(tuple(map(Wildcards, found)) if wild else found, folded=True)


def forms(text: str) -> tuple[str, ...]:
    """The forms in which a text may occur in a casefolded one: unchanged, or escaped for JSON in either of the two
    usual ways."""
    found = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return tuple(sorted({form.casefold() for form in found}))


def count(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of whole numbers from 0."""
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise TermError(f"{value!r} is not a whole number", ("0", "1", "2", "...", NONE))
    return _compared(operator, int(value))


def whole(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of whole numbers, also negative ones."""
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise TermError(f"{value!r} is not a whole number", ("-1", "0", "1", "...", NONE))
    return _compared(operator, int(value))


def decimal(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of decimal numbers."""
    if not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", value):
        raise TermError(f"{value!r} is not a number", ("-1", "0.5", "1", "...", NONE))
    return _compared(operator, float(value))


def latency(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of nanoseconds, from a duration with its unit."""
    ns = nanoseconds(value)
    if ns is None:
        raise TermError(f"{value!r} is not a number with a unit, such as 250ms", tuple(UNITS))
    return _compared(operator, ns)


def instant(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of ns since the epoch, from an ISO time or a duration before now."""
    ago = nanoseconds(value)
    return _compared(operator, now_ns - ago if ago is not None else _instant(value))


def since(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of instants at or after an ISO time, or a duration before now."""
    return instant(">=", value, now_ns)


def _instant(value: str) -> int:
    try:
        when = datetime.fromisoformat(value)
        seconds = when.timestamp() if when.tzinfo else when.replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        forms = ("2026-08-01", "2026-08-01T12:30:00Z", "2h", "30m")
        raise TermError(f"{value!r} is neither an ISO time (UTC unless it says) nor a time ago", forms) from None
    return int(seconds * 1e9)


def _compared(operator: str, limit: float) -> NumberMatcher:
    return NumberMatcher(operator if operator in _COMPARE else "=", limit)


_SYNONYMS: Final = {"model": "llm", "call": "llm", "errors": "error:*"}
"""The value or term that people mean by another word."""


class WordMatcherFactory:
    """Makes matchers of one of a few words; a group is a word that stands for several of them."""

    def __init__(self, *allowed: str, **groups: Sequence[str]) -> None:
        self._groups = groups
        self.words = (*map(str, allowed), *(group for group in groups if group not in allowed))

    def __call__(self, operator: str, value: str, now_ns: int) -> Matcher:
        """The matcher of one of the words, or of a group's words."""
        if value not in self.words:
            meant = _SYNONYMS.get(value)
            near = [meant] if meant in self.words else get_close_matches(value, self.words, n=1)
            raise TermError(f"{value!r} is not one of its values", self.words, near[0] if near else None)
        return WordMatcher(tuple(map(str, self._groups.get(value, (value,)))))


Target = Literal["spans", "rollouts"]
ValueReader = Callable[[Rollout | None, Span | None], Sequence[Any]]
"""Returns the values of a field; none where there is nothing to compare."""

FAILED = (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
ORDER = (">", ">=", "<", "<=")
EQUAL = (":", "=", "!=")
TEXT, NUMBER, CHOICE = (*EQUAL, "~"), (*EQUAL, *ORDER), EQUAL
NONE: Final = "none"
"""The value of a number that is missing."""
PART = (":", "~")
"""Of long texts: `=` would want all of one."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field that a term may name."""

    help: str
    """Its meaning, for the documentation."""
    operators: tuple[str, ...]
    read: ValueReader
    """Returns its values."""
    matcher: MatcherFactory
    """Makes a matcher of (operator, value, now in ns); raises `TermError`."""
    about: Literal["span", "both", "tools", "texts", "bodies"] = "span"
    """The noun that the field belongs to. `both`: the span's, and the rollout's own when rollouts are listed. The last
    three: the values have to be read from the bytes of the call (`query.Contents`)."""
    needs: Literal["span", "rollout", "attempts", "cost"] = "span"
    """The nouns that must be looked up to read it for a span: its rollout, or that with its attempts. `cost`: the span
    or the rollout must have been priced."""


def field(name: str, target: Target) -> Field:
    """The field of this name; raises `TermError` with the nearest name."""
    if name.startswith("metadata.") and len(name) > len("metadata."):
        return _metadata(name.removeprefix("metadata."))
    fields = FIELDS[target]
    if name in fields:
        return fields[name]
    near = [_SYNONYMS[name]] if name in _SYNONYMS else get_close_matches(name, fields, n=1)
    raise TermError(f"unknown field {name!r}", (*fields, "metadata.KEY"), near[0] if near else None)


def matcher(target: Target, field: Field, operator: str, value: str, now_ns: int) -> Matcher:
    """The matcher of a value of a field. Raises `TermError`, which names the field that knows a word."""
    if value == NONE and field.operators is NUMBER and operator in EQUAL:
        return MissingMatcher()
    try:
        return field.matcher("=" if operator == "!=" else operator, value, now_ns)
    except TermError as e:
        others = (name for name, one in FIELDS[target].items() if value in _words(one))
        near = next((f"{name}:{value}" for name in others), e.nearest)
        raise TermError(e.problem, e.allowed, near) from None


def _words(field: Field) -> Sequence[str]:
    return field.matcher.words if isinstance(field.matcher, WordMatcherFactory) else ()


def _nothing(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    """Reads no value, for fields that are not in heads."""
    return ()


def _of_span(read: Callable[[Span], Any]) -> ValueReader:
    def values(rollout: Rollout | None, span: Span | None) -> Sequence[Any]:
        value = None if span is None else read(span)
        return () if value is None else (value,)

    return values


def _of_rollout(read: Callable[[Rollout], Any]) -> ValueReader:
    def values(rollout: Rollout | None, span: Span | None) -> Sequence[Any]:
        value = None if rollout is None else read(rollout)
        return () if value is None else (value,)

    return values


def _of_attempts(read: Callable[[Attempt], Any]) -> ValueReader:
    """A reader of a value of the span's attempt, or of all attempts of the rollout."""

    def values(rollout: Rollout | None, span: Span | None) -> Sequence[Any]:
        found = rollout.attempts if isinstance(rollout, RolloutSummary) else ()
        read_of = (read(attempt) for attempt in found if span is None or attempt.id == span.attempt)
        return [value for value in read_of if value is not None]

    return values


def _reward(rollout: Rollout | None, span: Span | None) -> Sequence[float]:
    """The value of a reward; of another span the reward of its attempt; of a rollout its own reward."""
    if span is None:
        found = rollout.reward if isinstance(rollout, RolloutSummary) else None
    elif span.kind == "reward":
        found = Reward.of(span).value
    else:
        return _of_attempts(lambda attempt: attempt.reward)(rollout, span)
    return () if found is None else (found,)


def _cost(rollout: Rollout | None, span: Span | None) -> Sequence[float]:
    """The cost of a call; of a rollout the sum that lists show."""
    found = span.cost if span else rollout.totals.cost if isinstance(rollout, RolloutSummary) else None
    return () if found is None else (found,)


def _statuses(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    """The status of a rollout, and `is_claimed` when a worker holds it."""
    if rollout is None:
        return ()
    return (rollout.status, "claimed") if is_claimed(rollout.origin, rollout.status) else (rollout.status,)


def _rollout_id(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    return (span.rollout,) if span else (rollout.id,) if rollout else ()


def _started_ns(rollout: Rollout | None, span: Span | None) -> Sequence[int]:
    return (span.start_ns,) if span else (rollout.created_ns,) if rollout else ()


def _models(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    return [name for name in (span.model, span.model_served) if name] if span else ()


def _ambiguous(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
    """`true` if a call could be another rollout's, or if a rollout has such a call; else `false`."""
    if span is not None:
        return (str(is_ambiguous(span)).lower(),)
    return (str(rollout.totals.ambiguous > 0).lower(),) if isinstance(rollout, RolloutSummary) else ()


def _tokens(span: Span) -> int | None:
    if span.usage is None:
        return None
    counts = [n for n in (span.usage.input_tokens, span.usage.output_tokens) if n is not None]
    return sum(counts) if counts else None


def _metadata(key: str) -> Field:
    def values(rollout: Rollout | None, span: Span | None) -> Sequence[str]:
        found = None if rollout is None else _lookup(rollout.metadata or {}, key)
        return () if found is None else (found if isinstance(found, str) else json.dumps(found),)

    return Field("a key of the rollout's metadata", TEXT, values, pattern, "both", "rollout")


def _source(span: Span) -> str | None:
    return Reward.of(span).source if span.kind == "reward" else None


def _task(rollout: Rollout) -> str | None:
    return None if rollout.input is None else json.dumps(rollout.input, ensure_ascii=False).casefold()


def _lookup(metadata: dict[str, Any], key: str) -> Any:
    """The value of the key itself, else of a dotted path into nested objects; None without one."""
    if key in metadata:
        return metadata[key]
    head, _, rest = key.partition(".")
    inner = metadata.get(head)
    return _lookup(cast(dict[str, Any], inner), rest) if rest and isinstance(inner, dict) else None


def _about_rollout(
    help: str, operators: tuple[str, ...], read: Callable[[Rollout], Any], matcher: MatcherFactory
) -> Field:
    return Field(help, operators, _of_rollout(read), matcher, "both", "rollout")


def _about_span(fact: Fact) -> Field:
    """The field of a fact of `model.facts`."""
    read, form = reader(fact), fact.filter
    assert form is not None
    values, help = _of_span(read), form.help or fact.help
    if form.words:
        return Field(help, CHOICE, values, WordMatcherFactory(*form.words))
    match fact.type:
        case "varchar[]":
            return Field(help, TEXT, lambda _, span: (span and read(span)) or (), pattern)
        case "boolean":
            values = _of_span(lambda span: str(bool(read(span))).lower())
            return Field(help, CHOICE, values, WordMatcherFactory("true", "false"))
        case "bigint" | "integer":
            return Field(help, NUMBER, values, latency if fact.unit == "ns" else count)
        case "double":
            return Field(help, NUMBER, values, decimal)
        case _:
            return Field(help, TEXT, values, pattern)


def _text(help: str, read: Callable[[Span], Any]) -> Field:
    return Field(help, TEXT, _of_span(read), pattern)


def _count(help: str, read: Callable[[Span], Any]) -> Field:
    return Field(help, NUMBER, _of_span(read), count)


def _about_attempts(help: str, operators: tuple[str, ...], read: ValueReader, matcher: MatcherFactory) -> Field:
    return Field(help, operators, read, matcher, "both", "attempts")


_BOTH: dict[str, Field] = {
    "rollout": Field("its rollout", TEXT, _rollout_id, pattern, "both"),
    "mode": _about_rollout("what the rollout is for", CHOICE, lambda r: r.mode, WordMatcherFactory(*get_args(Mode))),
    "origin": _about_rollout(
        "how the rollout came to be: queued, header (an address in a request) or implicit",
        CHOICE,
        lambda r: r.origin,
        WordMatcherFactory(*get_args(Origin)),
    ),
    "group": _about_rollout("the task that the rollout repeats", TEXT, lambda r: r.group, pattern),
    "priority": _about_rollout("the rollout's priority in the queue", NUMBER, lambda r: r.priority, whole),
    "tries": _about_rollout("attempts that the queue has handed out", NUMBER, lambda r: r.tries, count),
    "input": _about_rollout("part of the task", PART, _task, part),
    "reward": _about_attempts(
        "a reward's own value; of other spans the reward of their attempt; of a rollout its own",
        NUMBER,
        _reward,
        decimal,
    ),
    "cost": Field("US dollars of the call; of a rollout all its calls'", NUMBER, _cost, decimal, "both", "cost"),
    "worker": _about_attempts("name of the attempt's worker", TEXT, _of_attempts(lambda a: a.worker), pattern),
    "attempt_status": _about_attempts(
        "where the attempt stands",
        CHOICE,
        _of_attempts(lambda a: a.status),
        WordMatcherFactory(*AttemptStatus),
    ),
    "ambiguous": Field(
        "could a call without an address be another rollout's",
        CHOICE,
        _ambiguous,
        WordMatcherFactory("true", "false"),
        "both",
        "attempts",
    ),
    "started": Field("when it began: an ISO time, or how long ago (2h)", ORDER, _started_ns, instant, "both"),
    "since": Field("began at or after then: an ISO time, or how long ago (30d)", (":",), _started_ns, since, "both"),
    "model": Field("model asked for or served", TEXT, _models, pattern),
    "source": Field("who gave the reward", CHOICE, _of_span(_source), WordMatcherFactory(*get_args(RewardSource))),
    "tool": Field("a tool that was run, or that the answer asked for", TEXT, _nothing, pattern, "tools"),
    "server": _text("name of the server of tools", lambda s: s.upstream if s.kind in TOOLS else None),
    "tokens": _count("input and output tokens", _tokens),
    "bytes": _count("size of both bodies", lambda s: s.request_bytes + s.response_bytes),
    **{fact.filter.name or fact.name: _about_span(fact) for fact in SPAN_FACTS if fact.filter is not None},
    "text": Field(
        "part of what it adds: new messages, the answer, tool calls and results, errors",
        PART,
        _nothing,
        part,
        "texts",
    ),
    "raw": Field(
        "part of the request or response body as it is; reads each, so it is slow",
        PART,
        _nothing,
        part,
        "bodies",
    ),
}

FIELDS: dict[Target, dict[str, Field]] = {
    "spans": {
        "status": Field(
            "how it ended; failed is error or interrupted",
            CHOICE,
            _of_span(lambda s: s.status),
            WordMatcherFactory(*SpanStatus, failed=FAILED),
        ),
        **_BOTH,
    },
    "rollouts": {
        "status": Field(
            "where the rollout stands; waiting and over are several at once, claimed is in a worker's hands",
            CHOICE,
            _statuses,
            WordMatcherFactory(*RolloutStatus, waiting=[*WAITING], claimed=["claimed"], over=[*FINAL]),
            "both",
        ),
        **_BOTH,
    },
}


def describe_fields(target: Target) -> list[FilterField]:
    """The fields with their operators and values, for completion."""
    return [
        FilterField(
            name=name,
            help=one.help,
            operators=list(one.operators),
            values=list(_words(one)),
        )
        for name, one in FIELDS[target].items()
    ]
