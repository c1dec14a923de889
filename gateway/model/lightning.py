"""Agent Lightning 0.3's nouns on the wire, and what the tape keeps of them beside the gateway's own nouns. Pure.

A rollout or an attempt is the gateway's; `RolloutExtra` and `AttemptExtra` hold what Agent Lightning has besides.
Answers are plain JSON objects. A word that Agent Lightning lacks becomes the nearest one that it has; the gateway's own
is then in the metadata, under `penstock.status`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from operator import eq, itemgetter
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from penstock.gateway.model.base import ID_PATTERN, LONGEST_S, Id, Mode
from penstock.gateway.model.queue import finite
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Retry, Rollout, RolloutConfig, RolloutStatus, Worker

Json = dict[str, Any]
RolloutWord = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptWord = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerWord = Literal["idle", "busy", "unknown"]
TaskMode = Literal["train", "val", "test"]
OWN_STATUS: Final = "penstock.status"
"""The key of metadata with the gateway's own word for a status."""
LATEST: Final = "latest"
"""Stands for the newest attempt of a rollout."""
LEAST_S: Final = 0.001
"""A limit of no time at all, in seconds: the gateway's own are above 0."""
_LIVE_NS: Final = 2**63
_ROLLOUT_WORDS: Final[dict[str, RolloutWord]] = {"ended": "succeeded"}
_ATTEMPT_WORDS: Final[dict[str, AttemptWord]] = {"ended": "succeeded", "cancelled": "failed", "environment": "failed"}


def seconds(ns: int | None) -> float | None:
    """Seconds of nanoseconds; the nearest float."""
    return None if ns is None else ns / 10**9


def nanoseconds(given: float) -> int:
    """Nanoseconds of seconds, within 64 bits; `seconds` gives the same float back."""
    return max(-_LIVE_NS, min(_LIVE_NS - 1, round(Fraction(given) * 10**9)))


_AS_TEXT: Final = b"\xc1"
"""Begins a record that is JSON text; MessagePack never uses it."""


def pack(value: Any) -> bytes:
    """Pack a JSON value or a record of this module. JSON may have numbers and texts that MessagePack has not."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return _AS_TEXT + json.dumps(msgspec.to_builtins(value)).encode()


def unpack(record: bytes) -> Any:
    """The inverse of `pack`; records of this module become objects."""
    return json.loads(record[1:]) if record[:1] == _AS_TEXT else msgspec.msgpack.decode(record)


def encode(value: Any) -> bytes:
    """A JSON value as text."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value).encode()


# -- requests ----------------------------------------------------------------------------------------------------------
#
# Unknown fields are passed over, as Agent Lightning's own server does.

Finite = Annotated[float, Field(allow_inf_nan=False)]
AnyJson = Annotated[Any, AfterValidator(finite)]
JsonObject = Annotated[Json, AfterValidator(finite)]


class LightningConfig(BaseModel):
    """The limits of a rollout in Agent Lightning's words."""

    timeout_seconds: Finite | None = None
    unresponsive_seconds: Finite | None = None
    max_attempts: int = Field(default=1, ge=1)
    retry_condition: list[AttemptWord] = Field(default_factory=list[AttemptWord])

    def own(self, before: RolloutConfig | None = None) -> RolloutConfig:
        """The limits in the gateway's words; what Agent Lightning has no word for stays as it was `before`."""
        kept = {} if before is None else {name: getattr(before, name) for name in ("reward_on_failure", "versions")}
        return RolloutConfig(
            timeout_s=_limit(self.timeout_seconds),
            unresponsive_s=_limit(self.unresponsive_seconds),
            max_attempts=min(self.max_attempts, 1000),
            retry_on=[one for one in _RETRIES if one in self.retry_condition],
            **kept,
        )


_RETRIES: Final[tuple[Retry, ...]] = get_args(Retry)


def _limit(given: float | None) -> float | None:
    return None if given is None else min(max(given, LEAST_S), LONGEST_S)


