"""Takes known secrets and the finds of masking rules out of texts, before these go to the tape.

`Masker` is a `Secrets`, so rules hold wherever known values are masked; these are masked first. A text to which a rule
cannot be applied for sure becomes asterisks as a whole. Notes record the masking; `for_call` begins new ones for a
call.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, TypeAlias

import orjson
from pydantic import AfterValidator, Field, model_validator

from penstock.gateway.model.facts import MASKED, MASKING_FAILED
from penstock.gateway.model.known_secrets import BodyContext, Secrets, with_distinct_keys
from penstock.gateway.model.toml import ConfigError, Section
from penstock.gateway.wire.dialects.json_scan import EVERYTHING, BodyFormatError, JsonPaths, parse_path
from penstock.gateway.wire.masking.bodies import (
    BodySearch,
    MaskingError,
    MaskingResult,
    RuleSet,
    mask_body,
    without_tokens,
)
from penstock.gateway.wire.masking.text import (
    STAR,
    BodyText,
    CpuBudget,
    EscapedText,
    MaskingPattern,
    PatternTimeout,
    TextSlice,
    join_patterns,
)

_log = logging.getLogger("penstock.masking")
_VALUE: Final = re.compile(rb"(?m)(?<=: )[^\r\n]+")
_AS_JSON: Final = BodyContext("application/json")


# -- the settings ------------------------------------------------------------------------------------------------------


def _path(value: str) -> str:
    if value == EVERYTHING:
        raise ValueError("the path of a masking rule names a member: write **.email, or * for all of them")
    if not value or value.startswith("/"):
        said = f'write ["{value}"] for a member of this name' if value else "write the name of a member"
        raise ValueError(f"{value!r} is no path: {said}")
    _ = parse_path(value)
    return value


MemberPath = Annotated[str, AfterValidator(_path)]


class MaskingRule(Section):
    """`[[masking]]`: what is replaced by asterisks before a call is written to the tape."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")
    """Name in spans, metrics and messages."""
    pattern: str | None = None
    """RE2 regular expression; its matches in texts are masked."""
    paths: list[MemberPath] = Field(default=[])
    """Paths of JSON members whose values are masked whole."""

    @model_validator(mode="after")
    def _looks_for_one_thing(self) -> MaskingRule:
        if self.pattern is None and not self.paths:
            raise ValueError(f'{self.name!r} masks nothing: add a pattern, or paths = ["**.email"]')
        if self.pattern is not None and self.paths:
            raise ValueError(f"{self.name!r} has a pattern and paths: make a rule of each")
        return self


# -- the rules at work -------------------------------------------------------------------------------------------------

Labels: TypeAlias = tuple[str, ...]


class MaskingCounts:
    """Counts of masking since the gateway's start; for metrics, and so that the log reports each rule's
    failure once."""

    def __init__(
        self, masked: Counter[Labels] | None = None, failed: Counter[Labels] | None = None, quiet: bool = False
    ) -> None:
        """`masked`, `failed`: the counters, by rule; `quiet`: True to log nothing."""
        self.masked: Counter[Labels] = Counter() if masked is None else masked
        self.failed: Counter[Labels] = Counter() if failed is None else failed
        self._said: set[str] = set()
        self._quiet = quiet
        self._lock = threading.Lock()

    def begin(self, rules: Iterable[MaskingRule]) -> None:
        """Counts from zero, so that metrics have all rules from the start."""
        for rule in rules:
            self.masked[rule.name,] = self.failed[rule.name,] = 0

    def add(self, notes: MaskingResult) -> None:
        """Adds the notes of one body."""
        with self._lock:
            self.masked.update({(rule,): count for rule, count in notes.found.items()})

    def failure(self, why: str) -> None:
        """Counts a body that was not kept; `why` begins with the rule's name."""
        name = why.partition(": ")[0]
        with self._lock:
            self.failed[name,] += 1
            new = name not in self._said
            self._said.add(name)
        if new and not self._quiet:
            _log.warning("masking failed, so a body was not kept: %s; more of this rule is counted, not logged", why)


def _pattern(rule: MaskingRule) -> MaskingPattern:
    try:
        return MaskingPattern(rule.pattern or "")
    except ValueError as error:
        raise ConfigError(f"masking rule {rule.name!r}: pattern {error}") from None


class CompiledRules:
    """All rules, ready for use. Raises `ConfigError`, also if the engine is not installed."""

    def __init__(self, rules: Sequence[MaskingRule]) -> None:
        patterns = [(rule.name, _pattern(rule)) for rule in rules if rule.pattern is not None]
        written = [rule.pattern for rule in rules if rule.pattern is not None]
        paths = [(rule.name, JsonPaths(rule.paths)) for rule in rules if rule.paths]
        self.all = RuleSet(patterns, paths, join_patterns(written) if len(written) > 1 else None)


def masker(rules: Sequence[MaskingRule], own: Secrets, tally: MaskingCounts) -> Secrets:
    """The `Secrets` that mask these values and the rules' finds. Without rules they are the values alone, at no further
    cost. Raises `ConfigError`."""
    tally.begin(rules)
    return own if not rules else Masker(own.values, CompiledRules(rules), tally)


