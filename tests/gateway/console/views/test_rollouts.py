"""What the terminal shows, as plain text of fixed width, compared with tests/goldens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from typing import Any

import pytest
from fakes.goldens import check_golden, check_widths, text_of
from fakes.memory_tape import T0, MemoryTape, call, chat_exchange
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group

from penstock.console.views import queue as pictures
from penstock.console.views import rollout_tree, rollouts
from penstock.console.views.breakdown import breakdown
from penstock.console.views.rollout_page import RolloutRecord, rollout_page
from penstock.gateway.api.pagination import RolloutCosts, summary
from penstock.gateway.api.rollouts import detail_of
from penstock.gateway.api.tools import read_tools
from penstock.gateway.model.answers import (
    Breakdown,
    BreakdownRow,
    Change,
    ModelStats,
    RewardStats,
    ServerState,
    SpanDetail,
    Stats,
)
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.facts import AGENT_ID, COMPACTION, TOOL_DURATIONS, TRIES
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.queue import EnqueueResult, QueueStatus, RewardAnswer
from penstock.gateway.model.rollout import (
    Attempt,
    AttemptStatus,
    Outcome,
    Reward,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    Totals,
    Worker,
    WorkerUsage,
)
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.tui.screens.rollout import build_tree, cells

NOW = T0 + 7200 * 10**9
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {}},
}
ASKED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}


def weather_tape() -> MemoryTape:
    """An agent that asks for the weather, twice in one conversation, and a second attempt that fails."""
    system = {"role": "system", "content": "You are a weather bot. " + "Be brief. " * 60}
    question = {"role": "user", "content": "How is the weather in Bern?\nAnd why?"}
    asks = {"role": "assistant", "content": None, "tool_calls": [ASKED]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear", "degrees": 21}'}
    answer = {"role": "assistant", "content": "Clear, 21 degrees."}
    thanks = {"role": "user", "content": "Thanks!"}
    tape = MemoryTape()
    first = [system, question]
    second = [*first, asks, result]
    third = [*second, answer, thanks]
    big = Usage(input_tokens=12345, output_tokens=67)
    tape.add(call(1, tool_calls=1, first_byte_ns=120_000_000), chat(first, {"content": None, "tool_calls": [ASKED]}))
    tape.add(call(2, first_byte_ns=90_000_000, usage=big), chat(second, {"content": "Clear, 21 degrees."}))
    tape.add(call(3, ms=75_000, model="my-own-model"), chat(third, {"content": "At your service."}))
    failed = chat_exchange([question], {"content": ""})
    failed = failed.model_copy(update={"response_body": b'{"error": {"message": "Rate limit reached"}}'})
    tape.add(call(1, attempt="a2", status="error", error="http_429", http_status=429, usage=None, ms=3), failed)
    tape.add(call(2, attempt="a2", status="open", end_ns=None, usage=None, http_status=None, finish=None, body=None))
    tape.add(call(1, rollout="r2", kind="llm", dialect="opaque", model=None, method="GET", path="/v1/files", body=None))
    return tape


def chat(messages: list[dict[str, Any]], answer: dict[str, Any]) -> Any:
    return chat_exchange(messages, answer, tools=[TOOL], temperature=0.2)


def details(tape: MemoryTape, rid: str = "r1") -> tuple[RolloutSummary, list[SpanDetail]]:
    rollout = tape.rollout(rid)
    assert rollout is not None
    return with_costs(tape, [rollout])[0], [detail_of(tape, span) for span in tape.spans(rid)]


def with_costs(tape: MemoryTape, rows: Iterable[Rollout]) -> list[RolloutSummary]:
    found = [summary(tape, rollout) for rollout in rows]
    RolloutCosts(Prices()).add(tape, found)
    return found


def test_rollouts() -> None:
    tape = weather_tape()
    rows = with_costs(tape, (rollout for _, rollout in tape.rollouts()))
    check_widths("rollouts", rollouts.ROLLOUTS.table(rows, NOW))


def queue_of_rollouts() -> list[RolloutSummary]:
    done = Attempt(rollout="q1.0", id="a2", status=AttemptStatus.SUCCEEDED, reward=0.75)
    usual: dict[str, Any] = {"origin": "queued", "mode": "train", "group": "q1", "last_seen_ns": T0 + 60 * 10**9}
    ended = Totals(calls=3, input_tokens=300, output_tokens=60)
    return [
        RolloutSummary(id="q1.2", status=RolloutStatus.QUEUING, created_ns=NOW - 10**8, **usual),
        RolloutSummary(id="q1.1", status=RolloutStatus.REQUEUING, created_ns=T0, tries=1, **usual),
        RolloutSummary(id="q1.0", status=RolloutStatus.SUCCEEDED, created_ns=T0, tries=2, attempts=[done],
                       totals=ended, reward=0.75, **usual),
        RolloutSummary(id="seen", created_ns=T0, last_seen_ns=T0, totals=Totals(calls=1, errors=1)),
    ]  # fmt: skip


def test_queued_rollouts() -> None:
    check_widths("queued-rollouts", rollouts.ROLLOUTS.table(queue_of_rollouts(), NOW))


def none_but(**fields: Any) -> dict[str, Any]:
    """What a call has and other spans do not."""
    return {"usage": None, "body": None, "model": None, "ms": 0, "finish": None, "http_status": None} | fields


def rewarded_tape() -> MemoryTape:
    """An attempt with calls, lines of output, an OpenTelemetry span and rewards."""
    tape = MemoryTape()
    tape.add(call(1), chat([{"role": "user", "content": "Hi"}], {"content": "Ho."}), mode="train", group="greetings",
             input={"question": "Hi"}, origin="queued")  # fmt: skip
    none = none_but()
    tape.add(call(2, kind="event", name="stdout", attributes={"line": "It works.\n"}, **none))
    tape.add(call(3, kind="event", name="exit", attributes={"code": 0, "signal": None}, **none))
    tape.add(call(4, kind="otel", name="search web", attributes={"query": "hi"}, **none_but(ms=20)))
    given = Reward(value=0.75, dimensions={"style": 1.0}, source="judge", reason="Polite,\nand short.", span=1)
    tape.add(call(5, kind="reward", name="reward", attributes=given.attributes(), **none))
    own = Reward(value=1.0, source="agent", trusted=False, late=True)
    tape.add(call(6, kind="reward", name="reward", attributes=own.attributes(), **none))
    return tape


def rewarded_rollout() -> tuple[RolloutSummary, list[SpanDetail]]:
    rollout, shown = details(rewarded_tape())
    outcome = Outcome(exit_code=0, duration_ns=1_500_000_000, reason="done")
    about = {"status": AttemptStatus.SUCCEEDED, "reward": 0.75, "worker": "host-1", "outcome": outcome}
    attempts = [rollout.attempts[0].model_copy(update=about)]
    return rollout.model_copy(update={"attempts": attempts, "reward": 0.75}), shown


def test_rewards_and_events_are_told_in_their_place() -> None:
    check_golden("rewarded-rollout", rollout_tree.rollout_tree(*rewarded_rollout()))


def test_rewards_and_events_among_spans() -> None:
    check_widths("rewarded-spans", rollouts.spans(rewarded_tape().spans("r1")))


def test_what_the_tape_lacks_of_calls() -> None:
    """The disk was full, or an answer was too large; what runs, or came to nobody, lacks nothing."""
    sent: dict[str, Any] = {"request_bytes": 100, "response_bytes": 1000}
    bare: dict[str, Any] = sent | {"body": None}
    calls = [
        call(1, **bare),
        call(2, status="error", error="http_500", http_status=500, **bare),
        call(3, truncated=True, **sent),
        call(4, status="open", end_ns=None, finish=None, **bare),
        call(5, status="interrupted", finish=None, **bare),
        call(6, kind="llm", dialect="opaque", model=None, method="GET", path="/v1/files", body=None),
        call(7, kind="tool", dialect="mcp", model=None, name="tools/call search", **bare),
        call(8, kind="event", name="exit", **none_but()),
    ]
    check_widths("lacking-spans", rollouts.spans(calls))
    check_golden("lacking-calls", Group(rollouts.recent(calls, NOW), *map(rollouts.span_line, calls)))


def test_a_summary_has_the_reward_of_the_newest_attempt_that_has_one() -> None:
    tape = weather_tape()
    rollout, attempts = tape.rollout("r1"), tape.attempts("r1")
    assert rollout is not None
    for rewards, expected in (((None, None), None), ((0.5, None), 0.5), ((0.5, 0.0), 0.0)):
        found = [a.model_copy(update={"reward": r}) for a, r in zip(attempts, rewards, strict=True)]
        tape.attempts = lambda rid, found=found: found  # pyright: ignore # this instance only
        assert summary(tape, rollout).reward == expected


# --- work ---


def test_queue() -> None:
    busy = QueueStatus(state="paused", waiting={"train": 1200, "val": 3}, claimed=7, oldest_ns=NOW - 90 * 10**9)
    empty = QueueStatus(state="open", waiting={}, claimed=0, oldest_ns=None)
    check_golden("queue", Group(pictures.queue(busy, NOW), pictures.queue(empty, NOW)))


def test_workers() -> None:
    used = WorkerUsage(cpu_percent=187.4, memory_bytes=3 << 30, gpu_percent=99, gpu_memory_bytes=70 << 30)
    busy = Worker(
        id="host-1", last_seen_ns=NOW - 3 * 10**9, figures=used, attempts=["q1.0/a1", "q1.1/a2"], finished=1234
    )
    idle = Worker(id="host-2", last_seen_ns=NOW)
    check_widths("workers", pictures.WORKERS.table([busy, idle], NOW))
    idle.figures.own = {"gpu.temperature": 61.0, "disk.free_gb": 1234567.8}
    check_widths("workers-own", pictures.WORKERS.table([busy, idle], NOW))


def test_what_became_of_tasks() -> None:
    new = [EnqueueResult(id=f"q{n}", status=RolloutStatus.QUEUING, created=True) for n in range(1200)]
    there = [EnqueueResult(id="x", status=RolloutStatus.SUCCEEDED, created=False)] * 3
    queued = [EnqueueResult(id="x", status=RolloutStatus.QUEUING, created=False)]
    check_golden("enqueued", Group(*map(pictures.enqueued, (new, new[:1] + queued + there, there))))


def test_what_became_of_a_reward() -> None:
    kept = RewardAnswer(sequence=5, trusted=True, late=False, reward=0.75)
    late = RewardAnswer(sequence=6, trusted=False, late=True, reward=None)
    check_golden("rewarded", Group(pictures.rewarded("r1/a1", kept), pictures.rewarded("r1/a1", late)))


def test_where_rollouts_stand_now() -> None:
    check_widths("moved", pictures.status_list(queue_of_rollouts()))


def test_spans() -> None:
    check_widths("spans", rollouts.spans(weather_tape().spans("r1")))


def test_a_rollout_is_told_once() -> None:
    check_golden("rollout", rollout_tree.rollout_tree(*details(weather_tape())))


def agents_tape(named: bool) -> MemoryTape:
    """A call starts a sub-agent, whose tools the agent has measured, and then compacts its conversation. `named`: the
    sub-agent has an id."""
    tape = MemoryTape()
    task, part = {"role": "user", "content": "Mend it."}, {"role": "user", "content": "Look for the fault."}
    start, look = asking("s1", "Agent", "Look for the fault."), asking("t1", "Bash", "make test")
    found = {"role": "tool", "tool_call_id": "t1", "content": "1 failed"}
    told = {"role": "tool", "tool_call_id": "s1", "content": "It is in a.py."}
    about = {AGENT_ID: "a5b368de2e9038589"} if named else {}
    took, ends = {TOOL_DURATIONS: ["Bash=271", "Read=4"]}, {COMPACTION: "auto", TOOL_DURATIONS: ["Agent=900"]}
    agent = "Explore" if named else None
    tape.add(call(1, tool_calls=1, request_bytes=90), chat_exchange([task], start))
    tape.add(
        call(2, agent=agent, attributes=about, tool_calls=1, request_bytes=50, ms=200), chat_exchange([part], look)
    )
    said = chat_exchange([part, {"role": "assistant", **look}, found], {"content": "It is in a.py."})
    tape.add(call(3, agent=agent, attributes={**about, **took}, request_bytes=70, ms=200), said)
    mended = chat_exchange([task, {"role": "assistant", **start}, told], {"content": "It is mended."})
    tape.add(call(4, attributes=ends, request_bytes=120), mended)
    return tape


def asking(id: str, tool: str, arguments: str) -> dict[str, Any]:
    """An answer that asks for a tool."""
    function = {"name": tool, "arguments": json.dumps({"text": arguments})}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


@pytest.mark.parametrize("named", [True, False])
def test_a_sub_agent_is_shown_below_the_call_that_started_it(named: bool) -> None:
    tape = agents_tape(named)
    rollout, shown = details(tape)
    found = read_tools(tape, rollout, "a1", lambda tool, arguments, agent: None)
    tree = rollout_tree.rollout_tree(rollout, shown, {"a1": rollout_tree.RequestedToolRuns(agents=found.agents)})
    data = build_tree(rollout, [*tape.spans("r1")], {"a1": found})
    lines = Group(*(cells(row)[0] for row in data.rows.values()))
    check_golden(f"sub-agent-{'named' if named else 'inferred'}", Group(tree, rollouts.tools(found.tools), lines))


def test_sums_without_a_value_have_a_name_and_rewards_three_digits() -> None:
    row = BreakdownRow(value="", calls=3, reward=2 / 3)
    shown = text_of(breakdown(Breakdown(by="version", rows=[row], prices_as_of=date(2026, 9, 1), complete=True)))
    assert next(line.split() for line in shown.splitlines() if line.startswith("(none)"))[-1] == "0.667"


def test_the_head_of_a_rollout_names_the_versions_that_served_it() -> None:
    rollout, shown = details(weather_tape())
    arm = {"versions": {"planner": "v2", "search": "v1"}, "arm": "planner-1:candidate,search-3:stable"}
    shown = [one.model_copy(update={"span": one.span.model_copy(update=arm)}) for one in shown]
    served = "planner@v2, search@v1 (candidate of planner-1, stable of search-3)"
    assert text_of(rollout_tree.rollout_tree(rollout, shown), 300).splitlines()[0].rstrip().endswith(f"  {served}")
    assert f"<dt>served by</dt><dd>{served}</dd>" in rollout_page(RolloutRecord(rollout, shown), 0)


def test_a_part_of_a_rollout_says_what_is_left_out() -> None:
    rollout, shown = details(weather_tape())
    assert "2 of 3 spans are shown" in text_of(rollout_tree.rollout_tree(rollout, shown[:2]))


def test_a_single_call_is_shown_whole() -> None:
    check_golden("call", rollout_tree.call_tree(details(weather_tape())[1][1]))


@pytest.mark.parametrize(
    ("kind", "attributes", "whole"),
    [
        ("event", {"text": f"Trace:\n  a\n{'x' * 300}"}, ["#1  event  e\n", f"Trace:\n      a\n    {'x' * 300}"]),
        ("event", {"why": "one\ntwo", "count": 3}, ["#1  event  e\n", "why  one\n│   two", "count  3"]),
        ("event", {"text": "short"}, ["#1  event  e  short\n"]),
        ("otel", {"city": "Bern", "list": [1, 2]}, ["city  Bern", "list  [1,2]"]),
        ("reward", {"penstock.reward.value": 1, "penstock.reward.reason": "a\nb"}, ["1  by user\n", "reason  a\n"]),
    ],
)  # fmt: skip
def test_a_span_alone_is_shown_whole(kind: SpanKind, attributes: dict[str, object], whole: list[str]) -> None:
    span = Span(rollout="r1", attempt="a1", sequence=1, kind=kind, name="e", attributes=attributes, start_ns=T0)
    shown = text_of(rollout_tree.call_tree(SpanDetail(span=span)), 400)
    assert [text for text in whole if text not in shown] == []
    assert ("more" in shown, "bytes" in shown) == (False, False)


def test_a_call_without_a_model_is_known_by_its_path() -> None:
    assert "#1  opaque  GET /v1/files" in text_of(rollout_tree.rollout_tree(*details(weather_tape(), "r2")))


def test_stats() -> None:
    one = ModelStats(calls=1234, errors=5, cancelled=1, input_tokens=10**6, output_tokens=1, median_ns=1, p95_ns=10**9,
                     cost=0.25, unpriced=3)  # fmt: skip
    figures = Stats(
        counted_spans=1240,
        complete=False,
        since_ns=T0,
        totals=Totals(**one.model_dump(exclude={"median_ns", "p95_ns"})),
        by_model={"gpt-5-mini": one},
        by_status={"ok": 1234, "error": 5, "cancelled": 1},
        by_kind={"llm": 1240, "reward": 8},
        rewards=RewardStats(count=8, untrusted=2, mean=0.625, by_source={"runner": 6, "agent": 2}),
        tape={"rollouts": 7, "used_bytes": 5 << 30},
        cursor=9,
        gaps=2,
    )
    check_widths("stats", rollouts.stats(figures))


def test_stats_name_servers_that_requests_do_not_reach() -> None:
    nothing = {name: 0 for name in ("counted_spans", "cursor", "gaps")}
    servers = {
        "a": ServerState(breaker="open"),
        "b": ServerState(waiting=3, breaker="probing"),
        "c": ServerState(waiting=1200),
        "d": ServerState(),
    }
    figures = Stats(
        **nothing, complete=True, since_ns=None, totals=Totals(), by_model={}, by_tool=[], by_status={}, by_kind={},
        rewards=RewardStats(), tape={}, servers=servers,
    )  # fmt: skip
    assert text_of(rollouts.stats(figures)).splitlines()[-4:] == [
        "Server a is left alone, because it has failed (its breaker is open).",
        "Server b is tried by one request, because it has failed (its breaker is open).",
        "3 requests wait for server b (max_concurrent).",
        "1,200 requests wait for server c (max_concurrent).",
    ]


def test_changes() -> None:
    tape = weather_tape()
    lines = [text_of(rollouts.change(entry)) for entry in tape.changes(0, 3)[0]]
    attempt = Change(cursor=4, kind="attempt", attempt=tape.attempts("r1")[0])
    check_golden("changes", "".join([*lines, text_of(rollouts.change(attempt))]).rstrip("\n"))


def test_nothing_is_a_table_too() -> None:
    assert text_of(rollouts.ROLLOUTS.table([], NOW)).startswith("rollout")


# --- what strangers wrote ---

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]bold[/red]\r\x9b31m\u202eevil\x00"


def hostile_span() -> Span:
    return call(1, model=HOSTILE, agent=HOSTILE, error=HOSTILE, finish=HOSTILE, status="error")


def test_nothing_on_the_tape_speaks_to_the_terminal() -> None:
    tape = MemoryTape()
    tape.add(hostile_span(), chat_exchange([{"role": HOSTILE, "content": HOSTILE}], {"content": HOSTILE}))
    rollout, shown = details(tape)
    pictures = (
        rollouts.spans(tape.spans("r1")),
        rollouts.change(Change(cursor=1, kind="span", span=hostile_span())),
        rollout_tree.rollout_tree(rollout, shown),
        rollout_tree.call_tree(shown[0]),
    )
    for picture in pictures:
        text = text_of(picture, 400)
        assert "[red]bold[/red]" in text
        assert not [c for c in text if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e")]


@given(st.text())
def test_clean_text_keeps_what_is_printable(text: str) -> None:
    cleaned = rollouts.clean(text)
    assert len(cleaned) == len(text)
    assert all(a == b for a, b in zip(text, cleaned, strict=True) if a.isprintable() or a in "\n\t")


# --- what is new in a conversation ---


def said(role: str, text: str, *more: Part) -> Message:
    return Message(role=role, parts=[Part(type="text", text=text), *more])


def conversations(*told: list[Message]) -> rollout_tree.ConversationPrefixes:
    """Calls whose last message is the answer."""
    found = rollout_tree.ConversationPrefixes()
    for messages in told:
        found.add(Turn(dialect="chat", messages=messages[:-1], choices=[Choice(index=0, message=messages[-1])]))
    return found


def test_what_was_said_or_answered_before_is_known() -> None:
    thought = Part(type="reasoning", text="hm")
    told = conversations([said("user", "a"), said("assistant", "b", thought)])
    assert told.known_length([said("user", "a"), said("assistant", "b"), said("user", "c")]) == 2
    assert told.known_length([said("user", "a")]) == 1
    assert told.known_length([said("user", "x"), said("assistant", "b")]) == 0
    assert conversations().known_length([said("user", "a")]) == 0


def test_the_longest_of_several_conversations_counts() -> None:
    told = conversations(*([said("user", t) for t in texts] for texts in ("ab", "abc", "x")))
    assert told.known_length([said("user", t) for t in "abcd"]) == 3


# --- figures ---


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, ""), (0, "0 ns"), (999, "999 ns"), (1500, "1.5 µs"), (12_345_678, "12.3 ms"), (999_999_999, "1000 ms"),
     (59_900_000_000, "59.9 s"), (125 * 10**9, "2 m 05 s"), (3 * 3600 * 10**9 + 7 * 60 * 10**9, "3 h 07 m")],
)  # fmt: skip
def test_durations(ns: int | None, text: str) -> None:
    assert rollouts.duration(ns) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (5 << 40, "5120 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert rollouts.size(count) == text


@pytest.mark.parametrize(
    ("s", "text"), [(0, "now"), (59, "59 s ago"), (3600, "1 h ago"), (-5, "now"), (200_000, "2 d ago")]
)
def test_ages(s: int, text: str) -> None:
    assert rollouts.ago(T0 - s * 10**9, T0) == text


def test_abbreviation_says_how_much_is_missing() -> None:
    assert rollout_tree.abbreviate("a\n  b", 10) == "a b"
    assert rollout_tree.abbreviate("x" * 1300, 100) == f"{'x' * 100} … 1,200 characters more"
    assert rollout_tree.abbreviate("x\n" * 300, None) == "x\n" * 300


def test_a_call_that_another_upstream_has_served_says_so() -> None:
    tries = [{"upstream": "up", "after_ms": 3, "why": "http_429"}, {"upstream": "up", "after_ms": 9, "why": "connect"}]
    span = call(upstream="spare", attributes={TRIES: tries})
    assert text_of(rollouts.span_line(span)).rstrip().endswith("by spare after up (http_429), up (connect)")
    assert " by " not in text_of(rollouts.span_line(call(upstream="spare")))
