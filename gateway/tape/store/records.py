"""The stored records of a call, an attempt and a rollout, position by position: append, never reorder.

The calls of an agent resemble each other. The values that they share (`STYLE`: dialect, path, model, how they end) are
stored once on the tape under a number, from their second appearance on. A summary names the number and holds only its
own values (`OWN`); a summary whose style is not in the table holds it itself. The end is stored as the duration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_args

from penstock.gateway.model.base import Mode, Noun, Origin
from penstock.gateway.model.rollout import (
    COMPUTED,
    Attempt,
    AttemptStatus,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Totals,
)
from penstock.gateway.model.span import Estimate, Span, SpanStatus, Usage, refused, span_id, trace_id
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.tokens import lacks_token_counts

STYLE = (
    "kind",
    "status",
    "dialect",
    "method",
    "path",
    "upstream",
    "http_status",
    "error",
    "model",
    "model_served",
    "stream",
    "finish",
    "choices",
    "agent",
    "truncated",
    "name",
)
OWN = (
    "start_ns",
    "end_ns",
    "first_byte_ns",
    "request_bytes",
    "response_bytes",
    "body",
    "usage",
    "response_id",
    "tool_calls",
    "retry_of",
    "trace_id",
    "parent_id",
    "versions",
    "arm",
    "attributes",
    "span_id",
    "estimate",
)
ATTEMPT = codec.fields(Attempt, skip=("rollout", "id"))
ROLLOUT = codec.fields(Rollout, skip=("id", "input", "metadata"))
TOTALS = codec.fields(Totals, skip=COMPUTED)
USAGE = codec.fields(Usage)
ESTIMATE = codec.fields(Estimate)
CONFIG = codec.fields(RolloutConfig)
OUTCOME = codec.fields(Outcome)

N = TypeVar("N", bound=Noun)
Style = Sequence[Any]

STYLE_DEFAULTS: list[Any] = [None] * len(STYLE)
_OWN_DEFAULTS = [None, *codec.defaults(Span, list(OWN))]
_UNCOUNTED: dict[str, Any] = dict.fromkeys(USAGE)
_UNGUESSED: dict[str, Any] = dict.fromkeys(ESTIMATE)
_SPAN = codec.fields(Span)
_SPAN_DEFAULTS = {name: field.default for name, field in Span.model_fields.items() if not field.is_required()}
_SEQUENCE, _CREATED, _SEEN, _ENDED, _STATUS, _TOTALS = map(
    ATTEMPT.index, ("sequence", "created_ns", "last_seen_ns", "ended_ns", "status", "totals")
)
_MADE, _CONFIG, _STANDS = map(ROLLOUT.index, ("created_ns", "config", "status"))
_ENDS: tuple[str, ...] = tuple(AttemptStatus)
_LISTS: dict[str, tuple[str, ...]] = {
    "origin": get_args(Origin),
    "mode": get_args(Mode),
    "status": tuple(RolloutStatus),
}
"""Values of a rollout that are stored as a place in a list. These lists, and `_ENDS`, are only ever appended to."""
_NUMBERED = [(ROLLOUT.index(name), {value: at for at, value in enumerate(known)}) for name, known in _LISTS.items()]
_USUAL = RolloutConfig()
_ROLLOUT_DEFAULTS = [None, *codec.defaults(Rollout, ROLLOUT)]
_ROLLOUT_DEFAULTS[1 + _CONFIG] = None
_ATTEMPT_DEFAULTS = [None, *codec.defaults(Attempt, ATTEMPT)]
_ATTEMPT_DEFAULTS[1 + _TOTALS] = [0] * len(TOTALS)
_BODY = 1 + OWN.index("body")
_OK = SpanStatus.OK.value


@dataclass(slots=True, eq=False)
class SpanEntry:
    """A call to be written to the tape: first when it has run for a moment (`status` open) and again when it is over.

    The fields are those of `Span`; `sequence` is 0 until the store has given it one.
    """

    rollout: str
    attempt: str
    origin: Origin = "header"
    mode: Mode = "online"
    sequence: int = 0
    status: str = "open"
    start_ns: int = 0
    end_ns: int | None = None
    first_byte_ns: int | None = None
    dialect: str = "opaque"
    method: str = "POST"
    path: str = ""
    upstream: str | None = None
    http_status: int | None = None
    error: str | None = None
    model: str | None = None
    model_served: str | None = None
    stream: bool = False
    finish: str | None = None
    response_id: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    choices: int = 0
    agent: str | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    truncated: bool = False
    retry_of: int | None = None
    trace_id: str | None = None
    parent_id: str | None = None
    kind: str = "llm"
    name: str | None = None
    versions: Mapping[str, str] | None = None
    arm: str | None = None
    attributes: dict[str, Any] | None = None
    span_id: str | None = None
    estimate: list[int | None] | None = None
    """The values of `ESTIMATE`, in its order."""
    body: StoredBody | None = None
    retried: bool = False
    """The client says that it repeats an earlier call."""
    uncounted_tries: bool = False
    """True if its client does not count its retries: a call like one that failed repeats that one."""
    gap: bool = False
    """The call was answered but its bytes are lost: counted, not kept."""
    ambiguous: bool = False
    """The call could belong to another implicit rollout as well."""
    partial_tokens: int | None = None
    """About how many tokens of a broken-off answer came, if budgets count it."""
    pin: Callable[[Any, SpanEntry], None] | None = None
    settle: Callable[[Any, SpanEntry], None] | None = None
    follow: Callable[[Any, SpanEntry], None] | None = None
    """Functions that run in the same transaction once the entry is written (`store.transaction`, which knows of
    entries)."""
    deferred: str | None = None
    """The name of its answer (`dialects.responses`) if another call will fetch that: until then the call is open."""
    batch: str | None = None
    """The name of the batch that the call has made (`dialects.batches`), or of the hosted agent's session that it has
    given work, if any: what they use is counted when it is told."""

    def style(self) -> tuple[Any, ...]:
        """Return the values of `STYLE`, in its order."""
        return (
            self.kind,
            self.status if self.deferred is None else SpanStatus.OPEN.value,
            self.dialect,
            self.method,
            self.path,
            self.upstream,
            self.http_status,
            self.error if self.deferred is None else None,
            self.model,
            self.model_served,
            self.stream,
            self.finish,
            self.choices,
            self.agent,
            self.truncated,
            self.name,
        )

    def summary(self, style: int | Style, body: int | None, usage: list[Any] | None) -> bytes:
        """Return the stored summary: the style, then the values of `OWN` in its order."""
        took = None if self.end_ns is None or self.deferred is not None else self.end_ns - self.start_ns
        return codec.encode(
            [
                style, self.start_ns, took, self.first_byte_ns,
                self.request_bytes, self.response_bytes, body, usage, self.response_id, self.tool_calls, self.retry_of,
                self.trace_id, self.parent_id, self.versions, self.arm, self.attributes, self.span_id, self.estimate,
            ],
            _OWN_DEFAULTS,
        )  # fmt: skip


def interrupted_summary(summary: bytes, style_of: Callable[[int], Style], body: int | None) -> tuple[Style, list[Any]]:
    """Return the style and own values of an open call whose gateway died."""
    own = padded(summary, _OWN_DEFAULTS)
    style = list(style_of(own[0]) if isinstance(own[0], int) else own[0])
    style[STYLE.index("status")], style[STYLE.index("error")] = SpanStatus.INTERRUPTED.value, "gateway_died"
    own[_BODY] = body
    return style, own


def encode_summary(style: int | Style, own: list[Any]) -> bytes:
    """Return the stored summary of a style and own values."""
    return codec.encode([style, *own[1:]], _OWN_DEFAULTS)


def body_of(summary: bytes) -> int | None:
    """Return the number of the body that a summary names; None for none."""
    own = codec.decode(summary)
    return own[_BODY] if len(own) > _BODY else None


def padded(record: bytes, defaults: list[Any]) -> list[Any]:
    """Return the positions of a record, including the trailing defaults that were cut off."""
    values = codec.decode(record)
    return values + defaults[len(values) :]


def kind_of(summary: bytes, style_of: Callable[[int], Style]) -> str:
    """Return the kind of a summary's span."""
    style = codec.decode(summary)[0]
    return (style_of(style) if isinstance(style, int) else style)[0]


