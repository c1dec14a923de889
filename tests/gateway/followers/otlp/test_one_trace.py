"""An agent with a stock SDK: its spans and its calls are one trace, whatever it knows of trace contexts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
from fakes.collector import Collector, Received
from fakes.local import locally
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.runs import PYTHON, enqueue, runs, when
from opentelemetry import baggage, context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.gateway.client.client import Client
from penstock.gateway.model.span import trace_id

STOCK = Path(__file__).with_name("stock.py")
AGENTS_OWN = {"think": "answer", "branches": "answer", "named": "branches", "unnamed": "branches"}
CALLS = {
    "chat in-think": "think",
    # Two branches were open. One names the response of its call, so the other call is the other's.
    "chat in-named": "named",
    "chat in-unnamed": "unnamed",
}
ROOT = {"invoke_agent": None, "prepare": "invoke_agent", "answer": "invoke_agent", "exit": "invoke_agent"}
WHOLE = ROOT | AGENTS_OWN | CALLS | {"chat outside": "invoke_agent"}
"""What stands in what when a worker has run the agent."""


def gateway_to(
    collector: Collector, provider: Provider, home: Path, more: str = ""
) -> AbstractAsyncContextManager[Gateway]:
    return locally(home, upstreams(openai=provider.openai_url) + f'[otlp]\nendpoint = "{collector.url}"\n{more}')


def parents(collector: Collector) -> dict[str, str | None]:
    """The name of the parent of each span, by name; each is there once, as backends that add up what they get need."""
    assert len(collector.ids) == len(set(collector.ids))
    names = {one.span.span_id: one.span.name for one in collector.taken}
    return {one.span.name: names.get(one.span.parent_span_id) for one in collector.taken}


def traces(collector: Collector) -> set[str]:
    return {one.span.trace_id.hex() for one in collector.taken}


def one(collector: Collector, name: str) -> Received:
    (found,) = collector.named(name)
    return found


async def run(gateway: Gateway, home: Path, *words: str) -> None:
    """The agent as a worker runs it."""
    async with Client(gateway.url) as client, runs(gateway.url, home) as start:
        await enqueue(client, None)
        ran = await start("--no-stdin", agent=(PYTHON, str(STOCK), *words))
        assert await ran.ended() == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("propagate",)], ids=["guessed", "named"])
async def test_a_stock_agent_and_its_calls_are_one_trace(
    provider: Provider, collector: Collector, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Parents that were named are not guessed."""
    async with gateway_to(collector, provider, tmp_path) as gateway:
        await run(gateway, tmp_path, *words)
        await collector.until(spans=len(WHOLE))
    assert traces(collector) == {trace_id("r1", "a1")}
    assert parents(collector) == WHOLE
    guessed = {found.span.name for found in collector.taken if "penstock.parent.inferred" in found.attributes}
    if words:
        assert not guessed
        return
    assert "chat in-think" in guessed
    assert not guessed & {"think", "chat outside"}
    # The SDK has begun two traces; what they were is still told.
    begun = {one(collector, name).attributes["penstock.original_trace_id"] for name in ("prepare", "answer", "think")}
    assert len(begun) == 2
    assert "penstock.original_trace_id" not in one(collector, "chat in-think").attributes


@pytest.mark.slow
async def test_what_an_agent_sent_before_it_was_killed_is_in_the_trace_too(
    provider: Provider, collector: Collector, tmp_path: Path
) -> None:
    """Its outer span never comes; what names it as its parent stands under the root and is linked to it."""
    async with (
        gateway_to(collector, provider, tmp_path) as gateway,
        Client(gateway.url) as client,
        runs(gateway.url, tmp_path) as start,
    ):
        await enqueue(client, None)
        ran = await start(agent=(PYTHON, str(STOCK), "hang"))
        await when(client, "r1", lambda found: found.totals.calls == 3)
        async for change in client.changes(0):
            if change.span is not None and change.span.name == "stdout":
                break
        _ = await client.cancel("r1")
        _ = await ran.ended()
        await collector.until(spans=len(AGENTS_OWN | CALLS) + 2)
    assert traces(collector) == {trace_id("r1", "a1")}
    under_root = {"think": "invoke_agent", "branches": "invoke_agent"}
    found = parents(collector)
    assert {name: found[name] for name in AGENTS_OWN | CALLS} == AGENTS_OWN | CALLS | under_root
    think = one(collector, "think")
    (link,) = think.span.links
    assert link.trace_id.hex() == think.attributes["penstock.original_trace_id"]
    assert think.attributes["penstock.parent.inferred"] is True


