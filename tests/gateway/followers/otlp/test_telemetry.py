"""All three signals at every address of one gateway: its own to answer, no calls, and nothing for the model's provider.

The upstreams' socket is listened on and never accepted from unless a test does: what reached it would still wait there.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import pytest
from fakes.mistakes import tells
from fakes.odd import request, send
from fakes.otlp import fill
from fakes.raw import reply
from fakes.rig import Base, Rig
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.gateway.followers.otlp.signals import JSON, PATHS, PROTOBUF
from penstock.gateway.traffic.calls.admission import key_hash, make_key

NOW = 1_790_000_000_000_000_000
CLAUDE, CODEX = "com.anthropic.claude_code.events", "codex_otel"
KEY = make_key()


@pytest.fixture(scope="module")
def gateway_config() -> str:
    return f'[[key]]\nname = "team"\nrole = "call"\nsha256 = "{key_hash(KEY)}"\n'


@pytest.fixture(autouse=True)
def nothing_for_the_provider(base: Base) -> Iterator[None]:
    """When a test is over, nobody waits at the upstreams' socket."""
    yield
    base.listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        base.listener.accept()


def send_all(url: str, headers: Mapping[str, str], resource: Mapping[str, str]) -> None:
    """A program's telemetry as the official exporters send it."""
    said: dict[str, Any] = {"headers": dict(headers), "compression": Compression.Gzip}
    made = Resource(dict(resource))
    traces, logs = TracerProvider(resource=made), LoggerProvider(resource=made)
    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", **said)))
    logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(f"{url}/v1/logs", **said)))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics", **said))
    metrics = MeterProvider([reader], resource=made)
    with traces.get_tracer("t").start_as_current_span("work"):
        logs.get_logger("l").emit(
            body="user prompt: my private diary", severity_number=SeverityNumber.WARN, attributes={"answer": 42}
        )
    metrics.get_meter("m").create_counter("tokens").add(1)
    for provider in (traces, logs, metrics):
        assert provider.force_flush()
        provider.shutdown()


