"""A gateway process with spans coming in and going out, and what a crash leaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from fakes import mcp_wire
from fakes.collector import Collector, Reply, collecting
from fakes.mcp_wire import mcp_server
from fakes.otlp import Answer, Made, partial, request, status
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider
from fakes.tape import Tape
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.trace import span_id, trace_id
from penstock.gateway.otlp.signals import JSON, PROTOBUF

AGENT = Path(__file__).with_name("agent.py")
"""An agent with instrumentation of its own, that knows nothing but OpenTelemetry's variables."""


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    async with collecting() as made:
        yield made


async def post(http: aiohttp.ClientSession, url: str, body: bytes, kind: str = PROTOBUF, key: str = "") -> Answer:
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with http.post(url, data=body, headers=headers) as answer:
        return Answer(answer.status, answer.headers.get("Content-Type", ""), await answer.read(), answer.headers)


async def token(http: aiohttp.ClientSession, gateway: Gateway, rollout: str) -> str:
    async with http.post(f"{gateway.url}/api/tokens", json={"rollout": rollout}) as answer:
        return (await answer.json())["token"]


def agent(endpoint: str, headers: str = "", traceparent: str = "", attributes: str = "") -> None:
    """Run the agent with OpenTelemetry's own variables."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_HEADERS": headers, "PATH": "/usr/bin:/bin"}
    env |= {"TRACEPARENT": traceparent, "OTEL_RESOURCE_ATTRIBUTES": attributes}
    subprocess.run([sys.executable, AGENT], env=env, check=True, timeout=60)


async def test_an_instrumented_agent_at_its_address(gateway: Gateway, tape: Tape, http: aiohttp.ClientSession) -> None:
    key = await token(http, gateway, "r1")
    trace, root = trace_id("r1", "a2"), span_id(trace_id("r1", "a2"), "r1", "a2", 0)
    await asyncio.to_thread(
        agent, gateway.address("r1", "a2"), f"authorization=Bearer%20{key}", f"00-{trace}-{root}-01", "a=b"
    )
    spans = await tape.spans("r1", 3, "a2")
    assert [(span.name, span.kind, span.attempt) for span in spans] == [
        *(("execute_tool", "otel", "a2"), ("invoke_agent", "otel", "a2"), ("reward", "reward", "a2")),
    ]
    assert (spans[1].trace_id, spans[1].parent_id) == (trace, root)
    reward = Reward.of(spans[2])
    assert (reward.value, reward.source, reward.trusted) == (0.5, "agent", False)


async def test_joined_by_the_resource_alone(gateway: Gateway, tape: Tape) -> None:
    await asyncio.to_thread(agent, gateway.url, attributes="penstock.rollout_id=r1,penstock.attempt_id=a3")
    spans = await tape.spans("r1", 3, "a3")
    assert Reward.of(spans[2]).source == "user"


async def test_joined_by_the_trace_of_a_call(
    gateway: Gateway, provider: Provider, tape: Tape, http: aiohttp.ClientSession
) -> None:
    """An agent that propagates its own trace and names its rollout only when it calls the model."""
    trace, caller = "ab" * 16, "cd" * 8
    headers = {"traceparent": f"00-{trace}-{caller}-01"}
    async with http.post(
        f"{gateway.openai('r1')}/chat/completions", json={"model": "m", "messages": []}, headers=headers
    ) as answer:
        assert answer.status == 200
        await answer.read()
    answer = await post(http, f"{gateway.url}/v1/traces", request(Made(trace=trace, span=caller)).SerializeToString())
    assert (answer.status, answer.body) == (200, b"")
    otel, call = sorted(await tape.spans("r1", 2), key=lambda span: span.kind != "otel")
    assert (call.kind, call.parent_id, otel.span_id) == ("llm", caller, caller)


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
async def test_a_token_opens_its_own_rollout_only(
    gateway: Gateway, tape: Tape, http: aiohttp.ClientSession, kind: str
) -> None:
    key = await token(http, gateway, "r1")
    made = Made(resource={"penstock.rollout_id": "r2"})
    body = request(made).SerializeToString() if kind == PROTOBUF else as_json(made).encode()
    answer = await post(http, f"{gateway.url}/v1/traces", body, kind, key)
    assert (answer.status, answer.kind, partial(answer)[0]) == (200, kind, 1)
    assert (await post(http, f"{gateway.address('r2')}/v1/traces", body, kind, key)).status == 403
    assert (await post(http, f"{gateway.url}/v1/traces", b"\xff", kind, key)).status == 400
    assert status(await post(http, f"{gateway.url}/v1/traces", b"\xff", kind, key)).message
    async with http.get(f"{gateway.url}/metrics") as metrics:
        assert 'penstock_otlp_spans_total{outcome="foreign"} 1.0' in await metrics.text()


def as_json(made: Made) -> str:
    attributes = ", ".join(f'{{"key": "{key}", "value": {{"stringValue": "{value}"}}}}'
                           for key, value in made.resource.items())  # fmt: skip
    span = f'{{"traceId": "{made.trace}", "spanId": "{made.span}", "name": "x", "startTimeUnixNano": "{made.start}"}}'
    resource = f'{{"attributes": [{attributes}]}}'
    return f'{{"resourceSpans": [{{"resource": {resource}, "scopeSpans": [{{"spans": [{span}]}}]}}]}}'


async def test_what_was_answered_survives_a_crash(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, "") as gateway:
        batches = [request(*[Made(resource={"penstock.rollout_id": f"r{n}"}) for _ in range(50)]) for n in range(8)]
        answers = await asyncio.gather(
            *(post(http, f"{gateway.url}/v1/traces", batch.SerializeToString()) for batch in batches)
        )
        assert all((answer.status, answer.body) == (200, b"") for answer in answers)
        await gateway.kill()
        await gateway.start()
        tape = Tape(gateway.url, http)
        for number, batch in enumerate(batches):
            sent = {group.scope_spans[0].spans[0].span_id.hex() for group in batch.resource_spans}
            assert {span.span_id for span in await tape.spans(f"r{number}", 50)} == sent


def config(provider: Provider, collector: Collector) -> str:
    return upstreams(openai=provider.openai_url) + f'[otlp]\nendpoint = "{collector.url}"\nwait = 0\n'


async def test_everything_goes_out_whatever_dies(
    tmp_path: Path, provider: Provider, collector: Collector, http: aiohttp.ClientSession
) -> None:
    """Calls while the collector fails and the gateway is killed: every recorded span arrives, with its own id."""
    async with running(tmp_path, config(provider, collector)) as gateway:
        for life, reply in enumerate([Reply(503), Reply(429), Reply(hang_up=True)]):
            collector.script.append(reply)
            await asyncio.gather(*(call(http, gateway, f"r{life}-{number}") for number in range(20)))
            tape = Tape(gateway.url, http)
            for number in range(20):
                await tape.spans(f"r{life}-{number}", 1)
            await gateway.kill()
            await gateway.start()
        await collector.until(spans=60)
        seen = {one.attributes["penstock.rollout.id"] for one in collector.taken}
        assert seen == {f"r{life}-{number}" for life in range(3) for number in range(20)}
        assert len(set(collector.ids)) == 60
        assert await gateway.terminate() == 0
        before = len(collector.ids)
        # After an orderly end nothing is sent twice.
        await gateway.start()
        await call(http, gateway, "last")
        await collector.until(spans=61)
        assert len(collector.ids) == before + 1


async def call(http: aiohttp.ClientSession, gateway: Gateway, rollout: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with http.post(f"{gateway.openai(rollout)}/chat/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


async def test_a_collector_that_never_answers_delays_no_call(
    tmp_path: Path, provider: Provider, collector: Collector, http: aiohttp.ClientSession
) -> None:
    never = asyncio.Event()
    collector.script += [Reply(before=never)] * 100
    async with running(tmp_path, config(provider, collector)) as gateway:
        await call(http, gateway, "first")
        await collector.until(requests=1)
        await asyncio.gather(*(call(http, gateway, f"r{number}") for number in range(50)))
        collector.script.clear()
        never.set()
        await collector.until(spans=51)


async def test_without_spans_nothing_of_it_is_loaded(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    def loaded() -> bool:
        return "google/_upb" in Path(f"/proc/{gateway.pid}/maps").read_text()

    assert not loaded()
    answer = await post(http, f"{gateway.url}/v1/traces", b"{}", JSON)
    assert (answer.status, loaded()) == (200, False)
    assert (await post(http, f"{gateway.url}/v1/traces", b"")).status == 200
    assert loaded()


async def test_headers_that_are_missing_are_told_at_the_start(tmp_path: Path, collector: Collector) -> None:
    text = f'[otlp]\nendpoint = "{collector.url}"\nheaders_env = "NO_SUCH_HEADERS"\n'
    with pytest.raises(AssertionError, match="headers_env names NO_SUCH_HEADERS"):
        async with running(tmp_path, text):
            raise RuntimeError("it started")


@pytest.mark.parametrize("value", ["api-key=a%0Ab", "api key=ab", "api-key=a%00"])
async def test_what_can_be_no_header_is_told_at_the_start(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("COLLECTOR_HEADERS", value)
    text = f'[otlp]\nendpoint = "{collector.url}"\nheaders_env = "COLLECTOR_HEADERS"\n'
    with pytest.raises(AssertionError, match=r"COLLECTOR_HEADERS: '[^']+' and its value can be no header"):
        async with running(tmp_path, text):
            raise RuntimeError("it started")


async def test_what_comes_in_goes_out(tmp_path: Path, collector: Collector) -> None:
    text = f'[otlp]\nendpoint = "{collector.url}/v1/traces"\n'

    def send(url: str) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
        with provider.get_tracer("t").start_as_current_span("mine"):
            pass
        provider.shutdown()

    async with running(tmp_path, text) as gateway:
        await asyncio.to_thread(send, gateway.address("r1"))
        await collector.until(spans=1)
    (found,) = collector.named("mine")
    assert (found.scope.name, found.attributes["penstock.rollout.id"]) == ("t", "r1")


async def test_a_run_of_a_tool_names_the_address_of_its_server(
    tmp_path: Path, collector: Collector, http: aiohttp.ClientSession
) -> None:
    async with mcp_server() as server:
        text = f'{mcp_wire.config(server)}\n[otlp]\nendpoint = "{collector.url}"\nwait = 0\n'
        async with running(tmp_path, text) as gateway:
            client = mcp_wire.Client(f"{gateway.address('r1')}/mcp/tools", http, {})
            await client.open()
            assert (await client.say(mcp_wire.call("echo")))[0] == 200
            await collector.until(spans=2)
    told = collector.named("tools/call echo")[0].attributes
    assert f"http://{told['server.address']}:{told['server.port']}/mcp" == server.url
