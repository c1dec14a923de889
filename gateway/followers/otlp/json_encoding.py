"""OTLP in its JSON encoding: the messages of `opentelemetry.proto`, as far as they are read.

These rules differ from plain protobuf JSON: ids are hex and not base64, enums are numbers, unknown fields are ignored.
64-bit numbers come as text or as numbers; `null` is an absent field. protobuf's `json_format` reads such ids as base64,
without an error, and takes 28 times as long for a span. The structs have the names of the protobuf messages and as much
of their behaviour as the reading code uses, so that all code after decoding exists only once.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

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