def span_from(key: bytes, summary: bytes, style_of: Callable[[int], Style]) -> Span:
    """Return a summary as a `Span`."""
    rollout, attempt, sequence = keys.split_summary_key(key)
    style, *own = codec.decode(summary)
    found = _SPAN_DEFAULTS | dict(zip(OWN, own, strict=False))
    found |= zip(STYLE, style_of(style) if isinstance(style, int) else style, strict=False)
    if found["usage"] is not None:
        found["usage"] = _made(Usage, _UNCOUNTED | dict(zip(USAGE, found["usage"], strict=False)))
    if found["estimate"] is not None:
        found["estimate"] = _made(Estimate, _UNGUESSED | dict(zip(ESTIMATE, found["estimate"], strict=False)))
    if found["end_ns"] is not None:
        found["end_ns"] += found["start_ns"]
    found["status"] = SpanStatus(found["status"])
    trace = found["trace_id"] = found["trace_id"] or trace_id(rollout, attempt)
    found["span_id"] = found["span_id"] or span_id(trace, rollout, attempt, sequence)
    found |= {"rollout": rollout, "attempt": attempt, "sequence": sequence}
    return _made(Span, {name: found[name] for name in _SPAN})


def _made(kind: type[N], values: dict[str, Any]) -> N:
    """Return a noun of checked values for all its fields, in their order: as `model_construct` does, at a tenth of its
    cost. Every read of a span makes one."""
    made = kind.__new__(kind)
    object.__setattr__(made, "__dict__", values)
    object.__setattr__(made, "__pydantic_fields_set__", set(values))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


