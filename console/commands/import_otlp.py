"""`penstock import otlp-file`: spans of OpenTelemetry out of a file, as the collector's file exporter writes it.

Read are OTLP's JSON (a document, or one a line) and protobuf (one request, or requests each behind its length in four
bytes), packed with gzip or zstd or not. A span goes to the rollout that it or its resource names, as spans do that come
over the network; else each trace is the rollout `otlp-TRACE`. Spans keep their ids.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from penstock.console.commands.import_rollouts import (
    MOST_BYTES,
    Fields,
    ImportedAttempt,
    ImportReport,
    OddRecordError,
    Record,
    an_id,
    as_object,
    fields_of,
    file_bytes,
    json_records,
    objects,
    run_import,
    text,
)
from penstock.console.commands.imports import ImportedSpan, Value, otlp_attributes
from penstock.gateway.client.console import LOCAL, CommandError, Url

ROLLOUT: Final = ("penstock.rollout_id", "penstock.rollout.id", "agentlightning.rollout_id")
ATTEMPT: Final = ("penstock.attempt_id", "penstock.attempt.id", "agentlightning.attempt_id")
"""Attributes that name a span's rollout and attempt. Those with three parts are in what a gateway has sent out."""
PREFIX, FIRST = "otlp-", "a1"
RESOURCE, SCOPE, VERSION, STATE = "otel.resource", "otel.scope.name", "otel.scope.version", "otel.trace_state"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
LATEST_NS: Final = 2**63
DEEPEST: Final = 32
"""Most levels of lists and maps in an attribute that are read; the gateway keeps fewer."""
_IDS: Final = ("traceId", "spanId", "parentSpanId")
_FAILED: Final = (2, "STATUS_CODE_ERROR")


def otlp_file(*files: Path, gateway: Url = LOCAL) -> None:
    """Import spans out of files that an OpenTelemetry collector has written.

    Spans that are imported already are not sent again.

    Parameters
    ----------
    files
        OTLP as JSON or protobuf, packed with gzip or zstd or not.
    """
    if not files:
        raise CommandError("say which files to import", 2)

    async def attempts(report: ImportReport) -> AsyncIterator[ImportedAttempt]:
        records = (record for file in files for record in otlp_records(file_bytes(file), str(file), report))
        for one in otlp_attempts(records, report):
            yield one

    run_import(gateway, attempts)


# Out of a file --------------------------------------------------------------------------------------------------------


def otlp_records(content: bytes, name: str, report: ImportReport) -> Iterator[Record]:
    """The requests in the bytes of a file, as OTLP's JSON has them. `name`: the file's, for reports. Raises
    `CommandError` if nothing in it can be read."""
    if content.startswith(ZSTD):
        content = _unzstd(content, name)
    if content.lstrip()[:1] in (b"{", b"["):
        yield from json_records(content, name, report)
        return
    if not _framed(content):
        yield Record(name, _request(content, name))
        return
    at, good = 0, 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 4])
        piece, place = content[at + 4 : at + 4 + length], f"{name}@{at}"
        at += 4 + length
        try:
            if len(piece) < length:
                raise CommandError(f"the file ends within a request of {length:,} bytes")
            piece = _unzstd(piece, place) if piece.startswith(ZSTD) else piece
            if piece.lstrip()[:1] == b"{":
                yield from json_records(piece, place, report)
            else:
                yield Record(place, _request(piece, place))
            good += 1
        except CommandError as error:
            if not good:
                raise
            report.leave_out(place, str(error))


def _framed(content: bytes) -> bool:
    """True if the content may begin with the length of a request; a message of protobuf begins otherwise."""
    return len(content) >= 4 and content[:1] != b"\x0a" and int.from_bytes(content[:4]) <= MOST_BYTES


def _unzstd(content: bytes, name: str) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MOST_BYTES).stream_reader(
            content, read_across_frames=True
        ) as reader:
            found = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as e:
        raise CommandError(f"{name} is damaged zstd: {e}") from None
    if len(found) > MOST_BYTES:
        raise CommandError(f"{name} has more than {MOST_BYTES >> 20} MiB: import it in parts")
    return found


