"""When spans of an attempt go out, where they stand, and which are linked."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from fakes.collector import Collector, check
from fakes.exporting import SERVERS, T0, call, exporting
from fakes.otlp import Inlet, Made, request
from fakes.tool_calls import PAGE, TASK, Recorded, carried, model, ran, wanted
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp import selection
from penstock.gateway.followers.otlp.exporter import BatchReader, ExportBatch
from penstock.gateway.followers.otlp.selection import SpanSelector
from penstock.gateway.followers.otlp.span_export import root_id
from penstock.gateway.model import span as span_model
from penstock.gateway.model.answers import Change
from penstock.gateway.model.facts import AGENT_ID
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import Attempt, Judgement
from penstock.gateway.model.span import trace_id
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry

S = 10**9
TRACE, ROOT = trace_id("q1", "a1"), root_id("q1", "a1")
Q1 = {"penstock.rollout_id": "q1", "penstock.attempt_id": "a1"}


async def claimed(inlet: Inlet) -> None:
    await inlet.dispatcher.enqueue([RolloutSpec(id="q1")])
    assert await inlet.dispatcher.claim(ClaimRequest(worker="w1"))


async def send(inlet: Inlet, *spans: Made) -> None:
    answer = await inlet.post(request(*spans).SerializeToString())
    assert (answer.status, answer.body) == (200, b"")


async def finish(inlet: Inlet) -> None:
    await inlet.dispatcher.finish("q1", "a1", FinishRequest(status="succeeded"))


def agent(name: str, start: int = 0, end: int = 10, rollout: str = "q1", **more: Any) -> Made:
    """A span of the agent's, by seconds."""
    resource = {"penstock.rollout_id": rollout, "penstock.attempt_id": "a1"}
    return Made(name=name, resource=resource, start=T0 + start * S, end=T0 + end * S, **more)


@dataclass
class Clock:
    """The reader's."""

    now_ns: int = T0 + 10**6 * S

    def __call__(self) -> int:
        return self.now_ns


def reader(tape: Any, clock: Clock | None = None, batch: int = 512) -> BatchReader:
    return BatchReader(tape, OtlpSettings(), SERVERS, Metrics(), clock or Clock(), batch)


def spans_of(piece: ExportBatch) -> list[Span]:
    if not piece.body:
        return []
    asked = ExportTraceServiceRequest.FromString(gzip.decompress(piece.body))
    found = [span for group in asked.resource_spans for part in group.scope_spans for span in part.spans]
    assert len(found) == piece.spans
    for span in found:
        check(span)
    return found


def all_of(inlet: Inlet) -> list[Span]:
    """Everything that is sent of the tape."""
    return [span for piece in pieces(reader(inlet.store)) for span in spans_of(piece)]


def pieces(made: BatchReader, since: int = 0) -> Iterator[ExportBatch]:
    """Until there is no more."""
    while True:
        piece = made.read(since)
        yield piece
        if not piece.full:
            return
        since = piece.after


async def test_an_attempt_goes_out_when_it_has_ended(inlet: Inlet, collector: Collector) -> None:
    async with exporting(inlet, collector):
        await claimed(inlet)
        await inlet.dispatcher.add([call(1, "q1")])
        await send(inlet, agent("step"))
        await inlet.dispatcher.add([call(2, "other")])
        await collector.until(spans=1)
        assert [one.attributes["penstock.rollout.id"] for one in collector.taken] == ["other"]
        await finish(inlet)
        await collector.until(spans=4)
        # What comes later comes as it is.
        await send(inlet, agent("late"))
        await collector.until(spans=5)
        await inlet.dispatcher.reward("q1", "a1", Judgement(value=1.0))
    assert len(collector.ids) == len(set(collector.ids)) == 6
    ours = [one.span for one in collector.taken if one.attributes["penstock.rollout.id"] == "q1"]
    assert {span.trace_id.hex() for span in ours} == {TRACE}
    parents = {span.name: span.parent_span_id.hex() for span in ours}
    step = next(span.span_id.hex() for span in ours if span.name == "step")
    assert parents == {"invoke_agent": "", "chat m-1": step, "step": ROOT, "late": ROOT,
                       "gen_ai.evaluation.result": ROOT}  # fmt: skip


async def test_a_large_attempt_goes_in_batches(inlet: Inlet) -> None:
    await claimed(inlet)
    await inlet.dispatcher.add([call(number, "q1") for number in range(95)])
    await finish(inlet)
    found = [spans_of(piece) for piece in pieces(reader(inlet.store, batch=10))]
    assert [len(some) for some in found if some] == [10] * 9 + [6]
    assert len({span.span_id for some in found for span in some}) == 96


