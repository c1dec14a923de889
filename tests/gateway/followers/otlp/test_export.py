"""Spans go out: every field of them, in batches, until the collector has them; nothing is lost when somebody dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.collector import Collector, Reply, collecting
from fakes.entries import body
from fakes.exporting import T0, call, exporting
from fakes.otlp import Inlet, Made, inlet_at, request
from fakes.ports import steady_ports
from fakes.waiting import until
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.gateway.config import OTLP_HEADERS
from penstock.gateway.followers.otlp import exporter
from penstock.gateway.followers.otlp.exporter import NOTE
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import Judgement, Outcome
from penstock.gateway.model.span import Usage, span_id, trace_id
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction


async def exported(inlet: Inlet, collector: Collector, *entries: SpanEntry, **settings: Any) -> Sequence[Any]:
    async with exporting(inlet, collector, **settings):
        await inlet.dispatcher.add(entries)
    return collector.taken


async def test_a_model_call_has_every_attribute(inlet: Inlet, collector: Collector) -> None:
    entry = call(
        stream=True, model_served="m-1-2026", response_id="chatcmpl-1", finish="length", choices=2, agent="planner",
        first_byte_ns=250_000_000, retry_of=1, parent_id="12" * 8, trace_id="ab" * 16,
        usage=Usage(input_tokens=10, output_tokens=5, cached_tokens=4, cache_write_tokens=3, reasoning_tokens=2),
    )  # fmt: skip
    (found,) = await exported(inlet, collector, entry)
    span = found.span
    assert (span.name, span.kind, span.status.code) == ("chat m-1", Span.SPAN_KIND_CLIENT, Status.STATUS_CODE_UNSET)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("ab" * 16, "12" * 8)
    assert span.span_id.hex() == span_id("ab" * 16, "r1", "a1", 1)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (T0 + 1, T0 + 1 + 10**9)
    assert found.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.conversation.id": "r1/a1",
        "gen_ai.agent.name": "planner",
        "gen_ai.request.model": "m-1",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m-1-2026",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.cache_write.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 2,
        "openai.api.type": "chat_completions",
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "penstock.upstream": "local",
        "penstock.retry_of": 1,
        "penstock.rollout.id": "r1",
        "penstock.attempt.id": "a1",
        "penstock.span.sequence": 1,
    }
    assert found.resource["service.name"] == "penstock"
    assert found.scope.name == "penstock.gateway"


CALLS = [
    ({"dialect": "messages"}, "chat m-1", {"gen_ai.provider.name": "anthropic", "gen_ai.operation.name": "chat"}),
    ({"dialect": "responses", "upstream": "azure"}, "chat m-1",
     {"gen_ai.provider.name": "azure.ai.openai", "openai.api.type": "responses", "server.port": 443}),
    ({"dialect": "completions", "upstream": "main"}, "text_completion m-1", {"gen_ai.provider.name": "x_ai"}),
    ({"dialect": "embeddings"}, "embeddings m-1", {"gen_ai.operation.name": "embeddings"}),
    ({"dialect": "chat", "model": None}, "chat", {"gen_ai.request.model": None}),
    ({"dialect": "models", "method": "GET", "model": None}, "GET", {"gen_ai.operation.name": None}),
    ({"usage": Usage(input_tokens=9, output_tokens=2, billed={"input_audio": 7, "output_image": 1})}, "chat m-1",
     {"gen_ai.usage.audio.input_tokens": 7, "gen_ai.usage.image.output_tokens": 1,
      "gen_ai.usage.image.input_tokens": None}),
    ({"status": "error", "error": "http_429", "http_status": 429}, "chat m-1", {"error.type": "429"}),
    ({"status": "error", "error": "timeout", "upstream": None}, "chat m-1",
     {"error.type": "timeout", "server.address": None}),
    ({"status": "cancelled"}, "chat m-1", {"error.type": "cancelled"}),
    ({"status": "interrupted", "error": "gateway_died"}, "chat m-1", {"error.type": "gateway_died"}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "attributes"), CALLS)
async def test_calls_of_every_kind(
    inlet: Inlet, collector: Collector, fields: dict[str, Any], name: str, attributes: dict[str, Any]
) -> None:
    (found,) = await exported(inlet, collector, call(**fields))
    assert found.span.name == name
    assert {key: found.attributes.get(key) for key in attributes} == attributes
    # What nobody has handed out has no parent that never comes.
    assert (found.span.parent_span_id, found.span.trace_id.hex()) == (b"", trace_id("r1", "a1"))
    failed = "error.type" in attributes
    assert found.span.status.code == (Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_UNSET)
    assert found.span.status.message == (fields.get("error", "cancelled").removeprefix("http_") if failed else "")


async def test_a_rollout_of_the_queue_is_one_tree(inlet: Inlet, collector: Collector) -> None:
    async with exporting(inlet, collector):
        await inlet.dispatcher.enqueue([RolloutSpec(id="q1")])
        await inlet.dispatcher.claim(ClaimRequest(worker="w1"))
        made = [
            call(rollout="q1", response_id="c-1"),
            call(rollout="q1", trace_id="ab" * 16),
            SpanEntry("q1", "a1", kind="event", name="note", status="ok", start_ns=T0, end_ns=T0, attributes={"n": 1}),
            SpanEntry("q1", "a1", kind="event", name="stdout", status="ok", start_ns=T0, end_ns=T0,
                  attributes={"text": "secret"}),
            SpanEntry("q1", "a1", kind="tool", status="error", error="tool_error", start_ns=T0, end_ns=T0 + 5,
                  attributes={"mcp.method.name": "tools/call", "gen_ai.tool.name": "search",
                              "gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.arguments": {"q": "secret"}}),
        ]  # fmt: skip
        await inlet.dispatcher.add(made)
        await inlet.dispatcher.reward(
            "q1", "a1", Judgement(value=0.5, dimensions={"style": 1.0}, reason="fine", span=1)
        )
        await inlet.dispatcher.reward("q1", "a1", Judgement(value=1.0))
        await inlet.dispatcher.finish(
            "q1", "a1", FinishRequest(status="failed", outcome=Outcome(exit_code=3, reason="gave up"))
        )
    (root,) = collector.named("invoke_agent")
    trace, root_id = trace_id("q1", "a1"), span_id(trace_id("q1", "a1"), "q1", "a1", 0)
    assert (root.span.trace_id.hex(), root.span.span_id.hex(), root.span.parent_span_id) == (trace, root_id, b"")
    assert (root.span.kind, root.span.status.code) == (Span.SPAN_KIND_INTERNAL, Status.STATUS_CODE_ERROR)
    assert root.span.status.message == "gave up"
    told = {"gen_ai.operation.name": "invoke_agent", "error.type": "failed", "process.exit.code": 3}
    told |= {"penstock.attempt.status": "failed", "penstock.attempt.reward": 1.0}
    assert told.items() <= root.attributes.items()
    inside, outside = collector.named("chat m-1")
    assert inside.span.parent_span_id.hex() == root_id
    # A call in a trace of the agent's own has no place in ours.
    assert (outside.span.trace_id.hex(), outside.span.parent_span_id) == ("ab" * 16, b"")
    (note,) = collector.named("note")
    assert (note.attributes["n"], note.span.parent_span_id.hex()) == (1, root_id)
    (tool,) = collector.named("tools/call search")
    assert (tool.span.kind, tool.attributes["error.type"]) == (Span.SPAN_KIND_CLIENT, "tool_error")
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    first, second = collector.named("gen_ai.evaluation.result")
    assert first.span.parent_span_id == inside.span.span_id
    assert second.span.parent_span_id.hex() == root_id
    told = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5, "gen_ai.response.id": "c-1"}
    assert (told | {"gen_ai.evaluation.explanation": "fine"}).items() <= first.attributes.items()
    scores = {}
    for event in first.span.events:
        assert event.name == "gen_ai.evaluation.result"
        found = {pair.key: pair.value for pair in event.attributes}
        scores[found["gen_ai.evaluation.name"].string_value] = found["gen_ai.evaluation.score.value"].double_value
    assert scores == {"reward": 0.5, "style": 1.0}
    assert len(collector.taken) == 7, "output is content: it stays here"
    assert "secret" not in str([one.span for one in collector.taken])


REQUEST = """{"model": "m-1", "reasoning_effort": "low", "previous_response_id": "resp_0",
 "temperature": 0, "max_tokens": 7, "top_k": 40, "stop": "END", "seed": 3, "top_p": null,
 "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
  {"role": "assistant", "tool_calls": [{"id": "t1", "type": "function",
    "function": {"name": "find", "arguments": "{\\"x\\": [\\"\\\\ud83d\\"]}"}}]},
  {"role": "tool", "tool_call_id": "t1", "content": "found"}],
 "tools": [{"type": "function",
   "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}}}]}
"""
RESPONSE = """{"id": "c-1", "choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant",
 "content": "ok", "tool_calls": [{"id": "t2", "type": "function", "function": {"name": "find", "arguments": "{br"}}]}}]}