async def figures(base: Base, http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get(f"{base.url}/metrics") as answer:
        lines = [line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines}


def calls_of(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name.startswith("penstock_calls_total")}


@pytest.mark.parametrize("way", ["address", "headers", "resource", "token"])
async def test_the_official_exporters_of_all_signals(rig: Rig, http: aiohttp.ClientSession, way: str) -> None:
    headers, before = dict[str, str](), await figures(rig.base, http)
    if way == "headers":
        headers = {"x-rollout-id": rig.rollout}
    elif way == "token":
        async with http.post(f"{rig.base.url}/api/tokens", json={"rollout": rig.rollout}) as answer:
            headers = {"authorization": f"Bearer {(await answer.json())['token']}"}
    resource = {"penstock.rollout_id": rig.rollout} if way == "resource" else {}
    await asyncio.to_thread(send_all, rig.base.url + (rig.path("") if way == "address" else ""), headers, resource)
    event, span = sorted(await rig.tape.spans(rig.rollout, 2), key=lambda one: one.kind)
    assert (event.kind, event.name, event.status, span.kind, span.name) == ("event", "log", "ok", "otel", "work")
    assert (event.trace_id, event.parent_id) == (span.trace_id, span.span_id)
    said = event.attributes or {}
    assert (said["otel.body"], said["otel.severity"], said["answer"]) == ("user prompt: my private diary", "WARN", 42)
    after = await figures(rig.base, http)
    points = "penstock_otlp_metric_points_total"
    assert after[points] > before[points]
    assert calls_of(after) == calls_of(before)


async def ask(
    http: aiohttp.ClientSession, url: str, body: bytes, kind: str = JSON, **headers: str
) -> tuple[int, bytes]:
    named = {"content-type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(url, data=body, headers=named) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("path", [*PATHS, "/v1/logs?a=b"])
async def test_a_path_of_telemetry_is_never_a_call(rig: Rig, http: aiohttp.ClientSession, path: str) -> None:
    profiles = "profiles" in path
    for at in (rig.path(""), ""):
        for kind, body in ((JSON, b"{}"), (PROTOBUF, b""), (JSON, gzip.compress(b"{}"))):
            headers = {"content_encoding": "gzip"} if body[:1] == b"\x1f" else {}
            status, told = await ask(http, rig.base.url + at + path, body, kind, **headers)
            assert status == (404 if profiles else 200), told
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with http.request(method, rig.base.url + at + path, data=b"{}") as answer:
                assert answer.status == (404 if profiles else 405)
                assert profiles or answer.headers["allow"] == "POST"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(rig.base.url + at + path)
        assert refused.value.status == 400
    status, told = await ask(http, rig.base.url + rig.path(path), b"[1]", JSON)
    assert status == (404 if profiles else 400)
    assert json.loads(told)["message"]
    async with http.get(f"{rig.base.url}/api/rollouts/{rig.rollout}") as answer:
        assert answer.status == 404, "it has made no rollout"


@pytest.mark.parametrize("under", ["", "/", "/v1", "/v1/"])
async def test_telemetry_at_a_base_url_is_refused(rig: Rig, http: aiohttp.ClientSession, under: str) -> None:
    for at in (rig.path(""), ""):
        for kind, body in ((PROTOBUF, b"\x0a\x00"), (JSON, b' { "resourceLogs": []}')):
            status, told = await ask(http, rig.base.url + at + under, body, kind)
            assert status == 404
            assert b"/v1/logs" in told


def record(attributes: dict[str, Any], body: str | None = None, scope: str = "") -> bytes:
    """A request with one log record."""
    made = ExportLogsServiceRequest()
    part = made.resource_logs.add().scope_logs.add()
    part.scope.name = scope
    one = part.log_records.add(time_unix_nano=NOW)
    if body is not None:
        one.body.string_value = body
    fill(one.attributes, attributes)
    return made.SerializeToString()


ANSWERS = [request(), send(reply(200, b'{"id": "c", "object": "chat.completion", "model": "m", "choices": []}'))]
SESSIONS = [
    ("x-claude-code-session-id", "claude", "session.id", CLAUDE, "claude_code.user_prompt", "user_prompt"),
    ("session-id", "session", "conversation.id", CODEX, None, "codex.tool_result"),
    ("thread-id", "thread", "conversation.id", CODEX, None, "codex.tool_result"),
    ("x-session-id", "session", "gen_ai.conversation.id", "any", None, "my.event"),
]


@pytest.mark.parametrize(("header", "kind", "attribute", "scope", "body", "event"), SESSIONS)
async def test_telemetry_and_calls_of_a_session_meet(
    rig: Rig, http: aiohttp.ClientSession, header: str, kind: str, attribute: str, scope: str, body: str, event: str
) -> None:
    session = str(uuid.uuid4())
    async with rig.upstream(ANSWERS):
        status, _ = await ask(http, f"{rig.base.url}/v1/chat/completions", b'{"model": "m"}', **{header: session})
        assert status == 200
    await rig.tape.spans(f"{kind}-{session}", 1)
    sent = record({"event.name": event, attribute: session}, body, scope)
    assert await ask(http, f"{rig.base.url}/v1/logs", sent, PROTOBUF) == (200, b"")
    call, log = await rig.tape.spans(f"{kind}-{session}", 2)
    assert (call.kind, log.kind, log.name, log.start_ns) == ("llm", "event", body or event, NOW)


async def test_a_known_agents_telemetry_may_be_there_before_its_first_call(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    """By what its records say, or by a session header of its exporter."""
    url = f"{rig.base.url}/v1/logs"
    for kind, attribute, scope, name in (
        ("claude", "session.id", CLAUDE, "claude_code.user_prompt"),
        ("session", "conversation.id", "", "codex.prompt"),
    ):
        assert await ask(http, url, record({attribute: rig.rollout}, name, scope), PROTOBUF) == (200, b"")
        assert [span.name for span in await rig.tape.spans(f"{kind}-{rig.rollout}", 1)] == [name]
        assert (await rig.tape.get(f"/api/rollouts/{kind}-{rig.rollout}"))["origin"] == "implicit"
    headers = {"x-claude-code-session-id": rig.rollout}
    assert await ask(http, url, record({}, "a line"), PROTOBUF, **headers) == (200, b"")
    _, span = await rig.tape.spans(f"claude-{rig.rollout}", 2)
    assert (span.name, (span.attributes or {})["otel.body"]) == ("log", "a line")


async def test_a_record_of_nobody_is_rejected_and_counted(rig: Rig, http: aiohttp.ClientSession) -> None:
    counted = 'penstock_otlp_logs_total{outcome="unjoined"}'
    before = (await figures(rig.base, http)).get(counted, 0)
    for sent in (record({}, "a line"), record({"session.id": "unknown", "event.name": "gemini_cli.tool_call"})):
        status, told = await ask(http, f"{rig.base.url}/v1/logs", sent, PROTOBUF)
        partial = ExportLogsServiceResponse.FromString(told).partial_success
        assert (status, partial.rejected_log_records) == (200, 1)
        for part in ("resource_logs[0].scope_logs[0].log_records[0]", "penstock.rollout_id"):
            assert part in partial.error_message
    assert (await figures(rig.base, http))[counted] == before + 2


SECRET = "sk-PLANTED-0123456789abcdef"
LOGS_BY_HAND: dict[str, Any] = {
    "resourceLogs": [{"newField": 1,
      "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "a"}}]},
      "scopeLogs": [{"scope": {"name": "gemini"}, "logRecords": [
        {"timeUnixNano": str(NOW), "eventName": "gemini_cli.tool_call", "severityNumber": 9, "unknown": {}, "flags": 1,
         "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "eee19b7ec3c1b174",
         "body": {"stringValue": f"Tool call with {SECRET}"}, "attributes": [
             {"key": "duration_ms", "value": {"intValue": "12"}}, {"key": "ok", "value": {"boolValue": True}},
             {"key": "api_key", "value": {"stringValue": "PLANTED"}},
             {"key": "half", "value": {"stringValue": "\ud83d"}}]},
        {"timeUnixNano": "soon", "body": {"stringValue": "bad time"}},
        {"observedTimeUnixNano": NOW, "severityText": "Notice", "traceId": "ab", "body": {"kvlistValue": {"values": [
            {"key": "password", "value": {"stringValue": "PLANTED"}}, {"key": "n", "value": {"doubleValue": "NaN"}}]}}},
        {"timeUnixNano": 2**63, "body": {"stringValue": "too late"}},
        7,
        {"body": {"stringValue": "x" * 10_000}},
      ]}]}]
}  # fmt: skip


async def test_logs_in_json_with_bad_records_among_them(rig: Rig, http: aiohttp.ClientSession) -> None:
    status, told = await ask(http, rig.base.url + rig.path("/v1/logs"), json.dumps(LOGS_BY_HAND).encode())
    partial = json.loads(told)["partialSuccess"]
    assert (status, partial["rejectedLogRecords"]) == (200, "3")
    for at, field, value in ((1, "timeUnixNano", "'soon'"), (3, "time", str(2**63)), (4, "it", "7")):
        assert f"resourceLogs[0].scopeLogs[0].logRecords[{at}]: {field} {value}" in partial["errorMessage"]
    call, plain, long = await rig.tape.spans(rig.rollout, 3)
    assert (call.name, call.start_ns) == ("gemini_cli.tool_call", NOW)
    assert (call.trace_id, call.parent_id) == ("5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174")
    said = call.attributes or {}
    assert (said["duration_ms"], said["ok"], said["otel.severity"], said["api_key"]) == (12, True, "INFO", "***")
    assert said["otel.body"] == "Tool call with ***"
    assert said["otel.resource"] == {"service.name": "a"}
    assert "PLANTED" not in str(plain.attributes)
    assert (plain.name, plain.start_ns, (plain.attributes or {})["otel.severity"]) == ("log", NOW, "Notice")
    assert len((long.attributes or {})["otel.body"]) == 8192
    assert (long.attributes or {})["otel.truncated_attributes"] is True
    assert long.start_ns > NOW - 10**18


def spans_with(bad: bytes, names: str) -> bytes:
    """A request with one span for each letter, the raw bytes `bad` in place of each `!`."""
    good = Span(trace_id=b"t" * 16, span_id=b"s" * 8, start_time_unix_nano=NOW, end_time_unix_nano=NOW)
    made: list[bytes] = []
    for name in names:
        good.name = name
        made.append(bad if name == "!" else good.SerializeToString())
    return field(1, field(2, b"".join(field(2, one) for one in made)))


def field(number: int, data: bytes) -> bytes:
    size, encoded = len(data), bytearray([number << 3 | 2])
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    return bytes(encoded) + bytes([size]) + data


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (field(5, b"\xff\xfe"), "2a02fffe"),
        (b"\x0a\x05ab", "0a056162"),
        (field(1, b"t" * 15) + field(2, b"s" * 8), "trace id '" + "74" * 15),
        (field(1, b"t" * 16) + field(2, b"\0" * 8), "span id '0000000000000000'"),
    ],
)
async def test_one_bad_span_in_protobuf_costs_itself(
    rig: Rig, http: aiohttp.ClientSession, bad: bytes, what: str
) -> None:
    status, told = await ask(http, rig.base.url + rig.path("/v1/traces"), spans_with(bad, "a!b"), PROTOBUF)
    assert status == 200
    assert b"spans[1]" in told
    assert what.encode() in told
    assert [span.name for span in await rig.tape.spans(rig.rollout, 2)] == ["a", "b"]


async def test_a_bad_resource_costs_what_is_its_own(rig: Rig, http: aiohttp.ClientSession) -> None:
    good = {"timeUnixNano": NOW, "body": {"stringValue": "x"}}
    groups = [
        {"resource": {"attributes": 5}, "scopeLogs": [{"logRecords": [good, good]}]},
        {"scopeLogs": [{"scope": {"name": 1}, "logRecords": [good]}, {"logRecords": [good]}]},
    ]
    body = json.dumps({"resourceLogs": groups}).encode()
    told = json.loads((await ask(http, rig.base.url + rig.path("/v1/logs"), body))[1])["partialSuccess"]
    assert told["rejectedLogRecords"] == "3"
    assert tells(told["errorMessage"], "its resource: attributes 5", "its scope: name 1")
    await rig.tape.spans(rig.rollout, 1)


NO_METRICS: dict[str, Any] = {"resourceMetrics": []}


async def test_a_key_for_calls_adds_no_telemetry_to_a_rollout_and_fails_no_exporter(
    rig: Rig, http: aiohttp.ClientSession
) -> None:
    for name, body, told in (("logs", LOGS_BY_HAND, "6"), ("metrics", NO_METRICS, None)):
        url = f"{rig.base.url}{rig.path('/v1/' + name)}"
        status, answer = await ask(http, url, json.dumps(body).encode(), authorization=f"Bearer {KEY}")
        assert (status, json.loads(answer).get("partialSuccess", {}).get("rejectedLogRecords")) == (200, told)