async def test_a_gateway_that_comes_back_sends_what_waited_and_nothing_twice(
    inlet: Inlet, collector: Collector
) -> None:
    async with exporting(inlet, collector):
        await claimed(inlet)
        await inlet.dispatcher.add([call(1, "q1")])
    assert collector.taken == []
    async with exporting(inlet, collector):
        await finish(inlet)
        await collector.until(spans=2)
    async with exporting(inlet, collector):
        await inlet.dispatcher.reward("q1", "a1", Judgement(value=1.0, span=1))
        await collector.until(spans=3)
    assert len(collector.ids) == len(set(collector.ids)) == 3
    (reward,), (judged,) = collector.named("gen_ai.evaluation.result"), collector.named("chat m-1")
    assert (reward.span.trace_id, reward.span.parent_span_id) == (judged.span.trace_id, judged.span.span_id)


async def test_a_tape_that_fails_in_the_middle_of_an_attempt_costs_nothing(inlet: Inlet) -> None:
    class Failing:
        """The tape, which cannot be read once."""

        after = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(inlet.store, name)

        def spans(self, *asked: Any) -> Iterator[Any]:
            for number, span in enumerate(inlet.store.spans(*asked)):
                if number == self.after:
                    self.after = -1
                    raise TapeError("it is away")
                yield span

    await claimed(inlet)
    await inlet.dispatcher.add([call(number, "q1") for number in range(5)])
    await finish(inlet)
    made = reader(Failing(), batch=2)
    with pytest.raises(TapeError):
        _ = list(pieces(made))
    found = [span for piece in pieces(made) for span in spans_of(piece)]
    assert len(found) == len({span.span_id for span in found}) == 6


async def test_a_trace_that_the_agent_reports_elsewhere_is_left_alone(inlet: Inlet) -> None:
    await claimed(inlet)
    await inlet.dispatcher.add([call(1, "q1", trace_id="ab" * 16, parent_id="cd" * 8, start_ns=T0 + S)])
    await send(inlet, agent("step"))
    await finish(inlet)
    found = {span.name: span for span in all_of(inlet)}
    assert found["chat m-1"].trace_id.hex() == "ab" * 16
    assert found["chat m-1"].parent_span_id.hex() == "cd" * 8
    assert found["step"].trace_id.hex() == TRACE


async def test_links_between_traces_that_become_one_still_lead_somewhere(inlet: Inlet) -> None:
    first, second = agent("first"), agent("second")
    asked = request(first, second)
    span = asked.resource_spans[1].scope_spans[0].spans[0]
    _ = span.links.add(trace_id=bytes.fromhex(first.trace), span_id=bytes.fromhex(first.span))
    _ = span.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8)
    await claimed(inlet)
    assert (await inlet.post(asked.SerializeToString())).body == b""
    await finish(inlet)
    found = {span.name: span for span in all_of(inlet)}
    led = [(link.trace_id.hex(), link.span_id.hex()) for link in found["second"].links]
    assert led == [(TRACE, first.span), ("01" * 16, "02" * 8)]
    told = {pair.key: pair.value.string_value for pair in found["second"].attributes}
    assert told["penstock.original_trace_id"] == second.trace


async def test_a_call_that_may_be_of_several_spans_is_linked_to_them(inlet: Inlet) -> None:
    branches = [agent("a"), agent("b")]
    await claimed(inlet)
    await inlet.dispatcher.add([call(1, "q1")])
    await send(inlet, *branches)
    await finish(inlet)
    found = {span.name: span for span in all_of(inlet)}
    made = found["chat m-1"]
    assert made.parent_span_id.hex() == ROOT
    assert {(link.trace_id.hex(), link.span_id.hex()) for link in made.links} == {(TRACE, one.span) for one in branches}
    (told,) = {(pair.key, pair.value.string_value) for link in made.links for pair in link.attributes}
    assert told == ("penstock.link", "parent")


async def test_a_span_that_comes_after_a_restart_brings_its_attempt_again_as_it_was(inlet: Inlet) -> None:
    await claimed(inlet)
    await inlet.dispatcher.add([call(1, "q1")])
    await send(inlet, agent("step"))
    await finish(inlet)
    before = all_of(inlet)
    since = inlet.store.cursor()
    await send(inlet, agent("late", 20, 30))
    after = [span for piece in pieces(reader(inlet.store), since) for span in spans_of(piece)]
    assert [span for span in after if span.name != "late"] == before
    assert len(after) == len(before) + 1


@dataclass
class Remade:
    """A tape with one attempt, which changes."""

    attempt: Attempt
    kept: list[span_model.Span]

    def cursor(self) -> int:
        return 10

    def attempts(self, _: str) -> list[Attempt]:
        return [self.attempt]

    def span(self, *_: Any) -> None:
        return None

    def spans(self, *_: Any) -> Iterator[span_model.Span]:
        return iter(self.kept)