class Masker(Secrets):
    """Masks known values and the rules' finds."""

    __slots__ = ("_compiled", "_notes", "_tally")
    notes = True

    def __init__(self, values: Iterable[bytes], compiled: CompiledRules, tally: MaskingCounts) -> None:
        super().__init__(values)
        self._compiled, self._tally, self._notes = compiled, tally, MaskingResult()

    def __bool__(self) -> bool:
        return True

    def with_values(self, values: Iterable[bytes]) -> Masker:
        return Masker(self.values | frozenset(values), self._compiled, self._tally)

    def for_call(self) -> Masker:
        made = object.__new__(Masker)
        for name in Secrets.__slots__:
            setattr(made, name, getattr(self, name))
        made._compiled, made._tally, made._notes = self._compiled, self._tally, MaskingResult()
        return made

    @property
    def by_place(self) -> bool:
        return bool(self._rules.paths)

    @property
    def masked(self) -> bool:
        return bool(self._notes.found or self._notes.failed)

    @property
    def span_attributes(self) -> dict[str, Any]:
        notes = self._notes
        made: dict[str, Any] = {MASKED: dict(notes.found)} if notes.found else {}
        return made | ({MASKING_FAILED: f"failed: {notes.failed}"} if notes.failed else {})

    def hide(self, body: bytes, ended: bool = True) -> bytes:
        """See `Secrets`. The format follows from the beginning alone."""
        return self.body(body, BodyContext(cut=False), ended)

    def body(self, body: bytes, about: BodyContext, ended: bool = True) -> bytes:
        body = super().hide(body, ended)
        if about.problem is not None and body:
            return self._failed(body, f"{self._rules.first}: {about.problem}")
        return self._applied(body, lambda root, looking: mask_body(root, looking, about))

    def block(self, block: bytes) -> bytes:
        """See `Secrets`. Masks each header value by itself."""
        block = super().hide(block, False)
        made = self._applied(block, _look_at_values)
        # If all became stars, the names are kept, so that the lines stay header lines.
        return made if not block or made.strip(STAR) else _VALUE.sub(lambda it: STAR * len(it[0]), block)

    def text(self, text: str) -> str:
        """See `Secrets`. Paths apply if the text is JSON."""
        text = super().text(text)
        body = text.encode("utf-8", "surrogatepass")
        masked = self._applied(body, _look_at_text)
        return text if masked is body else masked.decode("utf-8", "replace")

    def texts(self, texts: Sequence[str | None]) -> Sequence[str | None]:
        return [None if text is None else self.text(text) for text in texts]

    def json(self, value: Any) -> Any:
        value = super().json(value)
        try:
            written = _written(value)
            masked = self._applied(written, lambda root, looking: mask_body(root, looking, _AS_JSON))
            return value if masked is written else _read(masked, value)
        except (TypeError, ValueError, RecursionError):
            self._fail(f"{self._rules.first}: what was said cannot be written as JSON")
            return _read(STAR, value)

    def without_tokens(self, body: bytes, about: BodyContext) -> bytes:
        return without_tokens(body, about)

    @property
    def _rules(self) -> RuleSet:
        return self._compiled.all

    def _applied(self, body: bytes, find: Callable[[BodyText, BodySearch], None]) -> bytes:
        """The body with the rules' finds masked, the same object if there are none; all asterisks if a rule fails."""
        if not body:
            return body
        notes, root = MaskingResult(), BodyText(body)
        try:
            find(root, BodySearch(self._rules, CpuBudget(len(body)), notes))
        except (MaskingError, BodyFormatError, PatternTimeout) as unsure:
            named = isinstance(unsure, MaskingError)
            return self._failed(body, str(unsure) if named else f"{self._rules.first}: {unsure}")
        except Exception:
            # After any error: a body that was not searched is not kept.
            _log.exception("masking rules could not be applied to a body: it is not kept")
            return self._failed(body, f"{self._rules.first}: an internal error, which the log has")
        for rule, count in notes.found.items():
            self._notes.found[rule] = self._notes.found.get(rule, 0) + count
        self._tally.add(notes)
        if notes.failed is not None:
            self._fail(notes.failed)
        return root.masked

    def _failed(self, body: bytes, why: str) -> bytes:
        self._fail(why)
        return STAR * len(body)

    def _fail(self, why: str) -> None:
        self._notes.failed = self._notes.failed or why
        self._tally.failure(why)


def _look_at_values(root: BodyText, looking: BodySearch) -> None:
    for found in _VALUE.finditer(root.data):
        _look_at(root, *found.span(), looking)


def _look_at_text(root: BodyText, looking: BodySearch) -> None:
    _look_at(root, 0, len(root.data), looking)


def _look_at(root: BodyText, start: int, end: int, looking: BodySearch) -> None:
    """Searches a text, as it is written and URL-decoded."""
    text = TextSlice(root, start, end)
    looking.search_text(text)
    if b"%" in text.data:
        looking.mask_patterns(EscapedText(root, start, end, percent=True))


def _written(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # orjson refuses integers of more than 64 bits and halves of surrogate pairs.
        return json.dumps(value).encode()


def _read(masked: bytes, value: Any) -> Any:
    """A masked value of the same type; an empty one if all of it is asterisks."""
    try:
        return json.loads(masked, object_pairs_hook=with_distinct_keys)
    except ValueError:
        return {} if isinstance(value, dict) else [] if isinstance(value, list) else "***"
