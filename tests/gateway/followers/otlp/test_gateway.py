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
from fakes.collector import Collector, Reply
from fakes.local import locally
from fakes.mcp_wire import mcp_server
from fakes.otlp import Answer, Made, as_kind, partial, request, status
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider
from fakes.tape import Tape
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from penstock.gateway.config import OTLP_HEADERS
from penstock.gateway.followers.otlp.signals import JSON, PROTOBUF
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.span import span_id, trace_id
from penstock.gateway.model.toml import ConfigError

AGENT = Path(__file__).with_name("agent.py")
"""An agent with instrumentation of its own, that knows nothing but OpenTelemetry's variables."""


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


@pytest.fixture
async def here(tmp_path: Path, provider: Provider) -> AsyncGenerator[Gateway]:
    async with locally(tmp_path, upstreams(openai=provider.openai_url)) as made:
        yield made


@pytest.mark.slow
async def test_an_instrumented_agent_is_joined_by_its_address_or_its_resource(
    here: Gateway, http: aiohttp.ClientSession
) -> None:
    tape, key = Tape(here.url, http), await token(http, here, "r1")
    trace, root = trace_id("r1", "a2"), span_id(trace_id("r1", "a2"), "r1", "a2", 0)
    address = (here.address("r1", "a2"), f"authorization=Bearer%20{key}", f"00-{trace}-{root}-01", "a=b")
    await asyncio.to_thread(agent, *address)
    spans = await tape.spans("r1", 3, "a2")
    assert [(span.name, span.kind) for span in spans] == [
        *(("execute_tool", "otel"), ("invoke_agent", "otel"), ("reward", "reward"))
    ]
    assert (spans[1].trace_id, spans[1].parent_id) == (trace, root)
    reward = Reward.of(spans[2])
    assert (reward.value, reward.source, reward.trusted) == (0.5, "agent", False)
    await asyncio.to_thread(agent, here.url, attributes="penstock.rollout_id=r1,penstock.attempt_id=a3")
    spans = await tape.spans("r1", 3, "a3")
    assert Reward.of(spans[2]).source == "user"


async def test_joined_by_the_trace_of_a_call(here: Gateway, http: aiohttp.ClientSession) -> None:
    """An agent that propagates its own trace and names its rollout only when it calls the model."""
    trace, caller = "ab" * 16, "cd" * 8
    await call(http, here, "r1", traceparent=f"00-{trace}-{caller}-01")
    answer = await post(http, f"{here.url}/v1/traces", request(Made(trace=trace, span=caller)).SerializeToString())
    assert (answer.status, answer.body) == (200, b"")
    otel, made = sorted(await Tape(here.url, http).spans("r1", 2), key=lambda span: span.kind != "otel")
    assert (made.kind, made.parent_id, otel.span_id) == ("llm", caller, caller)


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
async def test_a_token_opens_its_own_rollout_only(here: Gateway, http: aiohttp.ClientSession, kind: str) -> None:
    key = await token(http, here, "r1")
    made = Made(resource={"penstock.rollout_id": "r2"})
    body = as_kind(request(made), kind)
    answer = await post(http, f"{here.url}/v1/traces", body, kind, key)
    assert (answer.status, answer.kind, partial(answer)[0]) == (200, kind, 1)
    assert (await post(http, f"{here.address('r2')}/v1/traces", body, kind, key)).status == 403
    refused = await post(http, f"{here.url}/v1/traces", b"\xff", kind, key)
    assert (refused.status, bool(status(refused).message)) == (400, True)
    async with http.get(f"{here.url}/metrics") as metrics:
        assert 'penstock_otlp_spans_total{outcome="foreign"} 1.0' in await metrics.text()


