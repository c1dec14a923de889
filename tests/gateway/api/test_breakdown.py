"""Figures by what calls have in common, by a scan; tests/gateway/index/test_equality.py has the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from conftest import Gateway, StartGateway
from fakes.memory_tape import T0, MemoryTape, call
from fakes.provider import Provider
from fakes.shell import Shell

from penstock.gateway.api.breakdown import scanned, unread_rows
from penstock.gateway.calls.call_log import OTHER, count_unread
from penstock.gateway.demo.model import Answer
from penstock.gateway.filters.query import parse
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.attributes import SHADOW_OF, UNREAD
from penstock.gateway.model.breakdown import BreakdownRow
from penstock.gateway.model.grouping import By
from penstock.gateway.model.span import Usage


def asked(tape: MemoryTape, by: By, filter: str = "", most: int = 1000) -> dict[str, BreakdownRow]:
    return {row.value: row for row in scanned(tape, by, parse(filter, "spans", T0), most).rows}


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


def test_it_says_how_much_was_looked_at(tape: MemoryTape) -> None:
    found = scanned(tape, "agent", parse("", "spans"), 3)
    assert (found.complete, found.looked_at) == (False, 3)
    assert scanned(tape, "agent", parse("", "spans"), 5).complete


def test_the_busiest_values_come_first_and_the_others_are_counted(tape: MemoryTape) -> None:
    found = scanned(tape, "agent", parse("", "spans"), 100, 1)
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


async def test_a_person_asks(start_gateway: StartGateway, tmp_path: Path) -> None:
    shell = Shell((await start_gateway("")).url, tmp_path)
    shown = await shell.run("stats", "--by", "agent", "--since", "7d", "status:ok")
    assert shown.code == 0, shown.err
    said = "Sums over the whole tape; reward is the mean of rollouts that have one, cost is in USD.\n"
    assert shown.text.startswith(said)
    wrong = await shell.run("stats", "--since", "7d")
    assert (wrong.code, "go with --by" in wrong.err) == (2, True)
    wrong = await shell.run("stats", "--by", "agents")
    assert wrong.code != 0
    assert "agent" in wrong.err
    wrong = await shell.run("stats", "--by", "agent", "modle:x")
    assert wrong.code != 0
    assert "did you mean" in wrong.err


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


async def test_a_person_asks_what_was_not_read(gateway: Gateway, provider: Provider, tmp_path: Path) -> None:
    shell = Shell(gateway.url, tmp_path)
    shown = await shell.run("unread")
    assert (shown.code, shown.text, "read" in shown.err) == (0, "", True)
    provider.script = [Answer("hi"), Answer("hi", extra={"novel": {"answer": "a text that nobody reads"}})]
    ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with ClientSession() as http:
        for rollout in ("known", "new"):
            async with http.post(f"{gateway.url}/rollout/{rollout}/v1/chat/completions", json=ask) as response:
                assert response.status == 200
        shown = await shell.run("unread", "unread:novel*")
        assert ("novel.answer" in shown.text, "new/a1#1" in shown.text, shown.code) == (True, True, 0)
        assert "novel.answer" in (await shell.run("show", "new")).text
        assert "unread" in (await shell.run("doctor", "new")).text
        assert "unread" not in (await shell.run("doctor", "known")).text
        async with http.get(f"{gateway.url}/metrics") as response:
            assert 'penstock_unread_total{dialect="chat",key="novel.answer"} 1.0' in await response.text()
