"""`penstock import agl`: rollouts of Agent Lightning, out of its server or of a file that was saved from one.

Versions 0.3 (`/v1/agl/...`: rollouts, attempts, OpenTelemetry spans) and 1.0 (`/api/rollouts`: rollouts and events).
Rollouts and attempts keep their ids. Spans of 0.3 go as they are, so that their rewards and links are read as those
that its agents send themselves; an event `model_request` of 1.0 becomes a span of a model call, `reward` a reward.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from penstock.console.commands.import_rollouts import (
    INPUT,
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
    flat,
    fresh_page,
    instant_ns,
    messages,
    needed,
    number,
    objects,
    plain,
    run_import,
    text,
)
from penstock.console.commands.imports import ImportedSpan, otlp_attributes
from penstock.gateway.client.console import LOCAL, CommandError, Url

if TYPE_CHECKING:
    import aiohttp

LISTS: Final = ("items", "rollouts", "attempts", "spans", "events")
"""Names of lists of records within a record: those of pages, and of what people save."""
PAGE: Final = 500
KEY: Final = "AGL_KEY"
SPAN_FIELDS: Final = frozenset(
    {
        *(
            "rollout_id",
            "attempt_id",
            "sequence_id",
            "trace_id",
            "span_id",
            "parent_id",
            "name",
            "status",
            "attributes",
        ),
        *("events", "links", "start_time", "end_time", "context", "parent", "resource"),
    }
)
"""Fields of a span that become something of their own; others are kept together in one attribute."""
_SEQUENCE, _EXTRA, _RESOURCE = "agentlightning.span_sequence_id", "agentlightning.extra", "otel.resource"
_OPERATIONS: Final = {"messages": "chat", "prompt": "text_completion"}


def agl(source: str, /, *, gateway: Url = LOCAL) -> None:
    """Import rollouts of Agent Lightning 0.3 or 1.0.

    Rollouts that are imported already get what is new of them, and nothing twice.

    Parameters
    ----------
    source
        URL of its server (the key of 1.0 comes from the variable AGL_KEY), or a file of JSON or JSON lines that was
        saved from one, gzip or not.
    """

    async def attempts(report: ImportReport) -> AsyncIterator[ImportedAttempt]:
        if source.startswith(("http://", "https://")):
            async for one in _of_server(source, report):
                yield one
        else:
            for one in agl_attempts(file_records(Path(source), report), report):
                yield one

    run_import(gateway, attempts)


# Out of a server ------------------------------------------------------------------------------------------------------


async def _of_server(url: str, report: ImportReport) -> AsyncIterator[ImportedAttempt]:
    import os

    from aiohttp import ClientSession

    key = os.environ.get(KEY)
    server = ForeignServer(
        url, {"Authorization": f"Bearer {key}"} if key else {}, f"{KEY} has the key of a server of 1.0"
    )
    async with ClientSession() as session:
        if await server.get(session, "/v1/agl/rollouts", limit=1, offset=0) is not None:
            found = _of_03(server, session)
        elif await server.get(session, "/api/rollouts/terminal", after=0, limit=1) is not None:
            found = _of_10(server, session)
        else:
            raise CommandError(
                f"{server.name} is no server of Agent Lightning: neither /v1/agl/rollouts (0.3) nor "
                "/api/rollouts/terminal (1.0) is there"
            )
        async for records in found:
            for one in agl_attempts(records, report):
                yield one


async def _of_03(server: ForeignServer, session: aiohttp.ClientSession) -> AsyncIterator[list[Record]]:
    """The records of each rollout, one rollout after the other."""
    async for given in _pages(server, session, "/v1/agl/rollouts", sort_by="start_time"):
        found = [Record(server.name, given)]
        if isinstance(rid := as_object(given).get("rollout_id"), str):
            path = f"/v1/agl/rollouts/{quote(rid, safe='')}/attempts"
            found += [Record(f"{server.name} {rid}", one) async for one in _pages(server, session, path)]
            spans = _pages(server, session, "/v1/agl/spans", rollout_id=rid, sort_by="sequence_id")
            found += [Record(f"{server.name} {rid}", one) async for one in spans]
        yield found


async def _pages(server: ForeignServer, session: aiohttp.ClientSession, path: str, **query: str) -> AsyncIterator[Any]:
    before = list[Any]()
    for at in count(0, PAGE):
        page = await server.get(session, path, limit=PAGE, offset=at, **query)
        found = as_list(as_object(page).get("items"))
        if found is None:
            raise CommandError(f"{server.name}{path} did not answer a page of items: is it a server of 0.3?")
        for one in fresh_page(found, before, f"{server.name}{path}"):
            yield one
        if len(found) < PAGE:
            return
        before = found


async def _of_10(server: ForeignServer, session: aiohttp.ClientSession) -> AsyncIterator[list[Record]]:
    """The records of each rollout that has ended."""
    after: Any = 0
    while True:
        page = as_object(await server.get(session, "/api/rollouts/terminal", after=after, limit=PAGE))
        ended = as_list(page.get("items"))
        if ended is None:
            raise CommandError(f"{server.name}/api/rollouts/terminal did not answer a page of items")
        for one in ended:
            if not isinstance(rid := as_object(one).get("rollout_id"), str):
                continue
            whole = await server.get(session, f"/api/rollouts/{quote(rid, safe='')}")
            events = await server.get(session, f"/api/rollouts/{quote(rid, safe='')}/events")
            place = f"{server.name} {rid}"
            rollout = as_object(whole).get("rollout")
            yield [Record(place, rollout), *(Record(place, event) for event in as_list(events) or [])]
        if len(ended) < PAGE or page.get("next_after") in (None, after):
            return
        after = page["next_after"]


# Out of records -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Collected:
    """The records of one attempt."""

    about: Fields = field(default_factory=dict[str, Any])
    spans: list[ImportedSpan] = field(default_factory=list[ImportedSpan])
    rewards: list[ImportedReward] = field(default_factory=list[ImportedReward])
    events: int = 0


def agl_attempts(records: Iterable[Record], report: ImportReport) -> Iterator[ImportedAttempt]:
    """Attempts made of records of either version, in any order; odd ones are left out."""
    rollouts = dict[str, Record]()
    attempts = dict[tuple[str, str], _Collected]()
    for record in records:
        for one in _spread(record):
            with report.reading(one.place):
                _collect(fields_of(one.value), one, rollouts, attempts)
    tried = {rollout for rollout, _ in attempts}
    for rid, record in rollouts.items():
        if rid not in tried:
            report.leave_out(record.place, "the rollout has no attempt, no span and no event: it was never run")
    for (rid, aid), found in attempts.items():
        place, rollout = rollouts.get(rid, Record(f"rollout {rid}", {}))
        try:
            root = _root(rollout, rid, aid, found)
        except OddRecordError as error:
            report.leave_out(place, f"{error}; its attempt {aid} is left out")
            continue
        inside = [span if span.parent_id is not None else _with_parent(span, root.span_id) for span in found.spans]
        yield ImportedAttempt(an_id(rid), an_id(aid), [root, *inside], found.rewards)


def _spread(record: Record) -> Iterator[Record]:
    """A record, or those in the lists of a page or of a saved collection."""
    value = as_object(record.value)
    lists = {name: found for name in LISTS if (found := as_list(value.get(name))) is not None}
    if not lists or "span_id" in value:
        yield record
        return
    for name, found in lists.items():
        yield from (Record(f"{record.place}.{name}[{at}]", one) for at, one in enumerate(found))


def _collect(
    value: Fields, record: Record, rollouts: dict[str, Record], attempts: dict[tuple[str, str], _Collected]
) -> None:
    rid = needed(value, "rollout_id")
    if "span_id" in value:
        found, span = (rid, needed(value, "attempt_id")), _span(value)
        attempts.setdefault(found, _Collected()).spans.append(span)
    elif "event_type" in value:
        name = (rid, needed(value, "attempt_id"))
        number = attempts[name].events if name in attempts else 0
        made = _event(value, number)
        found = attempts.setdefault(name, _Collected())
        found.events += 1
        if isinstance(made, ImportedSpan):
            found.spans.append(made)
        else:
            found.rewards.append(made)
    elif "attempt_id" in value and "sequence_id" in value:
        attempts.setdefault((rid, needed(value, "attempt_id")), _Collected()).about = value
    elif "input" in value:
        rollouts[rid] = record
        latest = as_object(value.get("attempt"))
        if aid := text(latest, "attempt_id"):
            attempts.setdefault((rid, aid), _Collected()).about = latest
    else:
        raise OddRecordError("it is neither a rollout nor an attempt, a span or an event")


def _with_parent(span: ImportedSpan, parent: str) -> ImportedSpan:
    from dataclasses import replace

    return replace(span, parent_id=parent)


def _root(rollout: Fields, rid: str, aid: str, found: _Collected) -> ImportedSpan:
    """The span of the attempt itself: what its rollout was given, and how it ended."""
    status = as_object(rollout.get("status"))
    state = status.get("state", rollout.get("status"))
    about = found.about
    started = instant_ns(about.get("start_time") or rollout.get("start_time"), "start_time")
    ended = instant_ns(about.get("end_time") or rollout.get("end_time"), "end_time")
    if status:
        started = instant_ns(status.get("created_at"), "status.created_at")
        ended = instant_ns(status.get("updated_at"), "status.updated_at")
    started = started or min((span.start_ns for span in found.spans), default=None)
    if started is None:
        raise OddRecordError("start_time is missing")
    ended = max([started, ended or 0, *(span.end_ns for span in found.spans)])
    outcome = about.get("status") or state
    said = attributes(
        gen_ai__operation__name="invoke_agent", agentlightning__rollout__mode=rollout.get("mode"),
        agentlightning__rollout__status=state, agentlightning__attempt__status=about.get("status"),
        agentlightning__attempt__sequence_id=about.get("sequence_id"), agentlightning__worker_id=about.get("worker_id"),
        agentlightning__resources_id=rollout.get("resources_id"), agentlightning__config=rollout.get("config"),
        agentlightning__is_train=rollout.get("is_train"), agentlightning__metadata=rollout.get("metadata"),
        agentlightning__attempt__metadata=about.get("metadata"),
    )  # fmt: skip
    given = rollout.get("input")
    said |= {} if given is None else {INPUT: plain(given)}
    bad = isinstance(outcome, str) and outcome in ("failed", "timeout", "unresponsive", "cancelled")
    return ImportedSpan(
        a_span_id(f"agl/{rid}/{aid}"), "rollout", started, ended, None, said, error=outcome if bad else None
    )


# Version 0.3 ----------------------------------------------------------------------------------------------------------


def _span(value: Fields) -> ImportedSpan:
    """A span of 0.3 with all that it has."""
    trace, own = needed(value, "trace_id").lower(), needed(value, "span_id")
    started, ended = instant_ns(value.get("start_time"), "start_time"), instant_ns(value.get("end_time"), "end_time")
    if started is None and ended is None:
        raise OddRecordError("start_time is missing")
    parent = text(value, "parent_id")
    said = flat(value.get("attributes"), "attributes")
    if (sequence := value.get("sequence_id")) is not None:
        said[_SEQUENCE] = number(sequence, "sequence_id") and sequence
    if extra := {name: one for name, one in value.items() if name not in SPAN_FIELDS and one is not None}:
        said[_EXTRA] = plain(extra)
    if about := flat(fields_of(value.get("resource") or {}, "resource").get("attributes"), "resource.attributes"):
        said[_RESOURCE] = about
    status = fields_of(value.get("status") or {}, "status")
    failed = status.get("status_code") == "ERROR"
    more: dict[str, Any] = {"traceId": trace} if _is_hex(trace, 32) else {}
    if events := objects(value.get("events"), "events"):
        more["events"] = [_otlp_event(fields_of(one, "events")) for one in events]
    if links := objects(value.get("links"), "links"):
        more["links"] = [_otlp_link(fields_of(one, "links")) for one in links]
    return ImportedSpan(
        a_span_id(own), text(value, "name") or "span", started or ended or 0, ended or started or 0,
        a_span_id(parent) if parent else None, said, error=(text(status, "description") or "error") if failed else None,
        more=more,
    )  # fmt: skip


def _is_hex(given: str, digits: int) -> bool:
    return len(given) == digits and set(given) <= set("0123456789abcdef") and given.strip("0") != ""


def _otlp_event(event: Fields) -> dict[str, Any]:
    at = instant_ns(event.get("timestamp"), "events.timestamp")
    found = flat(event.get("attributes"), "events.attributes")
    return {"name": text(event, "name") or "", "timeUnixNano": str(at or 0), "attributes": otlp_attributes(found)}


def _otlp_link(link: Fields) -> dict[str, Any]:
    to = fields_of(link.get("context"), "links.context")
    trace, span = needed(to, "trace_id").lower(), needed(to, "span_id").lower()
    if not _is_hex(trace, 32) or not _is_hex(span, 16):
        raise OddRecordError("links.context has no trace id of 32 and no span id of 16 hex digits")
    found = flat(link.get("attributes"), "links.attributes")
    return {"traceId": trace, "spanId": span, "attributes": otlp_attributes(found)}


# Version 1.0 ----------------------------------------------------------------------------------------------------------


def _event(value: Fields, number_of: int) -> ImportedSpan | ImportedReward:
    """An event of 1.0, the so many-th of its attempt."""
    kind, at = needed(value, "event_type"), instant_ns(value.get("timestamp"), "timestamp")
    if at is None:
        raise OddRecordError("timestamp is missing")
    data = fields_of(value.get("data") or {}, "data")
    name = f"agl/{value['rollout_id']}/{value['attempt_id']}/{number_of}/{at}"
    if kind == "model_request":
        return _model_request(data, a_span_id(name), at)
    if kind == "reward":
        given = number(data.get("value"), "data.value")
        if given is None:
            raise OddRecordError("data.value is missing")
        why = text(data, "reason") or text(data, "message")
        return ImportedReward(f"agl-{a_span_id(name)}", given, reason=why)
    said = attributes(**{INPUT: data}) if data else {}
    return ImportedSpan(a_span_id(name), kind, at, at, None, said)


def _model_request(data: Fields, span_id: str, ended: int) -> ImportedSpan:
    """A call through the gateway of 1.0 as a span of a model call."""
    request = fields_of(data.get("request") or {}, "data.request")
    response = fields_of(data.get("response") or {}, "data.response")
    usage = fields_of(data.get("usage") or response.get("usage") or {}, "data.usage")
    details = fields_of(usage.get("prompt_tokens_details") or {}, "data.usage.prompt_tokens_details")
    took = number(data.get("latency_ms"), "data.latency_ms") or 0.0
    operation = next((name for key, name in _OPERATIONS.items() if key in request), "chat")
    choices = [fields_of(one, "data.response.choices") for one in objects(response.get("choices"), "choices")]
    model = text(request, "model") or text(data, "model")
    answers = [one.get("message") or one.get("text") for one in choices]
    said = attributes(
        gen_ai__operation__name=operation, gen_ai__request__model=model,
        gen_ai__response__model=text(response, "model"), gen_ai__response__id=text(response, "id"),
        gen_ai__response__finish_reasons=[str(one["finish_reason"]) for one in choices if one.get("finish_reason")],
        gen_ai__usage__input_tokens=_whole(usage, "prompt_tokens"),
        gen_ai__usage__output_tokens=_whole(usage, "completion_tokens"),
        gen_ai__usage__cache_read__input_tokens=_whole(details, "cached_tokens"),
        gen_ai__request__temperature=number(request.get("temperature"), "data.request.temperature"),
        gen_ai__request__max_tokens=_whole(request, "max_tokens"), gen_ai__tool__definitions=request.get("tools"),
        http__response__status_code=_whole(data, "http_status"), agentlightning__model_version=_version(data),
    )  # fmt: skip
    said |= messages("gen_ai.input.messages", request.get("messages") or request.get("prompt"), "user")
    said |= messages("gen_ai.output.messages", answers, "assistant") if answers else {}
    failed = data.get("status") not in (None, "ok")
    start = max(1, ended - round(took * 1e6))
    error = plain(data.get("error") or response.get("error") or data["status"]) if failed else None
    return ImportedSpan(span_id, f"{operation} {model or ''}".strip(), start, ended, None, said, "client", error)


def _whole(given: Fields, name: str) -> int | None:
    found = number(given.get(name), name)
    return None if found is None else int(found)


def _version(data: Fields) -> int | None:
    server = as_object(data.get("server"))
    return _whole(server, "version") if server else _whole(data, "model_version")