class LightningTask(BaseModel):
    """A task to be queued."""

    input: AnyJson
    mode: TaskMode | None = None
    resources_id: Id | None = None
    config: LightningConfig | None = None
    metadata: JsonObject | None = None


class LightningStart(LightningTask):
    """A task that its worker begins at once."""

    worker_id: Id | None = None


class LightningEnqueue(BaseModel):
    """Tasks to be queued."""

    rollouts: list[LightningTask] = Field(max_length=10_000)


class LightningDequeue(BaseModel):
    """A worker that asks for work."""

    limit: int = 1
    worker_id: Id | None = None


class LightningAttempt(BaseModel):
    """A worker that begins another attempt."""

    worker_id: Id | None = None


class RolloutUpdate(BaseModel):
    """Changes of a rollout. A field that is left out stays as it is, null clears it."""

    input: AnyJson = None
    mode: TaskMode | None = None
    resources_id: Id | None = None
    status: RolloutWord | None = None
    config: LightningConfig | None = None
    metadata: JsonObject | None = None


class AttemptUpdate(BaseModel):
    """Changes of an attempt. A field that is left out stays as it is."""

    status: AttemptWord | None = None
    worker_id: Id | None = None
    last_heartbeat_time: Finite | None = None
    metadata: JsonObject | None = None


class WorkerUpdate(BaseModel):
    """A worker's sign of life."""

    heartbeat_stats: JsonObject | None = None


class RolloutWait(BaseModel):
    """Rollouts whose end is awaited."""

    rollout_ids: list[str] = Field(max_length=100_000)
    timeout: Finite | None = None


class SequenceRequest(BaseModel):
    """The attempt that a span is to be numbered for."""

    rollout_id: str
    attempt_id: str


class StoreListing(BaseModel):
    """The part of a list that is asked for, and its order."""

    limit: int = -1
    offset: int = 0
    sort_by: str | None = None
    sort_order: Literal["asc", "desc"] = "asc"
    filter_logic: Literal["and", "or"] = "and"


class RolloutListing(StoreListing):
    """Rollouts that are asked for."""

    status_in: list[RolloutWord] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None


class AttemptListing(StoreListing):
    """Attempts that are asked for."""

    sort_by: str | None = "sequence_id"


class WorkerListing(StoreListing):
    """Workers that are asked for."""

    status_in: list[WorkerWord] | None = None
    worker_id_contains: str | None = None


class ResourceListing(StoreListing):
    """Resources that are asked for."""

    resources_id: str | None = None
    resources_id_contains: str | None = None


class SpanListing(StoreListing):
    """Spans of a rollout that are asked for."""

    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    sort_by: str | None = "sequence_id"


class LightningModel(BaseModel):
    """A model and its endpoint, as a resource."""

    resource_type: Literal["llm", "proxy_llm"]
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: JsonObject = Field(default_factory=Json)


class LightningPrompt(BaseModel):
    """A template of a prompt, as a resource."""

    resource_type: Literal["prompt_template"]
    template: str
    engine: Literal["jinja", "f-string", "poml"]


NAMED_RESOURCES: Final = TypeAdapter(
    dict[str, Annotated[LightningModel | LightningPrompt, Field(discriminator="resource_type")]]
)
"""Resources by name."""

# A span is checked by msgspec: it is the request that comes most often.

AttributeValue = str | bool | int | float | list[str | bool | int | float]


class SpanOutcome(msgspec.Struct):
    """The status of a span."""

    status_code: Literal["UNSET", "OK", "ERROR"]
    description: str | None = None


class SpanAddress(msgspec.Struct):
    """The ids of a span, as others refer to it."""

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: dict[str, str]


class SpanEvent(msgspec.Struct):
    """Something that happened in a span."""

    name: str
    attributes: dict[str, AttributeValue]
    timestamp: float | None = None


class SpanLink(msgspec.Struct):
    """A reference to another span."""

    context: SpanAddress
    attributes: dict[str, AttributeValue] | None = None


