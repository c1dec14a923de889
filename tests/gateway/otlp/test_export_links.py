"""Runs of tools are linked to the model calls that asked for them, with how well that is known."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import Any

import pytest
from fakes.collector import check
from fakes.exporting import SERVERS, T0, call
from fakes.otlp import Inlet
from fakes.tool_calls import PAGE, TASK, Recorded, carried, model, ran, wanted
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.gateway.config import Otlp
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.trace import trace_id
from penstock.gateway.otlp import causes
from penstock.gateway.otlp.batches import Reader
from penstock.gateway.store.codec import Body
from penstock.gateway.store.records import Entry

MS = 10**6
OTHER = {"role": "user", "content": "Look for it elsewhere."}
SEARCH = ("c1", "search", {"q": "x"})
AGAIN = ("c2", "search", {"q": "x"})


def entry(recorded: Recorded, rollout: str, **about: Any) -> Entry:
    """What was recorded, on its way to the tape; a call begins as many milliseconds after the first as its sequence
    has hundreds."""
    span, exchange = recorded
    start = T0 + span.sequence * 100 * MS
    made = call(0, rollout, start_ns=start, end_ns=start + 10 * MS, kind=span.kind, dialect=span.dialect, **about)
    made.upstream, made.model, made.name, made.attributes = span.upstream, span.model, span.name, span.attributes
    head = b"content-type: application/json\r\n"
    made.body = Body(exchange.url, head, exchange.request_body, head, exchange.response_body, b"", [])
    return made


async def added(inlet: Inlet, rollout: str, *recorded: Recorded) -> None:
    await inlet.dispatcher.add([entry(one, rollout) for one in recorded])


def exported(inlet: Inlet) -> list[Span]:
    """Everything that is sent of the tape; no call waits for its agent any more."""
    piece = Reader(inlet.store, Otlp(), SERVERS, Metrics(), lambda: T0 + 10**15).read(0)
    asked = ExportTraceServiceRequest.FromString(gzip.decompress(piece.body))
    found = [span for group in asked.resource_spans for part in group.scope_spans for span in part.spans]
    for span in found:
        check(span)
    return found


def links(spans: Sequence[Span]) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """By run of a tool: what each link points to, and what it says."""
    names = {span.span_id: number(span) for span in spans}
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for span in spans:
        for link in span.links:
            said = {pair.key: pair.value.string_value for pair in link.attributes}
            found.setdefault(number(span), []).append((names[link.span_id], said))
    return found


def number(span: Span) -> str:
    sequences = [pair.value.int_value for pair in span.attributes if pair.key == "penstock.span.sequence"]
    return f"#{sequences[0]}" if sequences else span.name


def caused(known: str) -> dict[str, str]:
    return {"gen_ai.attribution.link_type": "CAUSED_BY_GENERATION", "penstock.tool.known": known}


def a_search() -> list[Recorded]:
    later = [TASK, wanted(SEARCH), carried("c1", PAGE)]
    asked = model(1, [TASK], wanted(SEARCH))
    return [asked, ran(2, "search", {"q": "x"}), model(3, later, {"role": "assistant", "content": "Done."})]


@pytest.mark.parametrize("handed_out", [True, False])
async def test_a_run_is_linked_to_the_call_that_asked(inlet: Inlet, handed_out: bool) -> None:
    if handed_out:
        await inlet.dispatcher.enqueue([RolloutSpec(id="q1")])
        assert await inlet.dispatcher.claim(ClaimRequest(worker="w1"))
    await added(inlet, "q1", *a_search())
    if handed_out:
        await inlet.dispatcher.finish("q1", "a1", FinishRequest(status="succeeded"))
    spans = exported(inlet)
    assert links(spans) == {"#2": [("#1", caused("certain"))]}
    run = next(span for span in spans if number(span) == "#2")
    assert {link.trace_id.hex() for link in run.links} == {trace_id("q1", "a1")}


async def test_without_a_result_it_is_likely(inlet: Inlet) -> None:
    await added(inlet, "q1", *a_search()[:2])
    assert links(exported(inlet)) == {"#2": [("#1", caused("likely"))]}


async def test_an_ambiguous_one_is_linked_to_every_call_that_may_have_asked(inlet: Inlet) -> None:
    # Two agents in one rollout ask for the same at the same time.
    asked = [model(1, [TASK], wanted(SEARCH)), model(2, [OTHER], wanted(AGAIN))]
    await added(inlet, "q1", *asked, ran(3, "search", {"q": "x"}))
    assert links(exported(inlet)) == {"#3": [("#1", caused("ambiguous")), ("#2", caused("ambiguous"))]}


async def test_what_nobody_asked_for_has_no_link(inlet: Inlet) -> None:
    await added(inlet, "q1", model(1, [TASK], {"role": "assistant", "content": "Hm."}), ran(2, "search", {"q": "x"}))
    assert links(exported(inlet)) == {}


async def test_a_repeated_call_is_linked_to_the_one_that_it_repeats(inlet: Inlet) -> None:
    first, again = (entry(model(n, [TASK], {"role": "assistant", "content": "Hm."}), "q1") for n in (1, 2))
    again.retried = True
    await inlet.dispatcher.add([first])
    await inlet.dispatcher.add([again])
    spans = exported(inlet)
    assert links(spans) == {"#2": [("#1", {"gen_ai.attribution.link_type": "RETRY_OF"})]}


async def test_of_a_long_attempt_that_goes_on_only_what_is_near_is_read(
    inlet: Inlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "BEFORE", 2)
    said = [model(n, [TASK], {"role": "assistant", "content": "Hm."}) for n in range(2, 6)]
    await added(inlet, "q1", model(1, [TASK], wanted(SEARCH)), *said, ran(6, "search", {"q": "x"}))
    assert links(exported(inlet)) == {}
    await added(inlet, "q2", model(1, [TASK], wanted(SEARCH)), ran(2, "search", {"q": "x"}))
    assert links([span for span in exported(inlet) if span.trace_id.hex() == trace_id("q2", "a1")]) == {
        "#2": [("#1", caused("likely"))]
    }
