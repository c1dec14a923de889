"""Spans come in: by the official SDK and by hand, in both encodings; what cannot be taken is said and harms nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from fakes.otlp import LIMIT, Inlet, Made, as_kind, names, partial, request, status, violated
from google.protobuf import json_format
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.gateway.followers.otlp.signals import JSON, PROTOBUF
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.span import span_id, trace_id
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry

R1 = {"penstock.rollout_id": "r1", "penstock.attempt_id": "a2"}
SCOPED = "/agent/token/r1/a1/v1/traces"


def tracing(inlet: Inlet, resource: dict[str, Any], compression: Compression) -> None:
    """An agent's own instrumentation, as the SDK does it."""
    exporter = OTLPSpanExporter(endpoint=f"{inlet.url}/v1/traces", compression=compression)
    provider = TracerProvider(resource=Resource(resource))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("my.agent", "1.2")
    with tracer.start_as_current_span("invoke_agent planner") as outer:
        outer.set_attribute("gen_ai.agent.name", "planner")
        outer.set_attribute("numbers", [1, 2, 3])
        with tracer.start_as_current_span("execute_tool", kind=trace.SpanKind.CLIENT) as inner:
            inner.add_event("retry", {"after_s": 1.5})
            try:
                raise KeyError("no such flight")
            except KeyError as error:
                inner.record_exception(error)
                inner.set_status(trace.Status(trace.StatusCode.ERROR, "the tool failed"))
    assert provider.force_flush()
    provider.shutdown()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_the_official_sdk_sends_spans(inlet: Inlet, compression: Compression) -> None:
    await asyncio.to_thread(tracing, inlet, {**R1, "service.name": "flights"}, compression)
    inner, outer = inlet.spans("r1")
    about = (inner.name, inner.attempt, inner.status, inner.error, inner.agent)
    assert about == ("execute_tool", "a2", "error", "otel", "flights")
    assert (outer.name, outer.status, outer.error, outer.agent) == ("invoke_agent planner", "ok", None, "planner")
    assert (inner.trace_id, inner.parent_id) == (outer.trace_id, outer.span_id)
    assert outer.parent_id is None
    assert outer.start_ns <= inner.start_ns <= (inner.end_ns or 0) <= (outer.end_ns or 0)
    found = inner.attributes or {}
    assert found["span.kind"] == "client"
    assert found["otel.status_description"] == "the tool failed"
    assert found["otel.scope.name"] == "my.agent"
    assert found["otel.resource"]["service.name"] == "flights"
    retry, exception = found["otel.events"]
    assert (retry["name"], retry["attributes"]) == ("retry", {"after_s": 1.5})
    assert exception["attributes"]["exception.type"] == "KeyError"
    assert (outer.attributes or {})["numbers"] == [1, 2, 3]
    assert inlet.counted == {("accepted",): 2}


BY_HAND = """
{"resourceSpans": [{"unknown": {"x": [1]}, "resource": {"attributes": [
    {"key": "penstock.rollout_id", "value": {"stringValue": "r1"}}]},
  "scopeSpans": [{"scope": {"name": "by hand", "version": null}, "spans": [{
    "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "eee19b7ec3c1b174", "parentSpanId": null,
    "name": "I am a span", "kind": 2,
    "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": 1544712661000000001,
    "attributes": [
      {"key": "text", "value": {"stringValue": "5"}}, {"key": "int", "value": {"intValue": "-9223372036854775808"}},
      {"key": "number", "value": {"intValue": 7}}, {"key": "double", "value": {"doubleValue": 0.5}},
      {"key": "infinite", "value": {"doubleValue": "-Infinity"}}, {"key": "true", "value": {"boolValue": true}},
      {"key": "bytes", "value": {"bytesValue": "AAH/"}}, {"key": "nothing", "value": {}}, {"key": "empty",
        "value": {"arrayValue": {}}},
      {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": ""}]}}},
      {"key": "map", "value": {"kvlistValue": {"values": [{"key": "a", "value": {"boolValue": false}}]}}}],
    "links": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "EEE19B7EC3C1B173"}],
    "status": {}, "droppedAttributesCount": 3, "newField": 1}]}]}]}
"""


