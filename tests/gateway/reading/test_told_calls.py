"""Calls that only telemetry tells of: what is read of them, and that none counts twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.views.rollouts import stats
from penstock.gateway.api.pagination import RolloutCosts, named_rollouts, rollouts_walk, summary
from penstock.gateway.api.stats import gather
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices, TokenCounts
from penstock.gateway.model.rollout import RolloutSummary, Totals
from penstock.gateway.model.span import Span
from penstock.gateway.reading.filters import parse
from penstock.gateway.reading.told_calls import ToldCalls, told_call
from tests.fakes.goldens import text_of
from tests.fakes.memory_tape import MemoryTape, call

LLM = "openinference.span.kind"
INFERENCE = {"openinference.span.kind": "LLM", "llm.model_name": "gpt-5-mini"}
GENAI = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-5-mini"}
COUNTS = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 20}
COST = 100 * 0.25e-6 + 20 * 2e-6


def told(number: int, attributes: dict[str, Any], above: int | None = None, sequence: int | None = None) -> Span:
    parent = None if above is None else f"{above:016x}"
    return call(
        number if sequence is None else sequence, kind="otel", name="call", attributes=attributes, usage=None,
        model=None, span_id=f"{number:016x}", parent_id=parent, trace_id="1" * 32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "counts"),
    [
        (INFERENCE | {"llm.token_count.prompt": 9, "llm.token_count.completion": 4}, (9, 4)),
        (INFERENCE | {"llm.token_count.prompt": 9, "llm.token_count.total": 13}, (9, 4)),
        (INFERENCE | {"llm.token_count.total": 13}, (None, None)),
        (
            INFERENCE | {
                "llm.token_count.prompt": 9, "llm.token_count.completion": 4,
                "llm.token_count.prompt_details.cache_read": 5, "llm.token_count.prompt_details.cache_write": 2,
                "llm.token_count.completion_details.reasoning": 3,
                "llm.cost.prompt": 0.25, "llm.cost.completion": 0.5,
            },
            (9, 4, 5, 2, 3, {"cost": 0.75}),
        ),
        ({"llm.request.type": "chat", "gen_ai.usage.prompt_tokens": 9, "llm.usage.total_tokens": 12}, (9, 3)),
        (GENAI | COUNTS | {"gen_ai.usage.cache_read.input_tokens": "7"}, (100, 20, 7)),
        (GENAI | COUNTS | {"gen_ai.usage.audio.input_tokens": 7}, (100, 20, None, None, None, {"input_audio": 7})),
        (COUNTS | {"gen_ai.operation.name": "invoke_agent"}, None),
        (COUNTS | {"traceloop.span.kind": "workflow"}, None),
        ({LLM: "AGENT", "llm.token_count.prompt": 9}, None),
        (GENAI | {"gen_ai.usage.input_tokens": -1, "gen_ai.usage.cost": float("nan")}, None),
        ({"http.request.method": "POST"}, None),
    ],
)  # fmt: skip
def test_counts_and_costs_by_every_convention(attributes: dict[str, Any], counts: tuple[Any, ...] | None) -> None:
    found = told_call(told(1, attributes))
    assert (found and found.tokens) == (None if counts is None else TokenCounts(*counts))


def totals_of(*spans: Span) -> Totals:
    calls = ToldCalls()
    for span in spans:
        calls.add(span)
    return calls.totals(Prices())


def listed(tape: MemoryTape, costs: RolloutCosts) -> RolloutSummary:
    rollout = tape.rollout("r1")
    assert rollout is not None
    found = summary(tape, rollout)
    costs.add(tape, [found])
    return found


def test_a_rollout_of_telemetry_alone_has_tokens_and_a_cost() -> None:
    tape, costs = MemoryTape(), RolloutCosts(Prices())
    tape.add(told(1, GENAI | COUNTS))
    tape.add(told(2, {"gen_ai.operation.name": "invoke_agent"} | COUNTS))
    found = listed(tape, costs)
    assert (found.totals.input_tokens, found.totals.output_tokens) == (100, 20)
    assert (found.totals.cost, found.totals.calls, found.totals.told) == (pytest.approx(COST), 0, 1)
    assert listed(tape, costs).totals == found.totals
    tape.add(told(3, GENAI | COUNTS))
    again = listed(tape, costs)
    assert (again.totals.input_tokens, again.totals.told) == (200, 2)
    for filter, is_found in ((f"cost>{COST:.6f}", True), (f"cost>{3 * COST:.6f}", False), ("cost:none", False)):
        query = parse(filter, "rollouts")
        walked = [row for _, row in rollouts_walk(tape, query, costs)(None) if row is not None]
        assert bool(walked) == is_found == bool(named_rollouts(tape, query, costs, ["r1"])), filter
        # A list adds the costs of its rows itself.
        assert all(row.totals.told == 0 for row in walked)


async def test_figures_say_what_only_telemetry_tells_of() -> None:
    tape = MemoryTape()
    tape.add(call(1))
    figures = await gather(tape, None, Metrics(), Prices())
    assert (figures.told, figures.totals.calls) == (0, 1)
    for number, same in enumerate(({"gen_ai.response.id": "resp_2"}, {"gen_ai.response.id": "resp_3"}, {}), 2):
        tape.add(told(number, GENAI | COUNTS | same))
    figures = await gather(tape, None, Metrics(), Prices())
    assert (figures.told, figures.totals.calls) == (2, 1)
    shown = text_of(stats(figures))
    assert "Not in these sums: 2 calls that only telemetry tells of" in shown


def test_what_a_provider_tells_counts_nothing() -> None:
    """Its session is recorded, by the ids of turns."""
    provider = {"gen_ai.response.id": "resp_2", "otel.resource": {"service.name": "claude-platform"}}
    assert totals_of(call(1), told(2, GENAI | COUNTS | provider)).told == 0


def test_a_recorded_call_is_not_counted_again() -> None:
    recorded = call(1, response_id="chatcmpl-1")
    same, other = ({"gen_ai.response.id": name} for name in ("chatcmpl-1", "chatcmpl-2"))
    assert totals_of(recorded, told(2, GENAI | COUNTS | same)).told == 0
    assert totals_of(recorded, told(2, GENAI | COUNTS | other)).told == 1
    assert totals_of(recorded, told(2, GENAI | COUNTS)).told == 0
    assert totals_of(call(1, parent_id=f"{3:016x}"), told(2, GENAI), told(3, GENAI | COUNTS | other)).told == 0


def test_the_cost_that_a_span_tells_counts_first() -> None:
    sums = totals_of(told(1, INFERENCE | COUNTS | {"llm.cost.total": 0.5}), told(2, INFERENCE | {"llm.cost.total": 1}))
    assert (sums.cost, sums.reported, sums.uncounted, sums.input_tokens) == (1.5, 2, 1, 100)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 2**32), st.booleans())
def test_of_spans_within_each_other_the_innermost_count_once(tree: list[int], seed: int, ids: bool) -> None:
    """Whatever the order, however often they are sent, and also if a circle leads from a span to itself."""
    spans = [told(1, GENAI | COUNTS, 5 if len(tree) > 6 else None)]
    spans += [told(at + 2, GENAI | COUNTS | ({"gen_ai.response.id": f"i{at}"} if ids else {}), min(above, at) + 1)
              for at, above in enumerate(tree)]  # fmt: skip
    parents = {span.parent_id for span in spans}
    leaves = sum(span.span_id not in parents for span in spans)
    shuffled = random.Random(seed).sample(spans * 2, 2 * len(spans))
    assert totals_of(*shuffled).told == leaves