def test_an_attempt_that_came_alive_again_goes_on_where_it_was() -> None:
    live = Attempt(rollout="q1", id="a1", worker="w1")
    ended, again = (live.model_copy(update={"ended_ns": at}) for at in (5, 9))
    first, second = (span_model.Span(rollout="q1", attempt="a1", sequence=n, start_ns=T0) for n in (1, 2))
    tape = Remade(live, [first])
    chosen = SpanSelector(cast(Any, tape), 10.0, Clock())

    def told(change: Change) -> list[Any]:
        chosen.refresh((), False)
        return [one if isinstance(one, Attempt) else one[0].sequence for one in chosen.select(change)]

    def recorded(cursor: int, span: span_model.Span) -> list[Any]:
        return told(Change(cursor=cursor, kind="span", span=span))

    def moved(cursor: int, attempt: Attempt) -> list[Any]:
        return told(Change(cursor=cursor, kind="attempt", attempt=attempt))

    assert recorded(1, first) == []
    tape.attempt = ended
    assert moved(2, ended) == [ended, 1]
    assert moved(3, ended) == recorded(1, first) == []
    tape.attempt, tape.kept = live, [first, second]
    assert recorded(11, second) == [2]
    tape.attempt = again
    assert moved(12, again) == [again]


@pytest.mark.parametrize("worker", ["w1", None])
def test_calls_of_a_sub_agent_stand_below_the_call_that_started_it(worker: str | None) -> None:
    """In the trace of an attempt, and in one that is sent call by call."""

    def made(number: int, start: int, tools: int = 0, agent: str | None = None) -> span_model.Span:
        found = span_model.Span(rollout="q1", attempt="a1", sequence=number, span_id=f"{number:016x}", tool_calls=tools)
        about = {AGENT_ID: agent} if agent else None
        return found.model_copy(update={"start_ns": T0 + start, "end_ns": T0 + start + 5, "attributes": about})

    spans = [made(1, 0, tools=2), made(2, 10, agent="a"), made(3, 11, tools=1, agent="b"), made(4, 30, agent="a")]
    attempt = Attempt(rollout="q1", id="a1", worker=worker, ended_ns=T0 + 99)
    chosen = SpanSelector(cast(Any, Remade(attempt, spans)), 10.0, Clock())
    changes = [Change(cursor=at, kind="span", span=span) for at, span in enumerate(spans, 1)]
    chosen.refresh(changes, False)
    if worker is not None:
        changes = [Change(cursor=9, kind="attempt", attempt=attempt)]
    places = [one for change in changes for one in chosen.select(change) if not isinstance(one, Attempt)]
    root = root_id("q1", "a1") if worker else None
    first = f"{1:016x}"
    assert [place.parent for _, place in places] == [root, first, first, first]
    assert [place.inferred for _, place in places] == [False, True, True, True]


# --- outside of the queue ---


async def test_a_call_waits_for_its_agents_spans_and_joins_them(inlet: Inlet) -> None:
    clock = Clock(T0 + 5 * S)
    made = reader(inlet.store, clock)
    await inlet.dispatcher.add([call(1), call(2, trace_id="ab" * 16, parent_id="cd" * 8)])
    waiting = made.read(0)
    assert (spans_of(waiting), waiting.full) == ([], False)
    run = agent("run", 0, 8, "r1")
    llm = agent("llm", 0, 2, "r1", trace=run.trace, parent=run.span)
    await send(inlet, llm, run)
    assert spans_of(made.read(waiting.after)) == []
    clock.now_ns = T0 + 12 * S
    found = spans_of(made.read(waiting.after))
    assert [span.name for span in found] == ["chat m-1", "chat m-1"]
    assert (found[0].trace_id.hex(), found[0].parent_span_id.hex()) == (run.trace, llm.span)
    assert (found[1].trace_id.hex(), found[1].parent_span_id.hex()) == ("ab" * 16, "cd" * 8)


async def test_a_reward_goes_where_its_call_went(inlet: Inlet) -> None:
    await inlet.dispatcher.add([call(1)])
    llm = agent("llm", 0, 2, "r1")
    await send(inlet, llm)
    made = reader(inlet.store)
    (first,) = pieces(made)
    sent, *_ = spans_of(first)
    assert (sent.trace_id.hex(), sent.parent_span_id.hex()) == (llm.trace, llm.span)
    await inlet.dispatcher.reward("r1", "a1", Judgement(value=1.0, span=1))
    (second,) = pieces(made, first.after)
    (reward,) = spans_of(second)
    assert (reward.trace_id, reward.parent_span_id) == (sent.trace_id, sent.span_id)


@pytest.mark.parametrize("now", [T0 - 3600 * S, T0 + 11 * S + 2])
async def test_nothing_waits_for_a_clock_that_was_set_back_or_longer_than_it_should(inlet: Inlet, now: int) -> None:
    await inlet.dispatcher.add([call(1)])
    assert len(spans_of(reader(inlet.store, Clock(now)).read(0))) == 1