def _request(content: bytes, name: str) -> Any:
    """A request in protobuf as OTLP's JSON has it."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        made = MessageToDict(ExportTraceServiceRequest.FromString(content), use_integers_for_enums=True)
    except (DecodeError, RecursionError, ValueError) as error:
        raise CommandError(f"{name} is neither JSON nor a request of traces in protobuf: {error}") from None
    for span in (span for group in _groups(made) for span, _, _ in group):
        for one in cast(list[dict[str, str]], [span, *objects(as_object(span).get("links"), "links")]):
            for id in _IDS:
                if id in one:
                    one[id] = b64decode(one[id]).hex()
    return made


def _groups(request: Fields) -> Iterator[Iterator[tuple[Any, Fields, Fields]]]:
    """The spans of each resource of a request, with their resource and scope."""
    for group in objects(request.get("resourceSpans"), "resourceSpans"):
        resource = fields_of(fields_of(group, "resourceSpans").get("resource") or {}, "resource")
        parts = objects(as_object(group).get("scopeSpans"), "scopeSpans")
        yield (
            (span, resource, fields_of(as_object(part).get("scope") or {}, "scope"))
            for part in parts
            for span in objects(fields_of(part, "scopeSpans").get("spans"), "spans")
        )


# Out of records -------------------------------------------------------------------------------------------------------


def otlp_attempts(records: Iterable[Record], report: ImportReport) -> Iterator[ImportedAttempt]:
    """Attempts made of requests; spans that are odd are left out."""
    attempts = dict[tuple[str, str], ImportedAttempt]()
    for record in records:
        with report.reading(record.place):
            request = fields_of(record.value)
            if others := [name for name in request if name in ("resourceLogs", "resourceMetrics", "resourceProfiles")]:
                report.leave_out(record.place, f"{others[0]}: only traces are imported")
            elif "resourceSpans" not in request:
                raise OddRecordError("resourceSpans is missing: this is no request of OTLP")
            for at, group in enumerate(_groups(request)):
                for number, (span, resource, scope) in enumerate(group):
                    with report.reading(f"{record.place} resourceSpans[{at}] span {number}"):
                        rollout, attempt, made = _span(fields_of(span), resource, scope)
                        name = (rollout, attempt)
                        attempts.setdefault(name, ImportedAttempt(*name)).spans.append(made)
    yield from attempts.values()


def _span(span: Fields, resource: Fields, scope: Fields) -> tuple[str, str, ImportedSpan]:
    trace, own, parent = (_id(span, name, digits) for name, digits in zip(_IDS, (32, 16, 16), strict=True))
    if trace is None or own is None:
        raise OddRecordError("traceId and spanId must be 32 and 16 hex digits, not all zero")
    started, ended = (_time(span.get(name), name) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    if not started:
        raise OddRecordError("startTimeUnixNano is missing")
    about = _attributes(resource.get("attributes"), "resource.attributes")
    said = _attributes(span.get("attributes"), "attributes")
    rollout, attempt = _named(ROLLOUT, about, said), _named(ATTEMPT, about, said)
    kept = {name: value for name, value in about.items() if name not in (*ROLLOUT, *ATTEMPT)}
    said |= {RESOURCE: kept} if kept else {}
    for name, value in ((SCOPE, text(scope, "name")), (VERSION, text(scope, "version"))):
        said |= {} if value is None else {name: value}
    made = ImportedSpan(
        own, text(span, "name") or "", started, max(started, ended), parent, said, more=_more(span, trace),
    )  # fmt: skip
    return an_id(rollout) if rollout else f"{PREFIX}{trace}", an_id(attempt) if attempt else FIRST, made


def _more(span: Fields, trace: str) -> dict[str, Any]:
    """The other parts of a span, checked."""
    status = fields_of(span.get("status") or {}, "status")
    code, kind = status.get("code") or 0, span.get("kind") or 0
    made: dict[str, Any] = {"traceId": trace, "kind": kind if isinstance(kind, int) and 0 <= kind <= 5 else 0}
    if code:
        failed = code in _FAILED
        made["status"] = {"code": 2 if failed else 1, "message": text(status, "message") or ""}
    if state := text(span, "traceState"):
        made["traceState"] = state
    if events := objects(span.get("events"), "events"):
        made["events"] = [_event(fields_of(one, "events")) for one in events]
    if links := objects(span.get("links"), "links"):
        made["links"] = [_link(fields_of(one, "links")) for one in links]
    return made


def _event(event: Fields) -> dict[str, Any]:
    found = _attributes(event.get("attributes"), "events.attributes")
    at = _time(event.get("timeUnixNano"), "events.timeUnixNano")
    return {"name": text(event, "name") or "", "timeUnixNano": str(at), "attributes": otlp_attributes(found)}


def _link(link: Fields) -> dict[str, Any]:
    trace, span = _id(link, "traceId", 32), _id(link, "spanId", 16)
    if trace is None or span is None:
        raise OddRecordError("links: traceId and spanId must be 32 and 16 hex digits, not all zero")
    found = _attributes(link.get("attributes"), "links.attributes")
    return {"traceId": trace, "spanId": span, "attributes": otlp_attributes(found)}


def _id(record: Fields, name: str, digits: int) -> str | None:
    """An id in hex; None where it is absent, empty or zero."""
    given = (text(record, name) or "").lower()
    if given and (len(given) != digits or not set(given) <= set("0123456789abcdef")):
        raise OddRecordError(f"{name} is not {digits} hex digits: {given[:40]!r}")
    return given if given.strip("0") else None


def _time(value: Any, name: str) -> int:
    """ns since the epoch; 0 where it is absent."""
    found = _whole(value or 0, name)
    if not 0 <= found < LATEST_NS:
        raise OddRecordError(f"{name} is no time since 1970 in ns")
    return found


def _whole(value: Any, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.removeprefix("-").isascii() and value.removeprefix("-").isdigit():
        return int(value[:40])
    raise OddRecordError(f"{name} is not a whole number")


def _named(names: Iterable[str], *attributes: Mapping[str, Value]) -> str | None:
    found = (one[name] for one in attributes for name in names if name in one)
    return next((value for value in found if isinstance(value, str) and value), None)


def _attributes(given: Any, what: str, depth: int = 0) -> dict[str, Value]:
    """Attributes as OTLP has them, by name."""
    pairs = [fields_of(pair, what) for pair in objects(given, what)]
    return {text(pair, "key") or "": _value(pair.get("value"), what, depth) for pair in pairs}


def _value(given: Any, what: str, depth: int) -> Value:
    value = fields_of(given or {}, what)
    if depth > DEEPEST:
        raise OddRecordError(f"{what} has more than {DEEPEST} levels")
    if "intValue" in value:
        return _whole(value["intValue"], what)
    if "arrayValue" in value:
        listed = objects(fields_of(value["arrayValue"] or {}, what).get("values"), what)
        return [_value(one, what, depth + 1) for one in listed]
    if "kvlistValue" in value:
        return _attributes(fields_of(value["kvlistValue"] or {}, what).get("values"), what, depth + 1)
    for name, kinds in (
        ("stringValue", str),
        ("boolValue", bool),
        ("doubleValue", int | float | str),
        ("bytesValue", str),
    ):
        if (found := value.get(name)) is not None:
            if not isinstance(found, kinds):
                raise OddRecordError(f"{what}: {name} is not what its name says")
            return found
    return None