def by_hand(gateway: Gateway, *words: str) -> None:
    """Run the agent as somebody does who has set the addresses himself."""
    base = gateway.address("r1")
    env = {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": base}
    env |= {"PATH": "/usr/bin:/bin", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    _ = subprocess.run([sys.executable, STOCK, *words], env=env, check=True, timeout=60)


@pytest.mark.slow
async def test_calls_outside_of_the_queue_join_the_traces_of_their_agent(
    provider: Provider, collector: Collector, tmp_path: Path
) -> None:
    """Nobody knows whether those are part of a larger trace: they stay as they are, and the calls follow."""
    async with gateway_to(collector, provider, tmp_path, "wait = 300\n") as gateway:
        await asyncio.to_thread(by_hand, gateway)
    # A gateway that stops sends what waits.
    assert parents(collector) == {"prepare": None, "answer": None, "chat outside": None} | AGENTS_OWN | CALLS
    inside = {one(collector, name).span.trace_id for name in {"answer"} | AGENTS_OWN.keys() | CALLS.keys()}
    assert len(inside) == 1
    assert one(collector, "chat outside").span.trace_id.hex() == trace_id("r1", "a1")


@pytest.mark.slow
async def test_without_waiting_everything_goes_at_once_as_it_came(
    provider: Provider, collector: Collector, tmp_path: Path
) -> None:
    async with gateway_to(collector, provider, tmp_path, "wait = 0\n") as gateway:
        await run(gateway, tmp_path)
        await collector.until(spans=len(WHOLE))
    assert len(traces(collector)) == 3
    flat = dict.fromkeys(CALLS, "invoke_agent") | {"prepare": None, "answer": None}
    assert parents(collector) == WHOLE | flat


class Named(SpanProcessor):
    """Copies baggage into attributes, as `opentelemetry-processor-baggage` does."""

    def on_start(self, span: Any, parent_context: context.Context | None = None) -> None:
        for name, value in baggage.get_all(parent_context).items():
            span.set_attribute(name, str(value))


def several(url: str, propagator: TextMapPropagator, *processors: SpanProcessor) -> None:
    """Two rollouts at the same time in one process with one exporter: calls say by baggage which is theirs."""
    sdk, together = TracerProvider(), Barrier(2)
    for processor in (*processors, BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces"))):
        sdk.add_span_processor(processor)

    def rollout(name: str) -> None:
        tracer, headers = sdk.get_tracer("several"), dict[str, str]()
        _ = context.attach(baggage.set_baggage("penstock.rollout_id", name))
        with tracer.start_as_current_span(f"run-{name}"), tracer.start_as_current_span(f"think-{name}"):
            propagator.inject(headers)  # pyright: ignore[reportArgumentType] # its default setter is typed otherwise
            together.wait()
            asked: dict[str, Any] = {"model": name, "messages": []}
            assert httpx.post(f"{url}/v1/chat/completions", json=asked, headers=headers).status_code == 200
            together.wait()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(rollout, name) for name in ("r1", "r2")]:
            done.result()
    sdk.shutdown()


@pytest.mark.parametrize("traceparent", [True, False], ids=["both headers", "baggage alone"])
async def test_rollouts_of_one_process_are_kept_apart_by_baggage(
    provider: Provider, collector: Collector, tmp_path: Path, traceparent: bool
) -> None:
    both = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
    sent: tuple[Any, ...] = (both,) if traceparent else (W3CBaggagePropagator(), Named())
    async with gateway_to(collector, provider, tmp_path, "wait = 300\n") as gateway:
        await asyncio.to_thread(several, gateway.url, *sent)
    for name in ("r1", "r2"):
        spans = {found.span.name: found for found in collector.taken
                 if found.attributes["penstock.rollout.id"] == name}  # fmt: skip
        assert spans.keys() == {f"run-{name}", f"think-{name}", f"chat {name}"}
        assert len({found.span.trace_id for found in spans.values()}) == 1
        call, think = spans[f"chat {name}"], spans[f"think-{name}"]
        assert call.span.parent_span_id == think.span.span_id
        assert ("penstock.parent.inferred" in call.attributes) is not traceparent