async def test_a_gateway_that_stops_waits_for_nothing(inlet: Inlet) -> None:
    await inlet.dispatcher.add([call(1)])
    made = reader(inlet.store, Clock(T0 + 2 * S))
    assert spans_of(made.read(0)) == []
    assert len(spans_of(made.read(0, patient=False))) == 1


async def test_the_calls_of_a_long_rollout_find_their_spans_piece_by_piece(inlet: Inlet) -> None:
    llms = [agent(f"llm-{n}", n, n, "r1", attributes={"gen_ai.response.id": f"c-{n}"}) for n in range(20)]
    for number, llm in enumerate(llms):
        begun = T0 + number * S
        await inlet.dispatcher.add([call(1, start_ns=begun, end_ns=begun + S, response_id=f"c-{number}")])
        await send(inlet, llm)
    found = [span for piece in pieces(reader(inlet.store, batch=3)) for span in spans_of(piece)]
    calls = [span for span in found if span.name == "chat m-1"]
    assert [span.parent_span_id.hex() for span in calls] == [llm.span for llm in llms]


# -- runs of tools are linked to the model calls that asked for them ---------------------------------------------------


MS = 10**6
OTHER = {"role": "user", "content": "Look for it elsewhere."}
SEARCH = ("c1", "search", {"q": "x"})
AGAIN = ("c2", "search", {"q": "x"})


def entry(recorded: Recorded, rollout: str, **about: Any) -> SpanEntry:
    """What was recorded, on its way to the tape; a call begins as many milliseconds after the first as its sequence
    has hundreds."""
    span, exchange = recorded
    start = T0 + span.sequence * 100 * MS
    made = call(0, rollout, start_ns=start, end_ns=start + 10 * MS, kind=span.kind, dialect=span.dialect, **about)
    made.upstream, made.model, made.name, made.attributes = span.upstream, span.model, span.name, span.attributes
    head = b"content-type: application/json\r\n"
    made.body = StoredBody(exchange.url, head, exchange.request_body, head, exchange.response_body, b"", [])
    return made


async def added(inlet: Inlet, rollout: str, *recorded: Recorded) -> None:
    await inlet.dispatcher.add([entry(one, rollout) for one in recorded])


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
    spans = all_of(inlet)
    assert links(spans) == {"#2": [("#1", caused("certain"))]}
    run = next(span for span in spans if number(span) == "#2")
    assert {link.trace_id.hex() for link in run.links} == {trace_id("q1", "a1")}


ASKED, HM = model(1, [TASK], wanted(SEARCH)), {"role": "assistant", "content": "Hm."}
MADE: dict[str, tuple[list[Recorded], Any]] = {
    "likely": ([ASKED, ran(2, "search", {"q": "x"})], {"#2": [("#1", caused("likely"))]}),
    # Two agents in one rollout ask for the same at the same time: it is linked to every call that may have asked.
    "ambiguous": (
        [ASKED, model(2, [OTHER], wanted(AGAIN)), ran(3, "search", {"q": "x"})],
        {"#3": [("#1", caused("ambiguous")), ("#2", caused("ambiguous"))]},
    ),
    "asked by nobody": ([model(1, [TASK], HM), ran(2, "search", {"q": "x"})], {}),
}


@pytest.mark.parametrize("how", MADE)
async def test_without_a_result_a_link_says_how_well_it_is_known(inlet: Inlet, how: str) -> None:
    recorded, wanted_links = MADE[how]
    await added(inlet, "q1", *recorded)
    assert links(all_of(inlet)) == wanted_links


async def test_a_repeated_call_is_linked_to_the_one_that_it_repeats(inlet: Inlet) -> None:
    first, again = (entry(model(n, [TASK], HM), "q1") for n in (1, 2))
    again.retried = True
    await inlet.dispatcher.add([first])
    await inlet.dispatcher.add([again])
    spans = all_of(inlet)
    assert links(spans) == {"#2": [("#1", {"gen_ai.attribution.link_type": "RETRY_OF"})]}


async def test_of_a_long_attempt_that_goes_on_only_what_is_near_is_read(
    inlet: Inlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "BEFORE", 2)
    said = [model(n, [TASK], HM) for n in range(2, 6)]
    await added(inlet, "q1", ASKED, *said, ran(6, "search", {"q": "x"}))
    assert links(all_of(inlet)) == {}
    await added(inlet, "q2", ASKED, ran(2, "search", {"q": "x"}))
    ours = [span for span in all_of(inlet) if span.trace_id.hex() == trace_id("q2", "a1")]
    assert links(ours) == {"#2": [("#1", caused("likely"))]}