async def test_json_by_the_rules_of_otlp(inlet: Inlet) -> None:
    answer = await inlet.post(BY_HAND.encode(), JSON + "; charset=utf-8")
    assert (answer.status, answer.kind, json.loads(answer.body)) == (200, JSON, {})
    (span,) = inlet.spans("r1")
    ids = (span.trace_id, span.span_id, span.parent_id)
    assert ids == ("5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174", None)
    assert (span.start_ns, span.end_ns) == (1544712660000000000, 1544712661000000001)
    found = span.attributes or {}
    assert found["otel.links"][0]["span_id"] == "eee19b7ec3c1b173"
    assert (found["span.kind"], found["otel.dropped_attributes_count"]) == ("server", 3)
    plain = {name: value for name, value in found.items() if "." not in name}
    assert plain == {
        **{"text": "5", "int": -(2**63), "number": 7, "double": 0.5, "infinite": float("-inf"), "true": True},
        **{"bytes": "AAH/", "nothing": None, "empty": [], "list": [1, ""], "map": {"a": False}},
    }


async def test_both_encodings_give_the_same(inlet: Inlet) -> None:
    made = Made(name="s", attributes={"a": 1, "b": [True, "x", 2.5], "c": {"d": None}}, resource=R1)
    as_json = json_format.MessageToDict(request(made))
    span = as_json["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span |= {"traceId": made.trace, "spanId": made.span, "kind": 1}
    assert (await inlet.post(request(made).SerializeToString())).status == 200
    assert (await inlet.post(json.dumps(as_json).encode(), JSON)).status == 200
    first, second = inlet.spans("r1")
    assert first.model_copy(update={"sequence": 2}) == second


async def test_an_empty_request_is_a_success(inlet: Inlet) -> None:
    for kind, body in ((PROTOBUF, b""), (JSON, b"{}")):
        answer = await inlet.post(body, kind)
        assert (answer.status, answer.kind, answer.body) == (200, kind, body)


REFUSED: list[tuple[str, bytes, dict[str, str], int, str]] = [
    (PROTOBUF, b"\x0a\xff", {}, 400, "not an ExportTraceServiceRequest"),
    (JSON, b"{", {}, 400, "not an ExportTraceServiceRequest"),
    (JSON, b'{"resourceSpans": {}}', {}, 400, "$.resourceSpans"),
    (JSON, b'{"resourceSpans": [{"scopeSpans": [7]}]}', {}, 400, "not 7"),
    (JSON, b'{"resource_spans": []}', {}, 400, "it has 'resource_spans' and no 'resourceSpans'"),
    (JSON, b'{"resourceLogs": []}', {}, 400, "it has 'resourceLogs' and no 'resourceSpans'"),
    (JSON, b'{"resourceSpans": [{"resource": {"attributes": [{"value": ' + b'{"arrayValue": {"values": [' * 9000,
     {}, 400, "nested too deeply"),
    ("text/plain", b"{}", {}, 415, "application/x-protobuf or application/json"),
    (PROTOBUF, b"", {"Content_Encoding": "br"}, 415, "use gzip or none"),
    (PROTOBUF, b"{}", {"Content_Encoding": "gzip"}, 400, "not gzip"),
    (JSON, gzip.compress(b"{}", mtime=0)[:-4], {"Content_Encoding": "gzip"}, 400, "ends early"),
    (JSON, gzip.compress(b"{}", mtime=0) * 2, {"Content_Encoding": "gzip"}, 400, "goes on after its end"),
    (PROTOBUF, b"x" * (LIMIT + 1), {}, 413, "send smaller batches"),
    (PROTOBUF, gzip.compress(b"x" * (LIMIT + 1), mtime=0), {"Content_Encoding": "gzip"}, 413, "send smaller batches"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "headers", "code", "why"), REFUSED)
async def test_what_cannot_be_read_is_refused_with_a_status(
    inlet: Inlet, kind: str, body: bytes, headers: dict[str, str], code: int, why: str
) -> None:
    answer = await inlet.post(body, kind, **headers)
    assert answer.status == code
    assert answer.kind == (PROTOBUF if kind == PROTOBUF else JSON)
    assert why in status(answer).message
    if code == 400:
        assert violated(answer) == ["body"]
    assert inlet.counted == {}
    assert inlet.store.cursor() == 0


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("traceId", "xyz", "'xyz'"),
        ("traceId", "5b8efff798038103d269b633813fc60\n", "60\\n'"),
        ("kind", "CLIENT", "'CLIENT'"),
        ("kind", 10**40, str(10**40)),
        ("droppedAttributesCount", 10**40, str(10**40)),
        ("attributes", [{"key": "a", "value": {"intValue": "many"}}], "[0].value.intValue 'many'"),
    ],
)
async def test_a_span_in_json_that_cannot_be_read_costs_itself(
    inlet: Inlet, field: str, value: Any, shown: str
) -> None:
    good = {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "startTimeUnixNano": "1"}
    spans = [good, good | {field: value}, good]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    rejected, message = partial(await inlet.post(body, JSON, path=SCOPED))
    assert (rejected, len(inlet.spans("r1"))) == (1, 2)
    assert f"spans[1]: {field}" in message
    assert shown in message


