"""Requests are taken apart as the library would read them; whatever else comes is refused, whole or one by one."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from penstock.gateway.otlp.attempt_of import Rejected
from penstock.gateway.otlp.json_encoding import LogRecord as JsonRecord
from penstock.gateway.otlp.signals import JSON, LOGS, PROTOBUF, Encoding, Failure, Item, items, tree_of

TIMES = st.lists(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=4), max_size=3), max_size=3)
"""The times of the records of each scope of each resource."""


def request(times: list[list[list[int]]]) -> ExportLogsServiceRequest:
    made = ExportLogsServiceRequest()
    for at, group in enumerate(times):
        resource = made.resource_logs.add(schema_url="https://schema.example")
        resource.resource.attributes.add(key=f"resource {at}")
        for number, part in enumerate(group):
            scope = resource.scope_logs.add()
            scope.scope.name = f"scope {number}"
            for time in part:
                scope.log_records.add(time_unix_nano=time, body={"string_value": "é" * (time % 200)})
    return made


def read(encoding: Encoding, body: bytes) -> list[Item]:
    return list(items(LOGS, tree_of(LOGS, encoding, body)))


@given(TIMES)
def test_both_encodings_hold_what_was_sent(times: list[list[list[int]]]) -> None:
    made = request(times)
    places = [(g, p, n) for g, group in enumerate(times) for p, part in enumerate(group) for n in range(len(part))]
    bodies: dict[Encoding, bytes] = {
        PROTOBUF: made.SerializeToString(),
        JSON: json.dumps(json_format.MessageToDict(made)).encode(),
    }
    for encoding, body in bodies.items():
        found = [item for item in read(encoding, body) if item.message is not None]
        assert [item.place for item in found] == places
        for item in found:
            g, p, n = item.place
            assert (item.resource.attributes[0].key, item.scope.name) == (f"resource {g}", f"scope {p}")
            assert (item.message.time_unix_nano or 0) == times[g][p][n]


@given(TIMES, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=4))
def test_broken_bytes_are_refused_and_never_more(times: list[list[list[int]]], changes: list[tuple[int, int]]) -> None:
    body = bytearray(request(times).SerializeToString())
    for at, byte in changes if body else ():
        body[at % len(body)] = byte
    found: list[Item] = []
    with suppress(Failure):
        found = read(PROTOBUF, bytes(body))
    assert all(isinstance(item.message, LogRecord | Rejected | None) for item in found)


@given(st.recursive(st.none() | st.integers() | st.text() | st.floats(), lambda it: st.lists(it, max_size=3)))
def test_any_json_in_a_place_of_a_record_costs_itself(value: object) -> None:
    good = {"timeUnixNano": "5"}
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [good, value, good | {"body": value}, good]}]}]}
    found = [item.message for item in read(JSON, json.dumps(body).encode()) if item.message is not None]
    assert len(found) == 4
    assert [one.time_unix_nano for one in (found[0], found[-1])] == [5, 5]
    assert isinstance(found[1], Rejected)
    assert isinstance(found[2], JsonRecord if value is None else Rejected)


def test_parts_of_two_bytes_have_a_bound() -> None:
    with pytest.raises(Failure) as refused:
        read(PROTOBUF, b"\x0a\x00" * (1 << 18))
    assert refused.value.status == 413
