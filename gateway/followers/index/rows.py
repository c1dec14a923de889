"""Rows of spans, rollouts and attempts, in the order of the index's columns.

A span that has ended never changes, so its row is made once, without making the noun: some microseconds. Its columns
are the facts of `model.facts`. Rows of a rollout and its attempts are those of now.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Final, cast

from penstock.gateway.model.facts import SPAN_FACTS, TOOL, Fact, own_attribute
from penstock.gateway.model.prices import Prices, TokenCounts
from penstock.gateway.model.rollout import Attempt, Rollout, is_claimed, last_seen_ns, reward
from penstock.gateway.model.span import Span, SpanStatus, Usage
from penstock.gateway.model.turn import Passage
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.codec import DeltaBase, StoredBody
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.reader import header_lines
from penstock.gateway.tape.store.records import OWN, STYLE, USAGE
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.traffic.calls.passages import attribute_passages, call_passages, is_conversation, tools_called
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.tokens import lacks_token_counts

COLUMNS: Final = {
    "spans": {fact.index_column: fact.type for fact in SPAN_FACTS if fact.type is not None},
    "rollouts": {
        "number": "bigint", "rollout": "varchar", "origin": "varchar", "mode": "varchar", "status": "varchar",
        "claimed": "boolean", "group": "varchar", "priority": "integer", "tries": "integer", "created_ns": "bigint",
        "last_seen_ns": "bigint", "ended_ns": "bigint", "ambiguous": "boolean", "reward": "double",
        "metadata": "map(varchar, varchar)",
    },
    "attempts": {
        "number": "bigint", "rollout": "varchar", "attempt": "varchar", "sequence": "integer", "status": "varchar",
        "worker": "varchar", "created_ns": "bigint", "last_seen_ns": "bigint", "ended_ns": "bigint",
        "reward": "double", "calls": "bigint", "errors": "bigint", "cancelled": "bigint", "input_tokens": "bigint",
        "output_tokens": "bigint", "tool_calls": "bigint", "uncounted": "bigint",
    },
    "inputs": {"number": "bigint", "folded": "varchar"},
}  # fmt: skip
"""The columns of each table, with their types."""
Row = tuple[Any, ...]

_AT: Final = {name: (own, at) for own, names in enumerate((STYLE, OWN)) for at, name in enumerate(names)}
"""The place of each stored field: (0 for the style, 1 for a span's own values; index)."""
_OWN_DEFAULTS: Final[list[Any]] = [Span.model_fields[name].default for name in OWN]


class RolloutNumbers:
    """The numbers of rollouts by id, as many as are active at once."""

    MOST: Final = 100_000

    def __init__(self) -> None:
        self._numbers = dict[str, int]()

    def forget(self, rollout: str) -> None:
        """Called when a rollout was forgotten: another of this id may follow."""
        self._numbers.pop(rollout, None)

    def number(self, view: TapeView, rollout: str) -> int:
        """The number of a rollout; -1 if it is gone."""
        found = self._numbers.get(rollout)
        if found is None:
            if len(self._numbers) >= self.MOST:
                self._numbers.clear()
            origins = view.origins(rollout)
            if origins is None:
                return -1
            found = self._numbers[rollout] = origins.number
        return found


def _stored(name: str) -> Any:
    """A property of a record: the stored value of this field of a span."""
    own, at = _AT[name]
    return property((lambda record: record.own[at]) if own else (lambda record: record.style[at]))


class SpanRecord:
    """The record of a span, decoded only as far as needed. The duration stands in the place of its end."""

    __slots__ = ("attempt", "attributes", "counts", "own", "rollout", "sequence", "style")

    kind, status, dialect, upstream, stream = map(_stored, ("kind", "status", "dialect", "upstream", "stream"))
    http_status, error, body, versions = map(_stored, ("http_status", "error", "body", "versions"))
    model, model_served, start_ns = map(_stored, ("model", "model_served", "start_ns"))

    def __init__(self, view: TapeView, key: bytes, summary: bytes) -> None:
        self.rollout, self.attempt, self.sequence = keys.split_summary_key(key)
        style, *own = codec.decode(summary)
        self.style = view.style(style) if isinstance(style, int) else style
        self.own: list[Any] = own + _OWN_DEFAULTS[len(own) :]
        self.attributes: dict[str, Any] = self.own[_AT["attributes"][1]] or {}
        used: list[Any] = self.own[_AT["usage"][1]] or []
        self.counts = TokenCounts(*used, *[None] * (len(USAGE) - len(used)))

    @property
    def usage(self) -> Usage:
        return Usage.model_construct(input_tokens=self.counts.input, output_tokens=self.counts.output)

    def tools(self, passages: Iterable[Passage]) -> list[str]:
        """The tool that the span ran, or those that its answer asked for."""
        if self.kind == "tool":
            return [str(self.attributes.get(TOOL, ""))]
        return tools_called(passages) if self.own[_AT["tool_calls"][1]] else []


def _read_record(fact: Fact) -> Callable[[SpanRecord], Any]:
    """A function that reads a fact of a record, as `facts.reader` does of a span."""
    source = fact.source
    if source is None:
        return lambda record: None
    if callable(source):
        return source
    within, _, field = source.partition(".")
    if within == "usage":
        at = USAGE.index(field)
        return lambda record: record.counts[at]
    if field:
        return lambda record: own_attribute(record, source)
    if source in ("rollout", "attempt", "sequence"):
        return attrgetter(source)
    return _stored("end_ns" if source == "duration_ns" else source).fget


_COLUMN_FACTS: Final = [fact for fact in SPAN_FACTS if fact.type is not None]
_READERS: Final = [_read_record(fact) for fact in _COLUMN_FACTS]
_COMPUTED: Final = [at for at, fact in enumerate(_COLUMN_FACTS) if fact.source is None]


def span_row(record: SpanRecord, cursor: int, number: int, tools: list[str], prices: Prices) -> Row:
    """The row of a span. `number`: its rollout's."""
    tokens, is_model_call = record.counts, record.kind == "llm"
    is_priced = is_model_call and record.status != SpanStatus.OPEN
    cost = prices.cost(record.model_served, record.model, record.start_ns, tokens) if is_priced else None
    uncounted = (
        is_model_call
        and (tokens.input is None or tokens.output is None)
        and lacks_token_counts(record, by_name(record.dialect))
    )
    row = [read(record) for read in _READERS]
    computed = (cursor, number, cost, tokens.own_cost is not None, tools, uncounted)
    for at, value in zip(_COMPUTED, computed, strict=True):
        row[at] = value
    return tuple(row)


def rollout_row(number: int, rollout: Rollout, attempts: list[Attempt]) -> Row:
    """The row of a rollout as of now."""
    return (
        number, rollout.id, rollout.origin, rollout.mode, str(rollout.status),
        is_claimed(rollout.origin, rollout.status), rollout.group, rollout.priority, rollout.tries, rollout.created_ns,
        last_seen_ns(rollout, attempts), rollout.ended_ns,
        any(attempt.totals.ambiguous for attempt in attempts),
        reward(attempts),
        [(name, text) for name, text in dict(flatten_metadata(rollout.metadata or {})).items() if text is not None],
    )  # fmt: skip


def attempt_row(number: int, attempt: Attempt) -> Row:
    """The row of an attempt as of now."""
    totals = attempt.totals
    return (
        number, attempt.rollout, attempt.id, attempt.sequence, str(attempt.status), attempt.worker,
        attempt.created_ns, attempt.last_seen_ns, attempt.ended_ns, attempt.reward, totals.calls, totals.errors,
        totals.cancelled, totals.input_tokens, totals.output_tokens, totals.tool_calls, totals.uncounted,
    )  # fmt: skip


def input_row(number: int, rollout: Rollout) -> Row:
    """The input of a rollout as filters compare it."""
    return number, json.dumps(rollout.input, ensure_ascii=False).casefold()


def flatten_metadata(metadata: dict[str, Any], before: str = "") -> Iterator[tuple[str, str | None]]:
    """Every name that `metadata.NAME` of a filter may have, with its text: a key, or a path of keys with dots between.
    A key comes after the paths, because a key with dots takes precedence over a path of the same name, even if its
    value is null."""
    for key, value in metadata.items():
        if isinstance(value, dict) and "." not in key:
            yield from flatten_metadata(cast("dict[str, Any]", value), f"{before}{key}.")
    for key, value in metadata.items():
        if not key and before:
            continue  # no filter can name it
        yield before + key, value if value is None or isinstance(value, str) else json.dumps(value)


# Reads the passages that each span adds to its conversation from the tape, in the order in which spans ended.
#
# Bodies are stored against earlier ones, most often that of the attempt's last call, so these are remembered: then a
# body takes one step of decoding and not a chain of them.

_BASES_BYTES: Final = 64 << 20
_ATTEMPTS: Final = 100_000
_log = logging.getLogger("penstock.index")


class PassageReader:
    """Reads the passages of spans, and remembers the bodies that the next spans need."""

    def __init__(self) -> None:
        self._bases = OrderedDict[int, DeltaBase]()
        self._size = 0
        self._first_calls = OrderedDict[tuple[str, str], int]()

    def forget(self) -> None:
        """Called when a rollout was forgotten: another of its name may follow."""
        self._first_calls.clear()

    def read(self, view: TapeView, head: SpanRecord) -> list[Passage]:
        """The passages of a span that has ended."""
        return self.read_call(view, head)[0]

    def read_call(self, view: TapeView, head: SpanRecord) -> tuple[list[Passage], StoredBody | None]:
        """The passages of a span that has ended, and its bytes; None without bytes, or if they cannot be read."""
        if head.body is None:
            return attribute_passages(head.attributes), None
        if head.sequence == 1 and is_conversation(head):
            self._remember((head.rollout, head.attempt), 1)
        try:
            body, base = view.body(head.body, self._bases)
        except (TapeError, *codec.DECODE_ERRORS) as error:
            _log.error("the texts of a call are not in the index: %s", error)
            return [], None
        self._keep(base)
        request = _decoded(body.request, body.request_headers)
        response = _decoded(body.response, body.response_headers)
        said = call_passages(head, request, response, lambda: self._first_call(view, head) in (head.sequence, None))
        return said, body

    def _keep(self, base: DeltaBase) -> None:
        before = self._bases.pop(base.number, None)
        self._bases[base.number] = base
        self._size += base.size - (0 if before is None else before.size)
        while self._size > _BASES_BYTES:
            _, oldest = self._bases.popitem(last=False)
            self._size -= oldest.size

    def _first_call(self, view: TapeView, head: SpanRecord) -> int | None:
        """The sequence of the attempt's first call of a conversation."""
        name = head.rollout, head.attempt
        found = self._first_calls.get(name)
        after = 0
        while found is None and (spans := view.spans(*name, after, 1)):
            after += 1
            if is_conversation(spans[0]):
                found = after
                self._remember(name, found)
        return found

    def _remember(self, name: tuple[str, str], first_call: int) -> None:
        self._first_calls[name] = first_call
        if len(self._first_calls) > _ATTEMPTS:
            self._first_calls.popitem(last=False)


def _decoded(body: bytes, headers: bytes) -> bytes:
    if b"content-encoding" in headers.lower() and (packed := encoding(header_lines(headers))):
        return decode_body(body, packed)[0]
    return body