class Origins(NamedTuple):
    """The values of a rollout that the records of its attempts are relative to, because small numbers are short."""

    number: int
    """The cursor of its creation."""
    created_ns: int


def attempt_record(values: list[Any], cursors: Sequence[int], rollout: Origins) -> bytes:
    """Return the stored attempt: the cursors of the summaries of its last block, then the values of `ATTEMPT`. Cursors
    are relative to the rollout's number, the creation to the rollout's, the last sign of life and the end to the
    creation."""
    stored = values.copy()
    stored[_STATUS] = _ENDS.index(stored[_STATUS])
    stored[_SEEN] -= stored[_CREATED]
    if stored[_ENDED] is not None:
        stored[_ENDED] -= stored[_CREATED]
    stored[_CREATED] -= rollout.created_ns
    sums = stored[_TOTALS]
    end = len(sums)
    while end and not sums[end - 1]:
        end -= 1
    stored[_TOTALS] = sums[:end]
    near = [cursor and cursor - rollout.number for cursor in cursors]
    return codec.encode([near, *stored], _ATTEMPT_DEFAULTS)


def attempt_values(record: bytes, rollout: Origins) -> tuple[list[Any], list[int]]:
    """The inverse of `attempt_record`: return the values of `ATTEMPT` and the cursors of its last block."""
    near, *values = padded(record, _ATTEMPT_DEFAULTS)
    values[_STATUS] = _ENDS[values[_STATUS]]
    values[_CREATED] += rollout.created_ns
    values[_SEEN] += values[_CREATED]
    if values[_ENDED] is not None:
        values[_ENDED] += values[_CREATED]
    sums = values[_TOTALS]
    values[_TOTALS] = [*sums, *[0] * (len(TOTALS) - len(sums))]
    return values, [cursor and cursor + rollout.number for cursor in near]


def attempt_sequence(record: bytes) -> int:
    """Return the sequence of a stored attempt."""
    return padded(record, _ATTEMPT_DEFAULTS)[1 + _SEQUENCE]


