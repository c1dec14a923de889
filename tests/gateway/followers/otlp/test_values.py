"""Attribute values come in as they were sent, within bounds, and go out as they are kept; requests; names."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.collector import plain
from fakes.otlp import Made, fill, request
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from penstock.gateway.followers.otlp import semconv, span_export, span_import
from penstock.gateway.followers.otlp.semconv import Row
from penstock.gateway.followers.otlp.signals import (
    JSON,
    LOGS,
    PROTOBUF,
    TRACES,
    Encoding,
    ItemRejectedError,
    OtlpRequestError,
    TelemetryItem,
    items,
    tree_of,
)
from penstock.gateway.followers.otlp.signals import LogRecord as JsonRecord
from penstock.gateway.followers.otlp.span_import import (
    DEEPEST,
    LONGEST_KEY,
    LONGEST_TEXT,
    MOST_ATTRIBUTES,
    MOST_CHARACTERS,
    MOST_ITEMS,
    MOST_LOOKED,
    Bounds,
    entry_of,
)
from penstock.gateway.wire.dialects import by_name

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
ATTRIBUTES = st.dictionaries(st.text(max_size=10), VALUES, max_size=6)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(cast(dict[str, Any], value).values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(depth, cast(list[Any], value)), default=0)


def official(attributes: dict[str, Any]) -> KeyValueList:
    """As the SDK's exporter writes them."""
    made = KeyValueList()
    fill(made.values, attributes)
    return made


def sent(attributes: dict[str, Any]) -> dict[str, Any]:
    """As a collector gets them from us."""
    made = KeyValueList()
    span_export.fill(made.values, attributes)
    return plain(KeyValueList.FromString(made.SerializeToString()).values)


@given(ATTRIBUTES.filter(lambda one: depth(one) <= DEEPEST))
def test_values_come_in_as_they_were_sent(attributes: dict[str, Any]) -> None:
    bounds = Bounds()
    assert bounds.attributes(official(attributes).values) == attributes
    assert not bounds.clipped
    assert bounds.dropped == 0


@given(ATTRIBUTES.filter(lambda one: depth(one) <= DEEPEST))
def test_both_encodings_are_read_alike(attributes: dict[str, Any]) -> None:
    as_json = json_format.MessageToJson(official(attributes))
    pairs = json.dumps({"resourceSpans": [{"resource": {"attributes": json.loads(as_json).get("values", [])}}]})
    (group,) = items(TRACES, tree_of(TRACES, JSON, pairs.encode()))
    assert Bounds().attributes(group.resource.attributes) == attributes


@given(ATTRIBUTES)
def test_values_go_out_as_they_are_kept(attributes: dict[str, Any]) -> None:
    assert sent(attributes) == attributes


@given(st.binary(max_size=20))
def test_bytes_become_base64(raw: bytes) -> None:
    assert Bounds().attributes(official({"raw": raw}).values) == {"raw": b64encode(raw).decode()}


@given(st.dictionaries(st.text(max_size=400), st.text(max_size=400) | st.lists(st.text(max_size=9)), max_size=300))
def test_whatever_comes_is_bounded(attributes: dict[str, Any]) -> None:
    bounds = Bounds()
    found = bounds.attributes(official(attributes).values)
    assert len(found) + bounds.dropped == len(attributes)
    assert len(found) <= MOST_ATTRIBUTES
    assert bounds.left >= 0
    assert bounds.clipped == (found != attributes)


def test_each_bound() -> None:
    texts = {f"k{number}": "x" * LONGEST_TEXT for number in range(20)}
    cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({"long": "x" * (LONGEST_TEXT + 1)}, {"long": "x" * LONGEST_TEXT}, 0),
        ({"k" * (LONGEST_KEY + 1): 1, "b": 2}, {"b": 2}, 1),
        ({"list": list(range(MOST_ITEMS + 1))}, {"list": list(range(MOST_ITEMS))}, 0),
        ({str(number): number for number in range(130)}, {str(number): number for number in range(128)}, 2),
    ]
    for given_attributes, kept, dropped in cases:
        bounds = Bounds()
        assert bounds.attributes(official(given_attributes).values) == kept
        assert (bounds.dropped, bounds.clipped) == (dropped, True)
    bounds = Bounds()
    found = bounds.attributes(official(texts).values)
    assert sum(len(key) + len(value) for key, value in found.items()) <= MOST_CHARACTERS
    assert bounds.clipped


