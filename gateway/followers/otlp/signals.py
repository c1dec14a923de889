"""The signals of OTLP, and the items of their requests. Pure, but for protobuf, which is imported where it is needed.

The requests of all signals are built alike, in both encodings: groups of a resource, parts of a scope, items. Each
resource, scope and item is read by itself, so that one that cannot be read does not affect others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, cast

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.wire.dialects.loose_json import is_bulky

Encoding = Literal["application/x-protobuf", "application/json"]
PROTOBUF: Encoding = "application/x-protobuf"
JSON: Encoding = "application/json"
PROTO: Final = "opentelemetry.proto."
MOST_GROUPS = 10_000
"""Most resources and scopes of one request: an SDK has one or two, a collector some for each of its processes."""
MOST_PARTS = 1 << 17
"""Most messages within one message of a request in protobuf."""
_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of the wire types of fixed length."""
_LONGEST: Final = 100
"""Most characters of a value that an error repeats."""


class OtlpRequestError(Exception):
    """A request that is refused as a whole. Status 503 asks the client to send it again; any other status does not."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class ItemRejectedError(ValueError):
    """A span that does not belong here; the message says why."""

    def __init__(self, outcome: Literal["unjoined", "foreign", "invalid"], message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class MessageType(NamedTuple):
    """A message in both encodings."""

    struct: type[msgspec.Struct]
    module: str
    name: str


class Signal(NamedTuple):
    """A kind of telemetry in OTLP, with the names of the parts of its requests."""

    name: str
    service: str
    """The part of its messages' names: `Export...ServiceRequest`, ..."""
    item: MessageType
    groups: str
    parts: str
    items: str
    rejected: str
    """The field of a partial success that counts rejected items."""

    @property
    def request(self) -> str:
        return f"Export{self.service}ServiceRequest"

    @property
    def module(self) -> str:
        """The protobuf module of its service's messages."""
        name = self.service.lower()
        return f"collector.{name}.v1.{name}_service_pb2"

    def response_class(self, message: str) -> Any:
        """The protobuf class of an answer: `PartialSuccess` or `ServiceResponse`."""
        return _class(self.module, f"Export{self.service}{message}")


# The JSON encoding: the messages of `opentelemetry.proto`, as far as they are read.
#
# These rules differ from plain protobuf JSON: ids are hex and not base64, enums are numbers, unknown fields are
# ignored. 64-bit numbers come as text or as numbers; `null` is an absent field. protobuf's `json_format` reads such
# ids as base64, without an error, and takes 28 times as long for a span. The structs have the names of the protobuf
# messages and as much of their behaviour as the reading code uses, so that all code after decoding exists only once.

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Natural = Annotated[int, Meta(ge=0)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]*\Z")]


class ArrayValue(Struct, rename="camel"):
    values: list[AnyValue] | None = None


class KeyValueList(Struct, rename="camel"):
    values: list[KeyValue] | None = None


class AnyValue(Struct, rename="camel"):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: Int64 | None = None
    double_value: float | None = None
    array_value: ArrayValue | None = None
    kvlist_value: KeyValueList | None = None
    bytes_value: str | None = None

    def WhichOneof(self, group: str) -> str | None:
        """The name of the field that is set; None if none is."""
        return next((name for name in self.__struct_fields__ if getattr(self, name) is not None), None)


class KeyValue(Struct, rename="camel"):
    key: str = ""
    value: AnyValue | None = None


class Resource(Struct, rename="camel"):
    attributes: list[KeyValue] | None = None


class InstrumentationScope(Struct, rename="camel"):
    name: str | None = None
    version: str | None = None


class Event(Struct, rename="camel"):
    time_unix_nano: Natural | None = None
    name: str | None = None
    attributes: list[KeyValue] | None = None


class Link(Struct, rename="camel"):
    trace_id: Hex | None = None
    span_id: Hex | None = None
    attributes: list[KeyValue] | None = None


class Status(Struct, rename="camel"):
    message: str | None = None
    code: Int32 | None = None


class Span(Struct, rename="camel"):
    trace_id: Hex | None = None
    span_id: Hex | None = None
    trace_state: str | None = None
    parent_span_id: Hex | None = None
    name: str | None = None
    kind: Int32 | None = None
    start_time_unix_nano: Natural | None = None
    end_time_unix_nano: Natural | None = None
    attributes: list[KeyValue] | None = None
    dropped_attributes_count: Uint32 | None = None
    events: list[Event] | None = None
    links: list[Link] | None = None
    status: Status | None = None


class LogRecord(Struct, rename="camel"):
    time_unix_nano: Natural | None = None
    observed_time_unix_nano: Natural | None = None
    severity_number: Int32 | None = None
    severity_text: str | None = None
    body: AnyValue | None = None
    attributes: list[KeyValue] | None = None
    dropped_attributes_count: Uint32 | None = None
    trace_id: Hex | None = None
    span_id: Hex | None = None
    event_name: str | None = None


class DataPoints(Struct, rename="camel"):
    """The common part of all kinds of metrics."""

    data_points: list[Any] | None = None