async def test_the_largest_request_is_taken(inlet: Inlet) -> None:
    body = request(Made(resource=R1)).SerializeToString()
    padding = request(Made(resource={**R1, "x": "y" * (LIMIT - len(body) - 60)})).SerializeToString()
    assert LIMIT - 100 < len(padding) <= LIMIT
    answer = await inlet.post(gzip.compress(padding), Content_Encoding="gzip")
    assert answer.status == 200
    assert len(inlet.spans("r1")) == 1


async def test_a_batch_is_partly_taken(inlet: Inlet) -> None:
    batch = request(
        Made(name="good", resource=R1),
        Made(name="lost"),
        Made(name="no trace", resource=R1, trace="0" * 32),
        Made(name="short", resource=R1, span="ab"),
        Made(name="timeless", resource=R1, start=0),
        Made(name="far", resource=R1, end=2**63),
        Made(name="bad id", resource={"penstock.rollout_id": "a b"}),
        Made(name="good too", attributes={"agentlightning.rollout_id": "r1"}),
    )
    for kind in (PROTOBUF, JSON):
        answer = await inlet.post(as_kind(batch, kind), kind)
        rejected, message = partial(answer)
        assert (answer.status, rejected) == (200, 6)
        for part in ("penstock.rollout_id", "trace id of 16 bytes", "nanoseconds since 1970", "rollout_id 'a b'"):
            assert part in message
    assert [(span.name, span.attempt) for span in inlet.spans("r1")] == [("good", "a2")] * 2 + [("good too", "a1")] * 2
    assert inlet.counted == {("accepted",): 4, ("unjoined",): 2, ("invalid",): 10}


async def test_a_scope_goes_before_everything(inlet: Inlet) -> None:
    mine = Made(name="mine", attributes={"penstock.attempt_id": "a9", "penstock.rollout_id": "r1"})
    plain, foreign = Made(name="plain"), Made(name="foreign", resource={"penstock.rollout_id": "r2"})
    rejected, message = partial(await inlet.post(request(mine, plain, foreign).SerializeToString(), path=SCOPED))
    assert (rejected, "another rollout than 'r2'" in message) == (1, True)
    assert [(span.name, span.attempt) for span in inlet.spans("r1")] == [("mine", "a9"), ("plain", "a1")]
    # Whoever is not an agent may write everywhere; the address says where.
    answer = await inlet.post(request(foreign).SerializeToString(), path="/agent/open/r3/a1/v1/traces")
    assert answer.body == b""
    assert names(inlet.spans("r3")) == ["foreign"]
    assert inlet.spans("r2") == []