class SpanResource(msgspec.Struct):
    """The source of a span."""

    attributes: dict[str, AttributeValue]
    schema_url: str


class LightningSpan(msgspec.Struct):
    """A span, as it is sent: fields that are not here are kept as they are."""

    rollout_id: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
    attempt_id: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
    sequence_id: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
    trace_id: str
    span_id: Annotated[str, msgspec.Meta(max_length=128)]
    parent_id: str | None
    name: str
    status: SpanOutcome
    attributes: dict[str, AttributeValue]
    events: list[SpanEvent]
    links: list[SpanLink]
    start_time: float | None
    end_time: float | None
    context: SpanAddress | None
    parent: SpanAddress | None
    resource: SpanResource


def completed(span: Json) -> Json:
    """A checked span with the fields that may be left out; in place."""
    span["status"].setdefault("description", None)
    for event in span["events"]:
        event.setdefault("timestamp", None)
    for link in span["links"]:
        link.setdefault("attributes", None)
    return span


# -- what the tape keeps besides ---------------------------------------------------------------------------------------


class RolloutExtra(msgspec.Struct):
    """What Agent Lightning has of a rollout besides the gateway's own noun."""

    mode: str | None = None
    resources_id: str | None = None
    config: Json | None = None


class AttemptExtra(msgspec.Struct):
    """What Agent Lightning has of an attempt besides the gateway's own noun."""

    worker_id: str | None = None
    metadata: Json | None = None


def own_mode(mode: TaskMode | None) -> Mode:
    """The gateway's mode of a task; one that says nothing is for training."""
    return mode or "train"


# -- answers -----------------------------------------------------------------------------------------------------------


def _with_status(metadata: Json | None, own: str, word: str) -> Json | None:
    return metadata if own == word else (metadata or {}) | {OWN_STATUS: own}


def rollout_word(status: RolloutStatus) -> RolloutWord:
    """Agent Lightning's word for a state of a rollout."""
    return _ROLLOUT_WORDS.get(status) or status.value  # pyright: ignore[reportReturnType]


def attempt_word(status: AttemptStatus) -> AttemptWord:
    """Agent Lightning's word for a state of an attempt."""
    return _ATTEMPT_WORDS.get(status) or status.value  # pyright: ignore[reportReturnType]


def rollout_answer(rollout: Rollout, extra: RolloutExtra | None, attempt: Json | None = None) -> Json:
    """A rollout in Agent Lightning's words. `extra`: None for one that did not come from it; `attempt`: the newest."""
    word, config = rollout_word(rollout.status), rollout.config
    of_ours = {
        "timeout_seconds": config.timeout_s,
        "unresponsive_seconds": config.unresponsive_s,
        "max_attempts": config.max_attempts,
        "retry_condition": list(config.retry_on),
    }
    mode = rollout.mode if rollout.mode != "online" else None
    found: Json = {
        "rollout_id": rollout.id,
        "input": rollout.input,
        "start_time": seconds(rollout.created_ns),
        "end_time": seconds(rollout.ended_ns),
        "mode": mode if extra is None else extra.mode,
        "resources_id": None if extra is None else extra.resources_id,
        "status": word,
        "config": of_ours if extra is None or extra.config is None else extra.config,
        "metadata": _with_status(rollout.metadata, rollout.status.value, word),
    }
    # Its client takes anything with this key for a rollout that was tried.
    return found if attempt is None else found | {"attempt": attempt}


def attempt_answer(attempt: Attempt, extra: AttemptExtra | None) -> Json:
    """An attempt in Agent Lightning's words. `extra`: None for one that did not come from it."""
    word = attempt_word(attempt.status)
    ended = attempt.ended_ns if word in ("failed", "succeeded") else None
    heard = None if attempt.last_seen_ns == attempt.created_ns else attempt.last_seen_ns
    return {
        "rollout_id": attempt.rollout,
        "attempt_id": attempt.id,
        "sequence_id": attempt.sequence,
        "start_time": seconds(attempt.created_ns),
        "end_time": seconds(ended),
        "status": word,
        "worker_id": attempt.worker if extra is None else extra.worker_id,
        "last_heartbeat_time": seconds(heard),
        "metadata": _with_status(None if extra is None else extra.metadata, attempt.status.value, word),
    }


