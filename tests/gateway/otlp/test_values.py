"""Attribute values: they come in as they were sent, within bounds, and go out as they are kept."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from typing import Any, cast

from fakes.collector import plain
from fakes.otlp import Made, fill, request
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import KeyValue, KeyValueList

from penstock.gateway.otlp import span_out, values
from penstock.gateway.otlp.signals import JSON, TRACES, items, tree_of
from penstock.gateway.otlp.span_in import entry_of
from penstock.gateway.otlp.values import (
    DEEPEST,
    LONGEST_KEY,
    LONGEST_TEXT,
    MOST_ATTRIBUTES,
    MOST_CHARACTERS,
    MOST_ITEMS,
    MOST_LOOKED,
    Bounds,
)

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
    span_out.fill(made.values, attributes)
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


def test_nesting_is_bounded() -> None:
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


def test_many_events_and_links_are_cut() -> None:
    made = request(Made()).resource_spans[0].scope_spans[0].spans[0]
    for number in range(40):
        made.events.add(name=f"e{number}", time_unix_nano=2**64 - 1)
        made.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8)
    attributes = entry_of(made, {}, {}).attributes or {}
    assert len(attributes["otel.events"]) == len(attributes["otel.links"]) == 32
    assert attributes["otel.truncated_attributes"] is True
    assert attributes["otel.events"][0]["time_ns"] < 2**63
    assert len(attributes["otel.links"][0]["trace_id"]) == 32


def test_numbers_that_are_not() -> None:
    assert math.isnan(Bounds().attributes(official({"nan": float("nan")}).values)["nan"])
    assert sent({"large": 2**70, "lone": "\ud800"}) == {"large": str(2**70), "lone": "?"}
    assert sent({"k\ud800": {"k\ud800": [1]}}) == {"k?": {"k?": [1]}}
    assert values.DEEPEST < 100, "what is deeper than protobuf allows never arrives"