async def test_the_resource_goes_before_the_span_and_ours_before_lightnings(inlet: Inlet) -> None:
    batch = request(
        Made(name="resource", resource={"agentlightning.rollout_id": "r1"}, attributes={"penstock.rollout_id": "r2"}),
        Made(name="ours", resource={"agentlightning.rollout_id": "r2", "penstock.rollout_id": "r1"}),
        Made(name="number", attributes={"penstock.rollout_id": 17}),
    )
    assert (await inlet.post(batch.SerializeToString())).body == b""
    assert names(inlet.spans("r1")) == ["resource", "ours"]
    assert names(inlet.spans("17")) == ["number"]
    assert inlet.spans("r2") == []


async def call(inlet: Inlet, rollout: str, attempt: str = "a1", trace: str | None = None) -> None:
    entry = SpanEntry(rollout, attempt, status="ok", start_ns=1, end_ns=2, trace_id=trace)
    await inlet.dispatcher.add([entry])


async def test_a_trace_leads_to_the_attempt_whose_calls_were_in_it(inlet: Inlet) -> None:
    own, derived = "ab" * 16, trace_id("r1", "a1")
    await call(inlet, "r1", "a2", own)
    await call(inlet, "r1")
    root = span_id(derived, "r1", "a1", 0)
    batch = request(Made(name="own", trace=own), Made(name="derived", trace=derived, parent=root), Made(name="none"))
    assert partial(await inlet.post(batch.SerializeToString()))[0] == 1
    found = {(span.name, span.attempt, span.parent_id) for span in inlet.spans("r1")}
    assert found == {("own", "a2", None), ("derived", "a1", root)}, "the parent is as the runner hands it out"
    # Spans with names lead the others of their trace, too.
    trace = "cd" * 16
    assert (await inlet.post(request(Made(name="a", trace=trace, resource=R1)).SerializeToString())).body == b""
    assert (await inlet.post(request(Made(name="b", trace=trace)).SerializeToString())).body == b""
    assert {(span.name, span.attempt) for span in inlet.spans("r1")} >= {("a", "a2"), ("b", "a2")}


async def test_a_trace_of_several_attempts_leads_nowhere(inlet: Inlet) -> None:
    shared = "ef" * 16
    await call(inlet, "r1", trace=shared)
    await call(inlet, "r2", trace=shared)
    await call(inlet, "r1", trace=shared)
    # The trace that an attempt was given stays its own, whoever else uses it.
    await call(inlet, "r3", trace=trace_id("r1", "a1"))
    batch = request(Made(trace=shared), Made(name="own", trace=trace_id("r1", "a1")))
    assert partial(await inlet.post(batch.SerializeToString()))[0] == 1
    assert names(inlet.spans("r1")) == ["own"]


async def test_a_rollout_without_an_attempt_is_its_newest(inlet: Inlet) -> None:
    await inlet.dispatcher.enqueue([RolloutSpec(id="q1")])
    (claimed,) = await inlet.dispatcher.claim(ClaimRequest(worker="w"))
    assert (await inlet.post(request(Made(resource={"penstock.rollout_id": "q1"})).SerializeToString())).body == b""
    (span,) = inlet.spans("q1")
    assert span.attempt == claimed.attempt.id


REWARDS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"penstock.reward": 0.5, "penstock.reward.reason": "because"}, (0.5, {}, "because")),
    ({"penstock.reward": 1, "penstock.reward.dimensions.style": -2}, (1.0, {"style": -2.0}, None)),
    ({"agentlightning.reward.0.value": 0.25, "agentlightning.reward.0.name": "x"}, (0.25, {}, None)),
    (
        {"agentlightning.reward.0.value": 1.0, "agentlightning.reward.0.name": "x", "agentlightning.reward.1.value": 2},
        (1.0, {"x": 1.0, "1": 2.0}, None),
    ),
]