def new_worker(name: str) -> Json:
    """A worker of which nothing is known yet."""
    times = dict.fromkeys(f"last_{what}_time" for what in ("heartbeat", "dequeue", "busy", "idle"))
    current = {"current_rollout_id": None, "current_attempt_id": None}
    return {"worker_id": name, "status": "unknown", "heartbeat_stats": None, **times, **current}


def worker_answer(worker: Worker) -> Json:
    """One of the gateway's own workers in Agent Lightning's words."""
    rollout, _, attempt = worker.attempts[-1].partition("/") if worker.attempts else (None, None, None)
    return new_worker(worker.id) | {
        "status": "busy" if worker.attempts else "idle",
        "last_heartbeat_time": seconds(worker.last_seen_ns),
        "current_rollout_id": rollout,
        "current_attempt_id": attempt,
    }


# -- lists -------------------------------------------------------------------------------------------------------------

FIELDS: Final[dict[type[StoreListing], tuple[str, ...]]] = {
    RolloutListing: tuple(rollout_answer(Rollout(id="r"), None)),
    AttemptListing: tuple(attempt_answer(Attempt(rollout="r", id="a"), None)),
    WorkerListing: tuple(new_worker("w")),
    ResourceListing: ("resources_id", "create_time", "update_time", "version", "resources"),
    SpanListing: tuple(LightningSpan.__struct_fields__),
}
"""The fields that a list may be sorted by."""
Condition = Callable[[Any, Any], bool]
_CONDITIONS: Final[dict[str, Condition]] = {
    "": eq,
    "_in": lambda value, wanted: value in wanted,
    "_contains": lambda value, wanted: value is not None and wanted in value,
}


def fits(asked: StoreListing) -> Callable[[Json], bool]:
    """A test of an object against what a list asks for: each field of the request by its name and ending."""
    tests: list[tuple[str, Condition, Any]] = []
    for name in type(asked).model_fields.keys() - StoreListing.model_fields.keys() - _PLACES:
        if (wanted := getattr(asked, name)) is not None:
            end = next((end for end in ("_in", "_contains") if name.endswith(end)), "")
            tests.append((name.removesuffix(end), _CONDITIONS[end], wanted))
    join = all if asked.filter_logic == "and" else any
    return lambda found: not tests or join(test(found[name], wanted) for name, test, wanted in tests)


_PLACES: Final = {"rollout_id", "attempt_id"}
"""Fields of a request that say where to look."""


def listed(found: Iterable[Json], asked: StoreListing) -> Json:
    """A page of those that fit, in the order that was asked for, with the number of all."""
    test = fits(asked)
    rows = [one for one in found if test(one)]
    if asked.sort_by is not None:
        rows.sort(key=_sort_key(rows, asked.sort_by), reverse=asked.sort_order == "desc")
    return page_of(rows, len(rows), asked)


def page_of(rows: Sequence[Json], total: int, asked: StoreListing) -> Json:
    """The page of all rows that was asked for."""
    end = None if asked.limit < 0 else asked.offset + asked.limit
    return {"items": rows[asked.offset : end], "limit": asked.limit, "offset": asked.offset, "total": total}


def _sort_key(rows: Sequence[Json], name: str) -> Callable[[Json], Any]:
    """The key of a field. A missing time sorts last, any other missing value first; objects sort by their JSON."""
    value_of = itemgetter(name)
    if name.endswith("_time"):
        return lambda row: float("inf") if value_of(row) is None else value_of(row)
    kinds: set[Any] = {type(value_of(row)) for row in rows}
    if kinds <= {int, type(None)} or kinds <= {str, type(None)}:
        return lambda row: (value_of(row) is not None, value_of(row) or 0)
    return lambda row: repr(value_of(row))