def test_what_is_looked_at_is_bounded() -> None:
    """Many attributes take two bytes each; whoever sends them must not hold up the event loop."""
    many = KeyValueList(values=[KeyValue()] * (MOST_LOOKED + 5))
    bounds = Bounds()
    assert bounds.attributes(many.values) == {"": None}
    assert (bounds.dropped, bounds.clipped, bounds.looks) == (5, True, 0)
    nested: list[Any] = [None] * MOST_ITEMS
    nested = [nested] * MOST_ITEMS
    bounds = Bounds()
    found = bounds.attributes(official({"nested": nested, "after": 1}).values)
    assert "after" not in found
    assert str(found).count("None") <= MOST_LOOKED
    assert (bounds.dropped, bounds.clipped, bounds.looks) == (1, True, 0)

    value: Any = "deep"
    for _ in range(DEEPEST + 1):
        value = [value]
    bounds = Bounds()
    found = bounds.attributes(official({"nested": value}).values)["nested"]
    assert depth(found) == DEEPEST
    assert bounds.clipped


def test_a_span_that_was_cut_says_so() -> None:
    made = request(Made(attributes={"k" * (LONGEST_KEY + 1): 1})).resource_spans[0].scope_spans[0].spans[0]
    for count, kept in ((2, 3), (2**32 - 1, 2**32 - 1)):
        made.dropped_attributes_count = count
        attributes = entry_of(made, {}, {}).attributes or {}
        assert attributes["otel.truncated_attributes"] is True
        assert attributes["otel.dropped_attributes_count"] == kept
    for number in range(40):
        made.events.add(name=f"e{number}", time_unix_nano=2**64 - 1)
        made.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8)
    attributes = entry_of(made, {}, {}).attributes or {}
    assert len(attributes["otel.events"]) == len(attributes["otel.links"]) == 32
    assert attributes["otel.events"][0]["time_ns"] < 2**63
    assert len(attributes["otel.links"][0]["trace_id"]) == 32


def test_numbers_that_are_not() -> None:
    assert math.isnan(Bounds().attributes(official({"nan": float("nan")}).values)["nan"])
    assert sent({"large": 2**70, "lone": "\ud800"}) == {"large": str(2**70), "lone": "?"}
    assert sent({"k\ud800": {"k\ud800": [1]}}) == {"k?": {"k?": [1]}}
    assert span_import.DEEPEST < 100, "what is deeper than protobuf allows never arrives"


# -- requests are taken apart as the library would read them -----------------------------------------------------------


TIMES = st.lists(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=4), max_size=3), max_size=3)
"""The times of the records of each scope of each resource."""


def logs(times: list[list[list[int]]]) -> ExportLogsServiceRequest:
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


def read(encoding: Encoding, body: bytes) -> list[TelemetryItem]:
    return list(items(LOGS, tree_of(LOGS, encoding, body)))


@given(TIMES)
def test_both_encodings_hold_what_was_sent(times: list[list[list[int]]]) -> None:
    made = logs(times)
    places = [(g, p, n) for g, group in enumerate(times) for p, part in enumerate(group) for n in range(len(part))]
    as_json = json.dumps(json_format.MessageToDict(made)).encode()
    bodies: list[tuple[Encoding, bytes]] = [(PROTOBUF, made.SerializeToString()), (JSON, as_json)]
    for encoding, body in bodies:
        found = [item for item in read(encoding, body) if item.message is not None]
        assert [item.place for item in found] == places
        for item in found:
            g, p, n = item.place
            assert (item.resource.attributes[0].key, item.scope.name) == (f"resource {g}", f"scope {p}")
            assert (item.message.time_unix_nano or 0) == times[g][p][n]