def attempt_of(rollout: str, attempt: str, values: list[Any]) -> Attempt:
    """Return the values of `ATTEMPT` as an `Attempt`."""
    found = dict(zip(ATTEMPT, values, strict=False))
    found["totals"] = dict(zip(TOTALS, found["totals"], strict=False))
    if found["outcome"] is not None:
        *known, output = found["outcome"]
        found["outcome"] = dict(zip(OUTCOME, (*known, None if output is None else json.loads(output)), strict=True))
    return Attempt(rollout=rollout, id=attempt, **found)


def outcome_values(outcome: Outcome) -> list[Any]:
    """Return an outcome as an attempt stores it. The agent's output may be any JSON, with numbers that msgpack does not
    have."""
    *known, output = codec.values(outcome, OUTCOME)
    return [*known, None if output is None else _json(output).decode()]


def origins_of(record: bytes) -> Origins:
    """Return the values of a rollout's record that its attempts are relative to."""
    values = padded(record, _ROLLOUT_DEFAULTS)
    return Origins(values[0], values[1 + _MADE])


def rollout_status(record: bytes) -> RolloutStatus:
    """Return the status of a rollout's record."""
    return RolloutStatus(_LISTS["status"][padded(record, _ROLLOUT_DEFAULTS)[1 + _STANDS]])


def rollout_from(rollout: str, record: bytes, task: bytes | None) -> tuple[int, Rollout]:
    """Return (number, rollout) of a rollout's record and its task."""
    number, *values = padded(record, _ROLLOUT_DEFAULTS)
    found = dict(zip(ROLLOUT, values, strict=True))
    found |= {name: known[found[name]] for name, known in _LISTS.items()}
    found["config"] = dict(zip(CONFIG, found["config"] or (), strict=False))
    said, metadata = (None, None) if task is None else json.loads(task)
    return number, Rollout(id=rollout, input=said, metadata=metadata, **found)


def rollout_record(number: int, rollout: Rollout) -> bytes:
    """Return the changing values of a rollout, after its number."""
    held = vars(rollout)
    stored = [held[name] for name in ROLLOUT]
    for place, places in _NUMBERED:
        stored[place] = places[stored[place]]
    stored[_CONFIG] = None if rollout.config == _USUAL else codec.values(rollout.config, CONFIG)
    return codec.encode([number, *stored], _ROLLOUT_DEFAULTS)


def task_record(said: Any, metadata: dict[str, Any] | None) -> bytes | None:
    """Return the values of a rollout that never change and may be large; None when there are none."""
    return None if said is None and metadata is None else _json([said, metadata])


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def new_attempt(sequence: int, created_ns: int) -> list[Any]:
    """Return the values of `ATTEMPT` for a new attempt."""
    made = _ATTEMPT_DEFAULTS[1:]
    made[_SEQUENCE], made[_CREATED] = sequence, created_ns
    return made


def add_to_totals(sums: list[int], entry: SpanEntry, usage: list[Any] | None = None) -> None:
    """Add a finished call to the values of `TOTALS`, in its order; spans of other kinds are not counted."""
    if entry.kind != "llm":
        return
    status = entry.status
    sums[0] += 1
    if usage is not None:
        sums[3] += usage[0] or 0
        sums[4] += usage[1] or 0
    sums[5] += entry.tool_calls
    sums[6] += entry.gap
    if usage is None or usage[0] is None or usage[1] is None:
        sums[7] += lacks_token_counts(entry, by_name(entry.dialect))
    sums[8] += entry.ambiguous
    if status == _OK:
        if sums[9] and by_name(entry.dialect).generates:
            # The agent has succeeded in another way: earlier refusals are no errors.
            sums[1] -= sums[9]
            sums[9] = 0
        return
    sums[1] += status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
    sums[2] += status == SpanStatus.CANCELLED
    if status == SpanStatus.ERROR:
        sums[9] += refused(entry)
