"""Sums over the newest spans, and by what calls have in common, by a scan (index/test_equality.py has the index)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from fakes.local import Local
from fakes.memory_tape import T0, MemoryTape, call, serving
from fakes.provider import Provider
from fakes.shell import Shell

from examples.demo.model import DemoAnswer
from penstock.gateway.api.pagination import RolloutCosts, summary
from penstock.gateway.api.stats import failed, gather, scan_breakdown, unread_rows
from penstock.gateway.model.answers import BreakdownRow, RewardStats
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.facts import REPLAY_OF, SHADOW_OF, UNREAD, is_rehearsal, is_release_call
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.rollout import Reward, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.reading.filters import parse
from penstock.gateway.traffic.calls.call_record import OTHER, count_unread


def asked(tape: MemoryTape, by: BreakdownDimension, filter: str = "", most: int = 1000) -> dict[str, BreakdownRow]:
    return {row.value: row for row in scan_breakdown(tape, by, parse(filter, "spans", T0), most).rows}


@pytest.fixture
def tape() -> MemoryTape:
    made = MemoryTape()
    made.add(call(1, agent="a", ms=10, usage=Usage(input_tokens=5, output_tokens=1), versions={"p": "v1", "q": "v2"}))
    made.add(call(2, agent="a", ms=30, status="error", error="http_429", http_status=429))
    made.add(call(3, agent="b", ms=20, usage=Usage(input_tokens=7, output_tokens=2), tool_calls=2))
    made.add(call(4, agent="b", ms=20, attributes={SHADOW_OF: "r1/a1/1"}))
    made.add(call(5, kind="event", name="note"))
    return made


def test_sums_are_of_calls_that_have_a_value_in_common(tape: MemoryTape) -> None:
    rows = asked(tape, "agent")
    assert list(rows) == ["a", "b"]
    a, b = rows["a"], rows["b"]
    assert (a.calls, a.errors, a.input_tokens, a.output_tokens, a.rollouts) == (2, 1, 105, 21, 1)
    assert (a.median_ns, a.p95_ns) == (10_000_000, 30_000_000)
    assert (b.calls, b.tool_calls) == (1, 2)


def test_a_call_with_two_versions_counts_under_each(tape: MemoryTape) -> None:
    rows = asked(tape, "version")
    assert {value: row.calls for value, row in rows.items()} == {"": 2, "p@v1": 1, "q@v2": 1}


def test_a_filter_says_which_calls(tape: MemoryTape) -> None:
    assert list(asked(tape, "error", "agent:a -status:ok")) == ["http_429"]
    assert asked(tape, "agent", "agent:none") == {}


def test_a_refusal_after_which_the_agent_was_answered_is_no_error() -> None:
    tape = MemoryTape()
    refused: dict[str, Any] = {"status": "error", "error": "translation", "upstream": None}
    tape.add(call(1, agent="a", **refused))
    assert asked(tape, "agent")["a"].errors == 1
    tape.add(call(2, agent="a"))
    assert asked(tape, "agent")["a"].errors == 0


def test_a_call_that_died_with_its_gateway_counts_and_one_that_runs_does_not() -> None:
    tape = MemoryTape()
    tape.add(call(1, ms=20))
    tape.add(call(2).model_copy(update={"status": "interrupted", "error": "gateway_died", "end_ns": None}))
    tape.add(call(3).model_copy(update={"status": "open", "end_ns": None}))
    rows = asked(tape, "error")
    assert {value: (row.calls, row.errors) for value, row in rows.items()} == {"": (1, 0), "gateway_died": (1, 1)}
    assert (rows[""].median_ns, rows["gateway_died"].median_ns) == (20_000_000, None)


def test_calls_are_put_together_by_time(tape: MemoryTape) -> None:
    assert {by: list(asked(tape, by)) for by in ("minute", "hour", "day")} == {
        "minute": ["2026-09-21 14:13"], "hour": ["2026-09-21 14:00"], "day": ["2026-09-21"],
    }  # fmt: skip


def test_it_says_how_much_was_looked_at(tape: MemoryTape) -> None:
    found = scan_breakdown(tape, "agent", parse("", "spans"), 3)
    assert (found.complete, found.looked_at) == (False, 3)
    assert scan_breakdown(tape, "agent", parse("", "spans"), 5).complete


def test_the_busiest_values_come_first_and_the_others_are_counted(tape: MemoryTape) -> None:
    found = scan_breakdown(tape, "agent", parse("", "spans"), 100, 1)
    assert ([row.value for row in found.rows], found.more) == (["a"], 1)


def test_costs_are_summed_and_calls_without_a_price_are_counted() -> None:
    tape, millions = MemoryTape(), Usage(input_tokens=1_000_000, output_tokens=500_000)
    tape.add(call(1, agent="a", model="gpt-4o", usage=millions))
    tape.add(call(2, agent="a", model="alias", model_served="gpt-4o-mini-2024-07-18", usage=millions))
    tape.add(call(3, agent="a", model="none-such", usage=millions))
    tape.add(call(4, agent="b", model="gpt-4o", usage=Usage()))
    rows = asked(tape, "agent")
    assert rows["a"].cost == pytest.approx(2.5 + 5.0 + 0.15 + 0.3)
    assert (rows["a"].unpriced, rows["b"].cost, rows["b"].unpriced) == (1, None, 0)
    told = millions.model_copy(update={"billed": {"cost": 0.25}})
    tape.add(call(5, agent="c", model="gpt-4o", usage=told))
    tape.add(call(6, agent="c", model="gpt-5", usage=millions.model_copy(update={"billed": {"tier": "flex"}})))
    row = asked(tape, "agent")["c"]
    assert (row.cost, row.reported, rows["a"].reported) == (pytest.approx(0.25 + 0.625 + 2.5), 1, 0)


@pytest.mark.slow
async def test_a_person_asks(local: Local, tmp_path: Path) -> None:
    shell = Shell(local.url, tmp_path)
    shown = await shell.run("stats", "--by", "agent", "--since", "7d", "status:ok")
    assert shown.code == 0, shown.err
    assert shown.text.startswith("Sums over the whole tape; ")
    for words, way_out in (
        (("--since", "7d"), "go with --by"),
        (("--by", "agents"), "agent"),
        (("--by", "agent", "modle:x"), "did you mean"),
    ):
        wrong = await shell.run("stats", *words)
        assert (wrong.code != 0, way_out in wrong.err) == (True, True), wrong.err


# -- what was not read --


def test_what_was_not_read_is_put_together_by_format_and_path() -> None:
    gaps = {UNREAD: {"choices[].novel": "text", "x.usage": "usage"}}
    spans = [call(3, attributes=gaps), call(2, attributes=gaps, dialect="responses"), call(1, attributes=gaps), call(4)]
    rows = {(row.dialect, row.key): row for row in unread_rows(spans)}
    assert len(rows) == 4
    row = rows["chat", "choices[].novel"]
    assert (row.kind, row.calls, row.example) == ("text", 2, "r1/a1#3")
    assert row.first_ns == spans[2].start_ns < row.last_ns == spans[0].start_ns


def test_paths_are_counted_up_to_a_bound() -> None:
    metrics = Metrics()
    for number in range(300):
        count_unread(metrics, "chat", [f"novel_{number}", "novel_0"])
    assert metrics.unread["chat", "novel_0"] == 301
    assert sum(metrics.unread.values()) == 600
    assert len(metrics.unread) <= 101
    assert metrics.unread["chat", OTHER] == 200


@pytest.mark.slow
async def test_a_person_asks_what_was_not_read(local: Local, provider: Provider, tmp_path: Path) -> None:
    shell = Shell(local.url, tmp_path)
    shown = await shell.run("unread")
    assert (shown.code, shown.text, "read" in shown.err) == (0, "", True)
    provider.script = [DemoAnswer("hi"), DemoAnswer("hi", extra={"novel": {"answer": "a text that nobody reads"}})]
    async with ClientSession() as http:
        for rollout in ("known", "new"):
            await local.ask(http, rollout)
        shown = await shell.run("unread", "unread:novel*")
        assert ("novel.answer" in shown.text, "new/a1#1" in shown.text, shown.code) == (True, True, 0)
        assert "novel.answer" in (await shell.run("show", "new")).text
        assert "unread" in (await shell.run("doctor", "new")).text
        assert "unread" not in (await shell.run("doctor", "known")).text
        async with http.get(f"{local.url}/metrics") as response:
            assert 'penstock_unread_total{dialect="chat",key="novel.answer"} 1.0' in await response.text()


# -- the newest spans --


def reward(sequence: int, **about: float | str | bool | None) -> Span:
    given = Reward.model_validate(about)
    return call(sequence, kind="reward", name="reward", model=None, usage=None, attributes=given.attributes())


async def test_calls_rewards_and_events_are_told_apart() -> None:
    tape = MemoryTape()
    for span in (
        call(1),
        call(2, status="error"),
        call(3, kind="event", name="stdout", model=None, usage=None),
        reward(4, value=1.0, source="runner"),
        reward(5, value=0.5, source="judge"),
        reward(6, value=-100.0, source="agent", trusted=False),
    ):
        tape.add(span)
    figures = await gather(tape, 100, Metrics(), Prices())
    assert (figures.counted_spans, figures.complete) == (6, True)
    assert figures.by_status == {"ok": 1, "error": 1}
    assert figures.by_kind == {"llm": 2, "event": 1, "reward": 3}
    assert list(figures.by_model) == ["gpt-5-mini"]
    assert figures.rewards == RewardStats(
        count=3, untrusted=1, mean=0.75, by_source={"runner": 1, "judge": 1, "agent": 1}
    )


async def test_what_was_asked_for_a_release_is_in_no_sum() -> None:
    tape = MemoryTape()
    tape.add(call(1))
    tape.add(reward(2, value=1.0))
    for number, mark in enumerate((REPLAY_OF, SHADOW_OF), 3):
        tape.add(call(number, rollout="x-1-shadow", attributes={mark: "r1/a1#1"}, status="error"))
    rehearsal = "x-1-rehearsal-a2-1-candidate"
    tape.add(call(1, rollout=rehearsal, attributes={REPLAY_OF: "r1/a1"}))
    tape.add(reward(2, value=0.0).model_copy(update={"rollout": rehearsal}))
    figures = await gather(tape, 100, Metrics(), Prices())
    assert (figures.counted_spans, figures.by_kind) == (6, {"llm": 4, "reward": 2})
    assert (figures.totals.calls, figures.by_status, figures.by_model["gpt-5-mini"].calls) == (1, {"ok": 1}, 1)
    assert (figures.rewards.count, figures.rewards.mean) == (1, 1.0)


FAILED: dict[str, Any] = {"status": RolloutStatus.FAILED}


def run(rollout: str, sequence: int, tool: str = "search", server: str = "web", **about: Any) -> Span:
    named = {"gen_ai.tool.name": tool}
    return call(sequence, rollout, kind="tool", model=None, usage=None, upstream=server, attributes=named, **about)


async def test_tools_are_summed_with_the_rollouts_that_ran_them() -> None:
    tape = MemoryTape()
    for number in range(1, 5):
        # r1 and r2 fail, r3 succeeds, nobody says how r4 went.
        statuses: dict[int, dict[str, Any]] = {1: FAILED, 2: FAILED, 3: {"status": RolloutStatus.SUCCEEDED}}
        tape.add(call(1, f"r{number}"), None, **statuses.get(number, {}))
    for number, name in enumerate(("r1", "r1", "r2", "r3", "r4"), 2):
        tape.add(run(name, number, ms=100 * number))
    tape.add(run("r1", 9, "fetch", status="error", error="tool_error"))
    tape.add(run("r3", 9, server="other", status="cancelled"))
    tape.add(run("r3", 10, status="open", ms=0).model_copy(update={"end_ns": None}))
    search, other, fetch = (await gather(tape, 100, Metrics(), Prices())).by_tool
    assert (search.server, search.tool, search.calls, search.errors, search.cancelled) == ("web", "search", 5, 0, 0)
    assert (search.median_ns, search.p95_ns) == (400_000_000, 600_000_000)
    assert (search.rollouts, search.failed, search.share_of_failed, search.share_of_others) == (3, 2, 1.0, 1.0)
    assert (fetch.tool, fetch.calls, fetch.errors, fetch.share_of_failed, fetch.share_of_others) == (
        "fetch", 1, 1, 0.5, 0.0,
    )  # fmt: skip
    assert (other.server, other.tool, other.calls, other.cancelled) == ("other", "search", 1, 1)


@pytest.mark.parametrize(
    ("status", "reward", "bad"),
    [
        ("failed", None, True),
        ("failed", 1.0, True),
        ("succeeded", None, False),
        ("succeeded", 0.0, True),
        ("running", 0.5, False),
        ("running", -1.0, True),
        ("running", None, None),
        ("cancelled", None, None),
    ],
)
def test_when_a_rollout_has_failed(status: str, reward: float | None, bad: bool | None) -> None:
    assert failed(RolloutSummary(id="r1", status=RolloutStatus(status), reward=reward)) == bad


async def test_without_tools_no_rollout_is_looked_up() -> None:
    tape = MemoryTape()
    tape.add(call(1))
    tape.rollout = lambda rid: pytest.fail(rid)
    assert (await gather(tape, 100, Metrics(), Prices())).by_tool == []


@pytest.mark.parametrize(
    ("rollout", "is_one"),
    [
        ("x-1-rehearsal-a2-17-candidate", True),
        ("x-1-rehearsal-a2-17-incumbent", True),
        ("x-1-rehearsal", False),
        ("x-1-rehearsal-a2-17-other", False),
        ("rehearsal-a2-17-candidate", False),
        ("r1", False),
    ],
)
def test_a_run_of_a_rehearsal_is_known_by_its_name(rollout: str, is_one: bool) -> None:
    assert is_rehearsal(rollout) == is_release_call(call(1, rollout=rollout)) == is_one


async def test_dimensions_alone_have_no_mean() -> None:
    tape = MemoryTape()
    tape.add(call(1, kind="reward", attributes=Reward(dimensions={"style": 1.0}).attributes()))
    assert (await gather(tape, 100, Metrics(), Prices())).rewards.mean is None


class CountingPrices(Prices):
    charged = 0

    def charge(self, span: Span) -> None:
        self.charged += 1
        super().charge(span)


def costs_of(tape: MemoryTape, costs: RolloutCosts) -> RolloutSummary:
    rollout = tape.rollout("r1")
    assert rollout is not None
    found = summary(tape, rollout)
    costs.add(tape, [found])
    return found


CALL_COST = 100 * 0.25e-6 + 20 * 2e-6
"""US dollars of a call of `memory_tape.call`: gpt-5-mini, 100 and 20 tokens."""


def test_a_rollout_costs_what_its_calls_do_and_only_new_ones_are_read_again() -> None:
    tape, prices = MemoryTape(), CountingPrices()
    costs = RolloutCosts(prices)
    tape.add(call(1))
    tape.add(call(2, kind="tool", usage=None, model=None))
    tape.add(call(3, model="my-own-model"))
    tape.add(call(4, usage=Usage(input_tokens=1, output_tokens=1, billed={"cost": 0.5}), model="my-own-model"))
    tape.add(call(5, status="open", end_ns=None, usage=None))
    tape.add(call(6, attempt="a2"))
    found = costs_of(tape, costs)
    one, two = (attempt.totals for attempt in found.attempts)
    assert (one.cost, one.unpriced, one.reported) == (pytest.approx(0.5 + CALL_COST), 1, 1)
    assert (two.cost, two.unpriced, two.reported) == (pytest.approx(CALL_COST), 0, 0)
    assert (found.totals.cost, found.totals.unpriced) == (pytest.approx(0.5 + 2 * CALL_COST), 1)
    assert (found.tool_runs, prices.charged) == (1, 4)
    assert costs_of(tape, costs).totals == found.totals
    assert prices.charged == 4
    tape.add(call(5))
    tape.add(call(7))
    found = costs_of(tape, costs)
    assert (found.totals.cost, prices.charged) == (pytest.approx(0.5 + 4 * CALL_COST), 6)


def test_a_call_that_ends_while_a_list_is_made_is_counted_once() -> None:
    tape, costs = MemoryTape(), RolloutCosts(Prices())
    tape.add(call(1))
    rollout = tape.rollout("r1")
    assert rollout is not None
    early = summary(tape, rollout)
    tape.add(call(2))
    costs.add(tape, [early])
    assert early.totals.cost == pytest.approx(CALL_COST)
    tape.add(call(3))
    assert costs_of(tape, costs).totals.cost == pytest.approx(3 * CALL_COST)


async def test_every_answer_has_the_same_cost(http: ClientSession) -> None:
    tape = MemoryTape()
    tape.add(call(1))
    tape.add(call(2, model="my-own-model"))
    async with serving(tape) as gateway:

        async def ask(path: str) -> Any:
            async with http.get(f"{gateway.url}/api/{path}") as answered:
                return await answered.json()

        whole, listed, spans, one = [
            await ask(path)
            for path in ("rollouts/r1", "rollouts", "rollouts/r1/spans", "rollouts/r1/attempts/a1/spans/1")
        ]
        attempts, figures, by = [await ask(path) for path in ("rollouts/r1/attempts", "stats", "breakdown?by=mode")]
        lists = ("rollouts?ids=r1&", "rollouts?", "rollouts/r1/spans?", "spans?", "breakdown?by=mode&")
        found = [await ask(f"{path}filter=cost%3E0%20cost%3C1") for path in lists]
        assert [len(it.get("rollouts") or it.get("spans") or it["rows"]) for it in found] == [1] * 5
        assert found[4]["rows"][0]["calls"] == 1
        assert found[0]["rollouts"] == found[1]["rollouts"] == listed["rollouts"]
    sums = [whole["totals"], whole["attempts"][0]["totals"], listed["rollouts"][0]["totals"]]
    sums += [attempts["attempts"][0]["totals"], figures["totals"], by["rows"][0]]
    assert [(it["cost"], it["unpriced"]) for it in sums] == [(pytest.approx(CALL_COST), 1)] * 6
    assert [(it.get("cost"), it["unpriced"]) for it in (one["span"], spans["spans"][1])] == [
        (pytest.approx(CALL_COST), False), (None, True),
    ]  # fmt: skip