@given(TIMES, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=4))
def test_broken_bytes_are_refused_and_never_more(times: list[list[list[int]]], changes: list[tuple[int, int]]) -> None:
    body = bytearray(logs(times).SerializeToString())
    for at, byte in changes if body else ():
        body[at % len(body)] = byte
    found: list[TelemetryItem] = []
    with suppress(OtlpRequestError):
        found = read(PROTOBUF, bytes(body))
    assert all(isinstance(item.message, LogRecord | ItemRejectedError | None) for item in found)


@given(st.recursive(st.none() | st.integers() | st.text() | st.floats(), lambda it: st.lists(it, max_size=3)))
def test_any_json_in_a_place_of_a_record_costs_itself(value: object) -> None:
    good = {"timeUnixNano": "5"}
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [good, value, good | {"body": value}, good]}]}]}
    found = [item.message for item in read(JSON, json.dumps(body).encode()) if item.message is not None]
    assert len(found) == 4
    assert [one.time_unix_nano for one in (found[0], found[-1])] == [5, 5]
    assert isinstance(found[1], ItemRejectedError)
    assert isinstance(found[2], JsonRecord if value is None else ItemRejectedError)


def test_parts_of_two_bytes_have_a_bound() -> None:
    with pytest.raises(OtlpRequestError) as refused:
        read(PROTOBUF, b"\x0a\x00" * (1 << 18))
    assert refused.value.status == 413


# -- the table of names: documented, without doubles, in the conventions' own form -------------------------------------


DOCS = (Path(__file__).parents[4] / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
TABLES: dict[str, tuple[Row, ...]] = {
    "every span": semconv.OF_EVERY_SPAN,
    "a call": semconv.OF_A_CALL,
    "a call of a model": semconv.OF_A_MODEL_CALL,
    "an attempt": semconv.OF_AN_ATTEMPT,
    "a reward": semconv.OF_A_REWARD,
}


@pytest.mark.parametrize("title", TABLES)
def test_every_attribute_is_documented_and_exists(title: str) -> None:
    row = re.search(rf"^\| {title} \| (.*) \|$", DOCS, re.MULTILINE)
    assert row is not None
    assert sorted(re.findall(r"`([^`]+)`", row[1])) == sorted(name for name, _ in TABLES[title])


def test_no_span_has_an_attribute_twice_and_names_have_the_form_of_the_conventions() -> None:
    of_a_call = semconv.OF_EVERY_SPAN + semconv.OF_A_CALL + semconv.OF_A_MODEL_CALL
    for rows in (of_a_call, semconv.OF_AN_ATTEMPT, semconv.OF_EVERY_SPAN + semconv.OF_A_REWARD):
        names = [name for name, _ in rows]
        assert len(names) == len(set(names))
        assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9]*(?:[._][a-z0-9]+)+", name)] == []


@pytest.mark.parametrize(
    ("dialect", "host", "name"),
    [
        ("chat", None, "openai"),
        ("chat", "api.openai.com", "openai"),
        ("chat", "eu.api.mistral.ai.evil.example", "openai"),
        ("chat", "api.mistral.ai", "mistral_ai"),
        ("responses", "me.openai.azure.com", "azure.ai.openai"),
        ("messages", "api.anthropic.com", "anthropic"),
        ("messages", "bedrock-runtime.eu-central-1.amazonaws.com", "aws.bedrock"),
    ],
)
def test_the_provider(dialect: str, host: str | None, name: str) -> None:
    otel = by_name(dialect).otel
    assert otel is not None
    assert semconv.provider(otel, host) == name


def test_the_kept_attributes_are_documented() -> None:
    kept = {semconv.SPAN_KIND, semconv.STATUS_DESCRIPTION, semconv.SCOPE_NAME, semconv.SCOPE_VERSION, semconv.RESOURCE}
    kept |= {semconv.EVENTS, semconv.LINKS, semconv.TRACE_STATE, semconv.DROPPED, semconv.TRUNCATED, semconv.REWARD}
    kept |= {semconv.REWARD_REASON, semconv.CONTENT_OMITTED, *semconv.ROLLOUT, *semconv.ATTEMPT}
    kept |= semconv.SENSITIVE - {"gen_ai.tool.call.arguments", "gen_ai.tool.call.result"}
    assert [name for name in sorted(kept) if f"`{name}`" not in DOCS] == []