async def call(http: aiohttp.ClientSession, gateway: Gateway, rollout: str, **headers: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with http.post(f"{gateway.openai(rollout)}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()


@pytest.mark.slow
async def test_everything_goes_out_whatever_dies(
    tmp_path: Path, provider: Provider, collector: Collector, http: aiohttp.ClientSession
) -> None:
    """Calls and spans while the collector fails and the gateway is killed: what was answered is on the tape, and every
    recorded span arrives, with its own id."""
    config = upstreams(openai=provider.openai_url) + f'[otlp]\nendpoint = "{collector.url}"\nwait = 0\n'
    async with running(tmp_path, config) as gateway:
        for life, reply in enumerate([Reply(503), Reply(hang_up=True)]):
            collector.script.append(reply)
            rollouts = [f"r{life}-{number}" for number in range(20)]
            batch = request(*[Made(resource={"penstock.rollout_id": f"otel-{life}"}) for _ in range(50)])
            answer, _ = await asyncio.gather(
                post(http, f"{gateway.url}/v1/traces", batch.SerializeToString()),
                asyncio.gather(*(call(http, gateway, rollout) for rollout in rollouts)),
            )
            assert (answer.status, answer.body) == (200, b"")
            for rollout in rollouts:
                await Tape(gateway.url, http).spans(rollout, 1)
            await gateway.kill()
            await gateway.start()
            sent = {group.scope_spans[0].spans[0].span_id.hex() for group in batch.resource_spans}
            kept = await Tape(gateway.url, http).spans(f"otel-{life}", 50)
            assert {span.span_id for span in kept} == sent
        await collector.until(spans=140)
        seen = {one.attributes["penstock.rollout.id"] for one in collector.taken}
        assert seen == {
            f"{kind}{life}{at}"
            for life in (0, 1)
            for kind, at in [("otel-", ""), *(("r", f"-{number}") for number in range(20))]
        }
        assert len(set(collector.ids)) == 140
        assert await gateway.terminate() == 0
        before = len(collector.ids)
        # After an orderly end nothing is sent twice.
        await gateway.start()
        await call(http, gateway, "last")
        await collector.until(spans=141)
        assert len(collector.ids) == before + 1


async def test_a_collector_that_never_answers_delays_no_call(
    tmp_path: Path, provider: Provider, collector: Collector, http: aiohttp.ClientSession
) -> None:
    never = asyncio.Event()
    collector.script += [Reply(before=never)] * 100
    config = upstreams(openai=provider.openai_url) + f'[otlp]\nendpoint = "{collector.url}"\nwait = 0\n'
    async with locally(tmp_path, config) as gateway:
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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("api-key=a%0Ab", "OTEL_EXPORTER_OTLP_HEADERS: 'api-key' and its value can be no header"),
        ("api key=ab", "OTEL_EXPORTER_OTLP_HEADERS: 'api key' and its value can be no header"),
        ("api-key=a%00", "OTEL_EXPORTER_OTLP_HEADERS: 'api-key' and its value can be no header"),
    ],
)
async def test_headers_that_can_be_none_are_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.setenv(OTLP_HEADERS, value)
    with pytest.raises(ConfigError, match=said):
        async with locally(tmp_path, '[otlp]\nendpoint = "http://h"\n'):
            raise RuntimeError("it started")


async def test_what_comes_in_goes_out(tmp_path: Path, collector: Collector) -> None:
    def send(url: str) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
        with provider.get_tracer("t").start_as_current_span("mine"):
            pass
        provider.shutdown()

    async with locally(tmp_path, f'[otlp]\nendpoint = "{collector.url}/v1/traces"\n') as gateway:
        await asyncio.to_thread(send, gateway.address("r1"))
        await collector.until(spans=1)
    (found,) = collector.named("mine")
    assert (found.scope.name, found.attributes["penstock.rollout.id"]) == ("t", "r1")


async def test_a_run_of_a_tool_names_the_address_of_its_server(
    tmp_path: Path, collector: Collector, http: aiohttp.ClientSession
) -> None:
    async with mcp_server() as server:
        text = f'{mcp_wire.config(server)}\n[otlp]\nendpoint = "{collector.url}"\nwait = 0\n'
        async with locally(tmp_path, text) as gateway:
            client = mcp_wire.Client(f"{gateway.address('r1')}/mcp/tools", http, {})
            await client.open()
            assert (await client.say(mcp_wire.call("echo")))[0] == 200
            await collector.until(spans=2)
    told = collector.named("tools/call echo")[0].attributes
    assert f"http://{told['server.address']}:{told['server.port']}/mcp" == server.url