class Metric(Struct, rename="camel"):
    """A metric: only its points are read, and only counted."""

    gauge: DataPoints | None = None
    sum: DataPoints | None = None
    histogram: DataPoints | None = None
    exponential_histogram: DataPoints | None = None
    summary: DataPoints | None = None


def _kind(struct: type[msgspec.Struct], package: str) -> MessageType:
    return MessageType(struct, f"{package}.v1.{package}_pb2", struct.__name__)


TRACES: Final = Signal(
    "traces", "Trace", _kind(Span, "trace"), "resource_spans", "scope_spans", "spans", "rejected_spans"
)
LOGS: Final = Signal(
    "logs", "Logs", _kind(LogRecord, "logs"), "resource_logs", "scope_logs", "log_records",
    "rejected_log_records",
)  # fmt: skip
METRICS: Final = Signal(
    "metrics", "Metrics", _kind(Metric, "metrics"), "resource_metrics", "scope_metrics", "metrics",
    "rejected_data_points",
)  # fmt: skip
SIGNALS: Final = {signal.name: signal for signal in (TRACES, LOGS, METRICS)}
UNSUPPORTED_SIGNALS: Final = {
    "profiles": "profiles are not taken",
    "base": "the path does not say what signal this is: an exporter for one signal adds none to its endpoint",
}
"""Signals that cannot be kept, and why."""
BASES: Final = frozenset({"/", "/v1", "/v1/"})
"""Base URLs of models, to which an exporter may have been pointed by mistake."""
_GROUPS: Final = re.compile(r"resource_?[a-zA-Z]+")
_BEGINS: Final = re.compile(rb'\s*\{\s*"resource(Spans|Logs|Metrics)"')
PATHS: Final = {
    f"{base}/v1/{name}{slash}": f"/v1/{name}" for name in SIGNALS for base in ("", "/v1") for slash in ("", "/")
} | {"/v1development/profiles": "/v1/profiles"}
"""Paths to which exporters send telemetry, with the path that is meant. An exporter that was given the base URL of a
model repeats its `/v1`."""

_RESOURCE: Final = _kind(Resource, "resource")
_SCOPE: Final = _kind(InstrumentationScope, "common")


def is_telemetry(content_type: bytes, body: bytes) -> bool:
    """True if a request to a base URL is an exporter's."""
    return content_type.startswith(PROTOBUF.encode()) or _BEGINS.match(body) is not None


class TelemetryItem(NamedTuple):
    """A span, a log record or a metric; `message` is None for a group of them, any number of which may be empty."""

    message: Any
    resource: Any
    scope: Any
    place: tuple[int, int, int]


class RequestTree(Protocol):
    """A request as its encoding holds it."""

    root: Any

    def open(self, message: Any, one: str | None, many: str) -> tuple[Any, Sequence[Any]]:
        """Split a message: returns its part with the name `one`, or None, and its parts with the name `many`. Raises
        `OtlpRequestError`."""
        ...

    def read(self, kind: MessageType, part: Any) -> Any:
        """Decode a part as a message; raises `ItemRejectedError`."""
        ...

    def name(self, name: str) -> str:
        """A field's name as the encoding writes it."""
        ...


def tree_of(signal: Signal, encoding: Encoding, body: bytes) -> RequestTree:
    """A request, not split yet; raises `OtlpRequestError`."""
    return _JsonTree(signal, body) if encoding == JSON else _ProtobufTree(signal, body)


def items(signal: Signal, tree: RequestTree) -> Iterator[TelemetryItem]:
    """Yield the items of a request; one that cannot be read is an `ItemRejectedError` in its place. Raises
    `OtlpRequestError`."""
    count = 0
    for at, group in enumerate(tree.open(tree.root, None, signal.groups)[1]):
        part_of_group, parts = tree.open(group, "resource", signal.parts)
        resource = None if part_of_group is None else _read(tree, _RESOURCE, part_of_group)
        yield TelemetryItem(None, resource, None, (at, 0, 0))
        for under, part in enumerate(parts):
            part_of_scope, found = tree.open(part, "scope", signal.items)
            scope = None if part_of_scope is None else _read(tree, _SCOPE, part_of_scope)
            yield TelemetryItem(None, resource, scope, (at, under, 0))
            for number, one in enumerate(found):
                yield TelemetryItem(_read(tree, signal.item, one), resource, scope, (at, under, number))
        count += 1 + len(parts)
        if count > MOST_GROUPS:
            raise OtlpRequestError(
                413, f"the request has more than {MOST_GROUPS} resources and scopes; send smaller batches"
            )


def place_of(signal: Signal, tree: RequestTree, place: tuple[int, int, int]) -> str:
    """The path of an item in its request, by the names of its encoding."""
    names = (signal.groups, signal.parts, signal.items)
    return ".".join(f"{tree.name(name)}[{at}]" for name, at in zip(names, place, strict=True))


def camel(name: str) -> str:
    """A protobuf field's name as JSON writes it."""
    return re.sub("_([a-z])", lambda found: found[1].upper(), name)