@pytest.mark.parametrize(("attributes", "kept"), REWARDS)
async def test_a_span_carries_a_reward(inlet: Inlet, attributes: dict[str, Any], kept: tuple[Any, ...]) -> None:
    body = request(Made(attributes=attributes)).SerializeToString()
    for path in (SCOPED, SCOPED, "/agent/open/r2/a1/v1/traces"):
        assert (await inlet.post(body, path=path)).body == b""
    # Sent twice, kept once; the agent's own is not trusted.
    (own,), (given,) = inlet.rewards("r1"), inlet.rewards("r2")
    assert (own.value, own.dimensions, own.reason) == kept == (given.value, given.dimensions, given.reason)
    assert (own.source, own.trusted, given.source, given.trusted) == ("agent", False, "user", True)
    assert len(inlet.spans("r1")) == 2


async def test_a_reward_that_is_no_number_is_a_warning(inlet: Inlet) -> None:
    odd: list[Any] = [True, "0.5", float("nan"), float("inf"), None, [1.0]]
    for value in odd:
        made = request(Made(attributes={"penstock.reward": value})).SerializeToString()
        rejected, message = partial(await inlet.post(made, path=SCOPED))
        assert (rejected, "not a finite number" in message) == (0, True), value
    assert (len(inlet.spans("r1")), inlet.rewards("r1")) == (len(odd), [])


async def test_a_tape_that_takes_nothing_asks_to_come_back(inlet: Inlet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise TapeError("the disk is full")

    monkeypatch.setattr(inlet.store, "write", full)
    answer = await inlet.post(request(Made(resource=R1)).SerializeToString())
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert "disk is full" in status(answer).message
    assert inlet.counted == {}


ODD_IDS = """
{"resourceSpans": [{"resource": {"attributes": [{"key": "penstock.rollout_id", "value": {"stringValue": "r1"}}]},
  "scopeSpans": [{"spans": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "x",
    "parentSpanId": "0000000000000000", "startTimeUnixNano": "1544712660000000000", "status": {"code": 1},
    "links": [{"traceId": "5b8", "spanId": "eee19b7ec3c1b173"}, {"traceId": "", "spanId": ""},
      {"traceId": "00000000000000000000000000000000", "spanId": "eee19b7ec3c1b173"},
      {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b173"}]}]}]}]}
"""


async def test_ids_that_name_nothing_are_none(inlet: Inlet) -> None:
    """They would keep the span from being exported."""
    assert (await inlet.post(ODD_IDS.encode(), JSON)).status == 200
    (span,) = inlet.spans("r1")
    assert span.parent_id is None
    assert [link["span_id"] for link in (span.attributes or {})["otel.links"]] == ["eee19b7ec3c1b173"]
    assert (span.attributes or {})["otel.status_code"] == "OK"


async def test_secrets_in_attributes_are_not_kept(inlet: Inlet) -> None:
    key = "sk-PLANTED-0123456789abcdef"
    said = {
        "http.request.header.authorization": [f"Bearer {key}"],
        "http.request.header.x-other": [f"Bearer {key}"],
        "url.full": "https://h/p?api_key=PLANTED-1&page=2",
        "exception.message": f"401: wrong key {key}",
        "gen_ai.input.messages": "what is ?key=1 & code=2",
        "llm.token_count.prompt": "12",
        "session.id": "7",
    }
    await inlet.post(request(Made(attributes=said, resource={**R1, "db.password": "PLANTED-2"})).SerializeToString())
    (span,) = inlet.spans("r1")
    found = span.attributes or {}
    assert "PLANTED" not in str(found)
    assert found["url.full"] == "https://h/p?api_key=***&page=2"
    assert found["exception.message"] == "401: wrong key ***"
    kept = ("gen_ai.input.messages", "llm.token_count.prompt", "session.id")
    assert [found[name] for name in kept] == [said[name] for name in kept]