"""


async def test_content_is_sent_only_when_it_is_wanted(inlet: Inlet, collector: Collector) -> None:
    said = body(REQUEST.encode(), RESPONSE.encode())
    (plain,) = await exported(inlet, collector, call(body=said))
    assert not any(one in str(plain.span) for one in ("be brief", "find"))
    _, found = await exported(inlet, collector, call(2, body=said), capture_content=True)
    told = found.attributes
    assert told["gen_ai.input.messages"] == [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "t1", "name": "find", "arguments": {"x": ["?"]}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t1", "response": "found"}]},
    ]
    parts = [
        {"type": "text", "content": "ok"},
        {"type": "tool_call", "id": "t2", "name": "find", "arguments": "{br"},
    ]
    assert told["gen_ai.output.messages"] == [{"role": "assistant", "parts": parts, "finish_reason": "tool_call"}]
    assert told["gen_ai.tool.definitions"] == [
        {"type": "function", "name": "find", "description": "finds", "parameters": {"type": "object"}}
    ]
    sampling = {"temperature": 0.0, "max_tokens": 7, "top_k": 40, "seed": 3, "stop_sequences": ["END"]}
    sampling |= {"reasoning.level": "low", "previous_response.id": "resp_0"}
    assert {name: told[f"gen_ai.request.{name}"] for name in sampling} == sampling
    assert "gen_ai.request.top_p" not in told


@pytest.mark.parametrize("wanted", [False, True])
async def test_what_a_log_record_says_is_content(inlet: Inlet, collector: Collector, wanted: bool) -> None:
    said = {"otel.signal": "logs", "otel.body": "my diary", "prompt": "my diary", "prompt_length": 8, "ok": True}
    entry = SpanEntry("r1", "a1", kind="event", name="claude_code.user_prompt", status="ok", start_ns=T0, end_ns=T0)
    entry.attributes = said
    (found,) = await exported(inlet, collector, entry, capture_content=wanted)
    assert found.span.name == "claude_code.user_prompt"
    assert ("diary" in str(found.span)) is wanted
    assert (found.attributes["prompt_length"], found.attributes["ok"]) == (8, True)


async def test_too_much_content_is_left_out(
    inlet: Inlet, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MOST_CONTENT", 1500)
    large = REQUEST.replace("be brief", "x" * 2000)
    (found,) = await exported(
        inlet, collector, call(body=body(large.encode(), RESPONSE.encode())), capture_content=True
    )
    assert "gen_ai.input.messages" not in found.attributes
    assert found.attributes["penstock.content_omitted"] == ["gen_ai.input.messages"]
    assert "gen_ai.output.messages" in found.attributes


async def test_instructions_that_are_sent_apart_stay_apart(inlet: Inlet, collector: Collector) -> None:
    asked = b'{"model": "m", "max_tokens": 5, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}'
    (found,) = await exported(inlet, collector, call(dialect="messages", body=body(asked, b"{}")), capture_content=True)
    assert found.attributes["gen_ai.system_instructions"] == [{"type": "text", "content": "be brief"}]
    assert [message["role"] for message in found.attributes["gen_ai.input.messages"]] == ["user"]


async def test_spans_that_came_in_go_out_as_they_were(inlet: Inlet, collector: Collector) -> None:
    async with exporting(inlet, collector):
        attributes = {"a": [1, None, {"b": "x"}], "gen_ai.input.messages": "secret", "error.type": "E"}
        made = Made(attributes=attributes, resource={"penstock.rollout_id": "r1", "service.name": "flights"})
        asked = request(made)
        scope = asked.resource_spans[0].scope_spans[0]
        scope.scope.name, scope.scope.version = "lib", "2"
        span = scope.spans[0]
        span.kind, span.trace_state, span.dropped_attributes_count = Span.SPAN_KIND_PRODUCER, "x=y", 2
        span.status.code, span.status.message = Status.STATUS_CODE_ERROR, "broken"
        event = span.events.add(name="e", time_unix_nano=T0)
        event.attributes.add(key="k").value.bool_value = True
        span.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8)
        good = request(Made(name="good", resource={"penstock.rollout_id": "r1"}))
        good.resource_spans[0].scope_spans[0].spans[0].status.code = Status.STATUS_CODE_OK
        for sent in (asked, good):
            assert (await inlet.post(sent.SerializeToString())).body == b""
    found, well = collector.taken
    assert (well.span.status.code, "otel.status_code" in well.attributes) == (Status.STATUS_CODE_OK, False)
    del span.attributes[1]
    ids = {"penstock.rollout.id": "r1", "penstock.attempt.id": "a1"}
    assert found.attributes == {"a": [1, None, {"b": "x"}], "error.type": "E"} | ids
    del found.span.attributes[2:]
    assert found.span == span
    assert (found.resource["service.name"], found.scope) == ("flights", scope.scope)


async def test_it_goes_in_batches_that_are_cut_by_their_size(
    inlet: Inlet, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    async with exporting(inlet, collector, metrics, batch=10):
        await inlet.dispatcher.add([call(number) for number in range(95)])
        await collector.until(spans=95)
    assert len(set(collector.ids)) == len(collector.ids) == 95 == metrics.otlp_exported
    assert (len(collector.requests), metrics.otlp_dropped, metrics.otlp_lag_changes) == (10, 0, 0)
    monkeypatch.setattr(exporter, "LARGEST_REQUEST", 1000)
    await exported(inlet, collector, *[call(number) for number in range(12)])
    assert len(collector.ids) == len(set(collector.ids)) == 95 + 12
    assert len(collector.requests) >= 10 + 4


LATER = {"Retry-After": "0.01"}
AWAY = {"Location": "http://127.0.0.1:1/"}
ANSWERS = {
    **{f"{it} passes": (Reply(it, headers=LATER), 3, (3, 1, 0)) for it in (429, 502, 503, 504)},
    "closed": (Reply(hang_up=True), 3, (3, 1, 0)),
    **{f"{it} refuses": (Reply(it, headers=AWAY), 1, (1, 0, 2)) for it in (400, 401, 404, 413, 500, 307)},
    "partly": (Reply(rejected=1, message="one was strange"), 3, (2, 0, 1)),
    "partly and slowly": (Reply(rejected=1, message="one was strange", slowly=True), 3, (2, 0, 1)),
}


@pytest.mark.parametrize("how", ANSWERS)
async def test_what_passes_is_tried_again_and_what_is_refused_is_dropped_and_counted(
    inlet: Inlet, collector: Collector, how: str
) -> None:
    metrics, (reply, spans, counts) = Metrics(), ANSWERS[how]
    collector.script.append(replace(reply))
    async with exporting(inlet, collector, metrics):
        await inlet.dispatcher.add([call(1), call(2)])
        await collector.until(requests=1)
        await inlet.dispatcher.add([call(3)])
        await collector.until(spans=spans)
    assert (metrics.otlp_exported, metrics.otlp_retries, metrics.otlp_dropped) == counts
    assert len(collector.ids) == len(set(collector.ids)) == spans


async def test_the_collector_says_how_long_to_wait(inlet: Inlet, collector: Collector) -> None:
    collector.script += [Reply(503, headers={"Retry-After": "1.5"})]
    async with exporting(inlet, collector):
        await inlet.dispatcher.add([call()])
        await collector.until(spans=1)
    asked, again = collector.came
    assert again - asked >= 1.4


async def test_a_silent_collector_is_asked_again(inlet: Inlet, collector: Collector) -> None:
    never = asyncio.Event()
    collector.script.append(Reply(before=never))
    async with exporting(inlet, collector, timeout=0.2):
        await inlet.dispatcher.add([call()])
        await collector.until(spans=1)
    assert len(collector.requests) >= 2  # a slow machine is silent, too
    never.set()


async def test_a_collector_that_is_away_harms_nothing(inlet: Inlet, collector: Collector) -> None:
    metrics = Metrics()
    collector.script += [Reply(503)] * 1000
    async with exporting(inlet, collector, metrics, timeout=1e6):
        await inlet.dispatcher.add([call(number) for number in range(50)])
        await collector.until(requests=2)
        assert metrics.otlp_lag_changes >= 50
    # A gateway that stops does not wait for one that takes nothing, or it would not come here.
    collector.script.clear()
    async with exporting(inlet, collector, metrics):
        await collector.until(spans=50)
    assert metrics.otlp_exported == 50


async def test_nobody_listens_at_first(inlet: Inlet) -> None:
    (port,) = steady_ports(1)
    async with collecting(port) as gone:
        pass
    async with exporting(inlet, gone):
        await inlet.dispatcher.add([call()])
        async with collecting(port) as back:
            await back.until(spans=1)


async def test_a_host_name_that_is_none_is_told_of_once(
    inlet: Inlet, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """Its resolver raises `UnicodeError`, which is no error of a connection."""
    collector.url, metrics = f"http://{64 * 'x'}.example/v1/traces", Metrics()
    async with exporting(inlet, collector, metrics):
        await inlet.dispatcher.add([call()])

        async def has_been_tried_again() -> bool:
            return metrics.otlp_retries > 0

        await until(has_been_tried_again)
    assert [one.levelname for one in caplog.records if one.name == "penstock.otlp"] == ["WARNING"]


async def test_a_tape_that_cannot_be_read_is_told_of_once_and_keeps_no_gateway_from_its_end(
    inlet: Inlet, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> Any:
        raise TapeError("the disk is gone")

    async def is_told() -> bool:
        return any("cannot be exported" in one.message for one in caplog.records)

    async with exporting(inlet, collector):
        await inlet.dispatcher.add([call(1)])
        await collector.until(spans=1)
    await inlet.dispatcher.add([call(2)])
    monkeypatch.setattr(inlet.store, "changes", unreadable)
    async with exporting(inlet, collector, timeout=1e6):
        await until(is_told)
    assert len([one for one in caplog.records if "cannot be exported" in one.message]) == 1


@pytest.mark.parametrize(("what", "sent"), [("rollouts", ["r2"]), ("attempts", ["r2"]), ("bodies", ["r1", "r2"])])
async def test_a_damaged_record_keeps_no_other_back(
    inlet: Inlet, collector: Collector, what: str, sent: list[str]
) -> None:
    def damage(tape: Transaction) -> None:
        (key, _), *_ = tape.scan(what)
        tape.put(what, key, b"\xc1")

    async with exporting(inlet, collector):
        pass
    said = body(REQUEST.encode(), RESPONSE.encode())
    await inlet.dispatcher.add([call(1, body=said), call(2, "r2", body=said, trace_id="ab" * 16)])
    inlet.store.write([QueuedOperation[None](damage)])
    async with exporting(inlet, collector, capture_content=True, wait=0.1):
        await collector.until(spans=len(sent))
    assert [one.attributes["penstock.rollout.id"] for one in collector.taken] == sent
    # Spans that come in find their trace as well.
    answer = await inlet.post(request(Made(trace="ab" * 16)).SerializeToString())
    assert (answer.status, len(inlet.spans("r2"))) == (200, 1)


async def test_a_restart_goes_on_where_it_was(tmp_path: Path, collector: Collector) -> None:
    for life in range(3):
        async with inlet_at(tmp_path) as inlet, exporting(inlet, collector):
            await inlet.dispatcher.add([call(number, f"r{life}") for number in range(20)])
    assert len(collector.ids) == len(set(collector.ids)) == 60


async def test_the_first_time_it_begins_with_what_comes(inlet: Inlet, collector: Collector) -> None:
    await inlet.dispatcher.add([call(1)])
    async with exporting(inlet, collector):
        assert inlet.store.note(NOTE) == str(inlet.store.cursor()).encode()
        await inlet.dispatcher.add([call(2)])
        await collector.until(spans=1)
    assert [one.attributes["penstock.span.sequence"] for one in collector.taken] == [2]


async def test_headers_come_from_the_environment(
    inlet: Inlet, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OTLP_HEADERS, "api-key=a%20b, x-scope = s")
    await exported(inlet, collector, call())
    headers = {name.lower(): value for name, value in collector.requests[0].items()}
    assert (headers["api-key"], headers["x-scope"]) == ("a b", "s")


async def test_one_span_that_cannot_be_sent_keeps_nothing_back(
    inlet: Inlet, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, whole = Metrics(), exporter.span_export.of_call

    def broken(span: Any, *rest: Any) -> Span:
        if span.sequence == 2:
            raise RuntimeError("strange")
        return whole(span, *rest)

    monkeypatch.setattr(exporter.span_export, "of_call", broken)
    async with exporting(inlet, collector, metrics):
        await inlet.dispatcher.add([call(1), call(2), call(3)])
        await collector.until(spans=2)
    assert (metrics.otlp_exported, metrics.otlp_dropped) == (2, 1)
    assert "cannot be exported" in caplog.text
