"""`penstock import langfuse`: traces of Langfuse with their observations and scores, as rollouts, spans and rewards.

A trace becomes the rollout `langfuse-ID` with one attempt: a span for the trace, one for each observation, with the
names of the GenAI conventions, and a reward for each score that is a number. Read are what its public API answers, and
its exports (traces, observations, enriched observations, scores), whose fields are written in camel or in snake case.
Usage is added up as Langfuse shows it: the kinds whose names have `input` in them are the input, those with `output`
the output.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

from cyclopts import Parameter

from penstock.console.commands.import_rollouts import (
    INPUT,
    OUTPUT,
    Fields,
    ForeignServer,
    ImportedAttempt,
    ImportedReward,
    ImportReport,
    OddRecordError,
    Record,
    a_span_id,
    an_id,
    as_list,
    as_object,
    attributes,
    fields_of,
    file_records,
    fresh_page,
    instant_ns,
    messages,
    needed,
    number,
    plain,
    run_import,
    text,
)
from penstock.console.commands.imports import ImportedSpan, Value
from penstock.gateway.client.console import LOCAL, CommandError, Url

PREFIX: Final = "langfuse-"
ATTEMPT: Final = "a1"
PAGE: Final = 50
PUBLIC_KEY, SECRET_KEY = "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"
OPERATIONS: Final = {
    "GENERATION": "chat",
    "EMBEDDING": "embeddings",
    "TOOL": "execute_tool",
    "AGENT": "invoke_agent",
    "RETRIEVER": "retrieval",
}
"""`gen_ai.operation.name` by the type of an observation; the others have none."""
MODEL_CALLS: Final = ("GENERATION", "EMBEDDING")
PARAMETERS: Final = ("temperature", "top_p", "top_k", "seed", "max_tokens", "frequency_penalty", "presence_penalty")
WORDS: Final = ("CATEGORICAL", "TEXT", "CORRECTION")
"""Types of scores that are no numbers."""


def langfuse(
    *sources: str,
    reward: Annotated[str, Parameter(allow_leading_hyphen=True)] = "reward",
    gateway: Url = LOCAL,
) -> None:
    """Import traces of Langfuse with their observations and scores.

    Traces that are imported already get what is new of them, and nothing twice.

    Parameters
    ----------
    sources
        URL of its server (the keys come from LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY), or files of one export:
        JSON or JSON lines of traces, observations and scores, gzip or not.
    reward
        Name of the score that is the reward; the others are dimensions.
    """
    if not sources:
        raise CommandError("say what to import: the URL of a server of Langfuse, or files of an export", 2)

    async def attempts(report: ImportReport) -> AsyncIterator[ImportedAttempt]:
        if sources[0].startswith(("http://", "https://")):
            async for records in _of_server(sources[0]):
                for one in langfuse_attempts(records, report, reward):
                    yield one
            return
        records = (record for source in sources for record in file_records(Path(source), report))
        for one in langfuse_attempts(records, report, reward):
            yield one

    run_import(gateway, attempts)


async def _of_server(url: str) -> AsyncIterator[list[Record]]:
    """The records of each trace, newest first."""
    from aiohttp import BasicAuth, ClientSession

    keys = [os.environ.get(name, "") for name in (PUBLIC_KEY, SECRET_KEY)]
    if not all(keys):
        raise CommandError(f"a server of Langfuse wants keys: set {PUBLIC_KEY} and {SECRET_KEY}")
    server = ForeignServer(
        url, {"Authorization": BasicAuth(*keys).encode()}, f"check {PUBLIC_KEY} and {SECRET_KEY}: they belong to one "
        "project",
    )  # fmt: skip
    before = list[Any]()
    async with ClientSession() as session:
        for page in count(1):
            answer = as_object(await server.get(session, "/api/public/traces", page=page, limit=PAGE, fields="core"))
            found = as_list(answer.get("data"))
            if found is None:
                raise CommandError(f"{server.name}/api/public/traces did not answer a page of traces: is it Langfuse?")
            for one in fresh_page(found, before, server.name):
                if isinstance(id := as_object(one).get("id"), str):
                    whole = await server.get(session, f"/api/public/traces/{quote(id, safe='')}")
                    yield [Record(f"{server.name} {id}", whole if whole is not None else one)]
            if len(found) < PAGE:
                return
            before = found


# Out of records -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trace:
    about: Record | None = None
    observations: dict[str, Record] = field(default_factory=dict[str, Record])
    scores: dict[str, Record] = field(default_factory=dict[str, Record])


def langfuse_attempts(records: Iterable[Record], report: ImportReport, reward: str) -> Iterator[ImportedAttempt]:
    """Attempts made of traces, observations and scores, in any order; odd ones are left out. `reward`: name of the
    score that is the reward."""
    traces = dict[str, _Trace]()
    for record in records:
        for one in _spread(record):
            with report.reading(one.place):
                _collect(one, traces, report)
    for id, trace in traces.items():
        spans = list[ImportedSpan]()
        root = a_span_id(f"langfuse/{id}")
        for name, record in trace.observations.items():
            with report.reading(record.place):
                spans.append(_observation(name, record.value, root, trace.observations.keys()))
        place = Record(f"trace {id}", None) if trace.about is None else trace.about
        with report.reading(place.place):
            first = next(iter(trace.observations.values()), Record("", {})).value
            made = _root(id, place.value or {}, first, root, spans)
            rewards = list(_rewards(trace, report, reward, {span.span_id for span in spans}))
            yield ImportedAttempt(an_id(id, PREFIX), ATTEMPT, [made, *spans], rewards)


def _spread(record: Record) -> Iterator[Record]:
    """A record, or those of a page, with the names of its fields in one way of writing."""
    value = as_object(record.value)
    if (data := as_list(value.get("data"))) is not None and "id" not in value:
        for at, one in enumerate(data):
            yield from _spread(Record(f"{record.place}.data[{at}]", one))
    elif value:
        yield Record(record.place, {_camel(name): one for name, one in value.items()})
    else:
        yield record


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _collect(record: Record, traces: dict[str, _Trace], report: ImportReport) -> None:
    value = fields_of(record.value)
    id = needed(value, "id")
    if "dataType" in value or ("value" in value and "traceId" in value and "startTime" not in value):
        traces.setdefault(needed(value, "traceId"), _Trace()).scores[id] = record
    elif "startTime" in value:
        traces.setdefault(needed(value, "traceId"), _Trace()).observations[id] = record
    elif "timestamp" in value:
        traces.setdefault(id, _Trace()).about = record
        for name in ("observations", "scores"):
            for at, one in enumerate(as_list(value.get(name)) or []):
                # A list of traces has the ids only, a trace the whole.
                if not isinstance(one, str):
                    for inner in _spread(Record(f"{record.place}.{name}[{at}]", one)):
                        with report.reading(inner.place):
                            _collect(Record(inner.place, {"traceId": id, **fields_of(inner.value)}), traces, report)
    else:
        raise OddRecordError("it is neither a trace nor an observation or a score")


def _root(id: str, trace: Fields, first: Fields, span_id: str, spans: list[ImportedSpan]) -> ImportedSpan:
    """The span of a trace. `first`: an observation, which in an enriched export has what is known of the trace."""
    started = instant_ns(trace.get("timestamp"), "timestamp") or min((span.start_ns for span in spans), default=None)
    if started is None:
        raise OddRecordError(f"trace {id} has neither a timestamp nor an observation that can be read")
    name = text(trace, "name") or text(first, "traceName") or "trace"
    said = attributes(
        gen_ai__operation__name="invoke_agent", langfuse__trace__id=id,
        session__id=text(trace, "sessionId") or text(first, "sessionId"),
        user__id=text(trace, "userId") or text(first, "userId"), langfuse__tags=trace.get("tags") or first.get("tags"),
        langfuse__release=trace.get("release") or first.get("release"), langfuse__version=trace.get("version"),
        langfuse__environment=trace.get("environment") or first.get("environment"),
        langfuse__metadata=_parsed(trace.get("metadata")),
    )  # fmt: skip
    said |= _in_and_out(trace)
    ended = max([started, *(span.end_ns for span in spans)])
    return ImportedSpan(span_id, name, min([started, *(span.start_ns for span in spans)]), ended, None, said)


def _in_and_out(record: Fields) -> dict[str, Value]:
    given = {INPUT: record.get("input"), OUTPUT: record.get("output")}
    return {name: plain(value) for name, value in given.items() if value not in (None, "")}


def _parsed(value: Any) -> Any:
    """A value that an export may have written as text of JSON."""
    import orjson

    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _observation(id: str, value: Fields, root: str, known: Iterable[str]) -> ImportedSpan:
    kind = (text(value, "type") or "SPAN").upper()
    started = instant_ns(value.get("startTime"), "startTime")
    if started is None:
        raise OddRecordError("startTime is missing")
    ended = instant_ns(value.get("endTime"), "endTime") or started
    parent = text(value, "parentObservationId")
    name, model = text(value, "name") or kind.lower(), text(value, "model") or text(value, "providedModelName")
    said = attributes(
        gen_ai__operation__name=OPERATIONS.get(kind), langfuse__observation__type=kind,
        langfuse__observation__id=None if a_span_id(id) == id else id,
        langfuse__level=text(value, "level"), langfuse__version=text(value, "version"),
        langfuse__metadata=_parsed(value.get("metadata")), langfuse__prompt__name=text(value, "promptName"),
        langfuse__prompt__version=value.get("promptVersion"),
    )  # fmt: skip
    if kind in MODEL_CALLS:
        said |= _model_call(value, model)
    elif kind == "TOOL":
        said |= attributes(
            gen_ai__tool__name=name, gen_ai__tool__call__arguments=_parsed(value.get("input")),
            gen_ai__tool__call__result=_parsed(value.get("output")),
        )  # fmt: skip
    else:
        said |= _in_and_out(value) | ({"gen_ai.agent.name": name} if kind == "AGENT" else {})
    failed = text(value, "level") == "ERROR"
    return ImportedSpan(
        a_span_id(id), name, started, max(started, ended),
        a_span_id(parent) if parent is not None and parent in known and parent != id else root, said,
        "client" if kind in MODEL_CALLS else "internal", (text(value, "statusMessage") or "error") if failed else None,
    )  # fmt: skip


def _model_call(value: Fields, model: str | None) -> dict[str, Value]:
    usage = _usage(value)
    asked = as_object(_parsed(value.get("modelParameters")))
    costs = fields_of(_parsed(value.get("costDetails")) or {}, "costDetails")
    # Its API says 0 where it knows no price.
    cost = costs.get("total") if costs else value.get("totalCost") or value.get("calculatedTotalCost") or None
    first = instant_ns(value.get("completionStartTime"), "completionStartTime")
    started = instant_ns(value.get("startTime"), "startTime") or 0
    known = {f"gen_ai__request__{name}": asked.get(name) for name in PARAMETERS}
    said = messages("gen_ai.input.messages", _parsed(value.get("input")), "user")
    said |= messages("gen_ai.output.messages", _parsed(value.get("output")), "assistant")
    return said | attributes(
        gen_ai__request__model=model,
        gen_ai__usage__input_tokens=_sum(usage, "input"), gen_ai__usage__output_tokens=_sum(usage, "output"),
        gen_ai__usage__total_tokens=usage.get("total"),
        gen_ai__usage__cache_read__input_tokens=_first(
            usage, "cache_read_input_tokens", "input_cached_tokens", "input_cache_read"),
        gen_ai__usage__cache_write__input_tokens=_first(
            usage, "cache_creation_input_tokens", "input_cache_creation", "input_cache_write"),
        gen_ai__usage__reasoning__output_tokens=_first(usage, "output_reasoning_tokens", "output_reasoning"),
        gen_ai__usage__cost=number(_numeric(cost), "costDetails.total"),
        gen_ai__response__time_to_first_chunk=max(0, first - started) / 1e9 if first else None, **known,
    )  # fmt: skip


def _usage(value: Fields) -> dict[str, int]:
    """Tokens by their kind. Raises `OddRecordError` where a count is none."""
    details = fields_of(_parsed(value.get("usageDetails")) or {}, "usageDetails")
    if not details:
        old = fields_of(_parsed(value.get("usage")) or {}, "usage")
        if old.get("unit") in (None, "TOKENS"):
            names = ("input", "promptTokens"), ("output", "completionTokens"), ("total", "totalTokens")
            details = {name: old.get(name, old.get(other)) for name, other in names}
    found = {name: number(_numeric(one), f"usageDetails.{name}") for name, one in details.items()}
    return {name: int(one) for name, one in found.items() if one is not None and one >= 0}


def _numeric(value: Any) -> Any:
    """A number that an export may have written as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _sum(usage: dict[str, int], part: str) -> int | None:
    found = [one for name, one in usage.items() if part in name]
    return sum(found) if found else None


def _first(usage: dict[str, int], *names: str) -> int | None:
    return next((usage[name] for name in names if name in usage), None)


def _rewards(trace: _Trace, report: ImportReport, reward: str, known: set[str]) -> Iterator[ImportedReward]:
    for id, record in trace.scores.items():
        value = as_object(record.value)
        with report.reading(record.place):
            name = text(value, "name") or "score"
            kind = text(value, "dataType") or "NUMERIC"
            given = number(_numeric(value.get("value")), "value") if kind.upper() not in WORDS else None
            if given is None:
                raise OddRecordError(f"score {name!r} is {kind.lower()}: it has no number that could be a reward")
            of = text(value, "observationId")
            span = None if of is None else a_span_id(of)
            if span is not None and span not in known:
                raise OddRecordError(f"score {name!r} judges an observation that is not there")
            yield ImportedReward(
                f"langfuse-{a_span_id(id)}", given if name == reward else None, {} if name == reward else {name: given},
                reason=text(value, "comment"), span_id=span,
            )  # fmt: skip