def _read(tree: RequestTree, kind: MessageType, part: Any) -> Any:
    try:
        return tree.read(kind, part)
    except ItemRejectedError as error:
        return error


class _ProtobufTree:
    """A request in protobuf. Fields are found by their numbers, which all signals share: 1, or 1 and 2."""

    def __init__(self, signal: Signal, body: bytes) -> None:
        self.root = body
        self._request = signal.request

    def open(self, message: bytes, one: str | None, many: str) -> tuple[bytes | None, Sequence[bytes]]:
        found: dict[int, list[bytes]] = {1: [], 2: []}
        try:
            for at, (number, data) in enumerate(_messages_in(message)):
                if at == MOST_PARTS:
                    raise OtlpRequestError(413, f"the request has more than {MOST_PARTS} {many}; send smaller batches")
                if number in found:
                    found[number].append(data)
        except (ValueError, IndexError) as error:
            raise _no_request(self._request, f"{many}: {error}") from None
        if one is None:
            return None, found[1]
        # A message in several pieces is their concatenation.
        return b"".join(found[1]) if found[1] else None, found[2]

    def read(self, kind: MessageType, part: bytes) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return _class(kind.module, kind.name).FromString(part)
        except DecodeError as error:
            shown = part[: _LONGEST // 4].hex()
            raise ItemRejectedError("invalid", f"bytes {shown!r} are no {kind.name}: {error}") from None

    def name(self, name: str) -> str:
        return name


def _messages_in(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message that may be messages themselves, with their numbers. The library would decode all of them
    at once, and two bytes can be one. Raises `ValueError` or `IndexError`."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if kind == _BYTES else (_FIXED.get(kind, 0), at)
        if not size and kind != _BYTES:
            raise ValueError(f"a field has the unknown kind {kind}")
        if at + size > len(message):
            raise ValueError("a field ends behind its message")
        if kind == _BYTES:
            yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(a number of variable length, the offset of its end)."""
    if message[at] < 128:
        return message[at], at + 1
    value = 0
    for place in range(10):
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has more than 10 bytes")


class _JsonTree:
    def __init__(self, signal: Signal, body: bytes) -> None:
        if is_bulky(body):
            raise OtlpRequestError(413, "the request holds more objects or values than are read; send smaller batches")
        self._request = signal.request
        try:
            self.root = _loads(body)
        except ValueError as error:
            raise _no_request(self._request, str(error)) from None
        except RecursionError:
            raise OtlpRequestError(400, "the body is nested too deeply", "body") from None

    def open(self, message: Any, one: str | None, many: str) -> tuple[Any, Sequence[Any]]:
        many = self.name(many)
        if not isinstance(message, dict):
            raise _no_request(self._request, f"what holds {many} must be an object, not {_shown(message)}")
        found = cast(dict[str, Any], message)
        parts = found.get(many)
        if one is None and parts is None and (other := next(filter(_GROUPS.fullmatch, found), None)) is not None:
            # Unknown fields are ignored, but a request with nothing else is refused.
            raise _no_request(self._request, f"it has {_shown(other)} and no {many!r}")
        if parts is not None and not isinstance(parts, list):
            raise _no_request(self._request, f"$.{many} must be a list, not {_shown(parts)}")
        return None if one is None else found.get(one), cast(list[Any], parts or [])

    def read(self, kind: MessageType, part: Any) -> Any:
        try:
            # Numbers may be texts.
            return msgspec.convert(part, kind.struct, strict=False)
        except msgspec.ValidationError as error:
            raise ItemRejectedError("invalid", _problem(str(error), part)) from None
        except RecursionError:
            raise ItemRejectedError("invalid", f"the {kind.name} is nested too deeply") from None

    def name(self, name: str) -> str:
        return camel(name)


def _loads(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Slower, and reads what agents write: half a surrogate pair, NaN, a byte order mark.
        return _without_halves(json.loads(body))


def _without_halves(value: Any) -> Any:
    """A value with a replacement character for half a surrogate pair, which protobuf cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_without_halves(one) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        members = cast(dict[str, Any], value).items()
        return {_without_halves(name): _without_halves(one) for name, one in members}
    return value


def _no_request(request: str, why: str) -> OtlpRequestError:
    return OtlpRequestError(400, f"the body is not an {request}: {why}", "body")


def _problem(error: str, part: Any) -> str:
    """The error, with the field's name and value where they can be found."""
    why, _, path = error.partition(" - at `$")
    path = path.strip("`.")
    value = part
    for name, at in re.findall(r"(\w+)|\[(\d+)\]", path):
        try:
            value = value[name or int(at)]
        except (LookupError, TypeError):
            return f"{path}: {why}"
    return f"{path or 'it'} {_shown(value)}: {why}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def load_protobuf(signal: Signal) -> None:
    """Import the protobuf modules that read requests of a signal."""
    # The modules of the messages in it are imported with it.
    signal.response_class("ServiceResponse")


@lru_cache(64)
def _class(module: str, name: str) -> Any:
    return getattr(import_module(f"{PROTO}{module}"), name)
