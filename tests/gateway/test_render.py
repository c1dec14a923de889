"""What the terminal shows, as plain text of fixed width, compared with tests/goldens.

`UPDATE_GOLDENS=1 pytest tests/gateway/test_render.py` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.memory_tape import T0, MemoryTape, call, chat_exchange
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from gateway import conversation, render
from gateway.model import Change, Message, Part, RolloutSummary, Span, Totals, Usage
from gateway.pages import summary
from gateway.reads import detail_of
from gateway.views import ModelStats, SpanDetail, Stats

GOLDENS = Path(__file__).parents[1] / "goldens"
NOW = T0 + 7200 * 10**9
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {}},
}
ASKED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}


def text_of(renderable: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def check_golden(name: str, renderable: RenderableType) -> None:
    path, text = GOLDENS / f"{name}.txt", text_of(renderable)
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text()


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
    tape.add(call(3, ms=75_000), chat(third, {"content": "At your service."}))
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
    return summary(tape, rollout), [detail_of(tape, span) for span in tape.spans(rid)]


def test_rollouts() -> None:
    tape = weather_tape()
    rows = [summary(tape, rollout) for _, rollout in tape.rollouts()]
    check_golden("rollouts", render.rollouts(rows, NOW))


def test_spans() -> None:
    check_golden("spans", render.spans(weather_tape().spans("r1")))


def test_a_rollout_is_told_once() -> None:
    check_golden("rollout", conversation.rollout_tree(*details(weather_tape())))


def test_a_part_of_a_rollout_says_what_is_left_out() -> None:
    rollout, shown = details(weather_tape())
    assert "2 of 3 calls are shown" in text_of(conversation.rollout_tree(rollout, shown[:2]))


def test_a_single_call_is_shown_whole() -> None:
    check_golden("call", conversation.call_tree(details(weather_tape())[1][1]))


def test_a_call_without_a_model_is_known_by_its_path() -> None:
    assert "#1  opaque  GET /v1/files" in text_of(conversation.rollout_tree(*details(weather_tape(), "r2")))


def test_stats() -> None:
    one = ModelStats(calls=1234, errors=5, cancelled=1, input_tokens=10**6, output_tokens=1, median_ns=1, p95_ns=10**9)
    figures = Stats(
        counted_spans=1240,
        complete=False,
        since_ns=T0,
        totals=Totals(**one.model_dump(exclude={"median_ns", "p95_ns"})),
        by_model={"gpt-5-mini": one},
        by_status={"ok": 1234, "error": 5, "cancelled": 1},
        tape={"rollouts": 7, "used_bytes": 5 << 30},
        cursor=9,
        gaps=2,
    )
    check_golden("stats", render.stats(figures))


def test_changes() -> None:
    tape = weather_tape()
    lines = [text_of(render.change(entry)) for entry in tape.changes(0, 3)[0]]
    attempt = Change(cursor=4, kind="attempt", attempt=tape.attempts("r1")[0])
    check_golden("changes", "".join([*lines, text_of(render.change(attempt))]).rstrip("\n"))


def test_nothing_is_a_table_too() -> None:
    assert text_of(render.rollouts([], NOW)).startswith("rollout")


# --- what strangers wrote ---

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]bold[/red]\r\x9b31m\u202eevil\x00"


def hostile_span() -> Span:
    return call(1, model=HOSTILE, agent=HOSTILE, error=HOSTILE, finish=HOSTILE, status="error")


def test_nothing_on_the_tape_speaks_to_the_terminal() -> None:
    tape = MemoryTape()
    tape.add(hostile_span(), chat_exchange([{"role": HOSTILE, "content": HOSTILE}], {"content": HOSTILE}))
    rollout, shown = details(tape)
    pictures = (
        render.spans(tape.spans("r1")),
        render.change(Change(cursor=1, kind="span", span=hostile_span())),
        conversation.rollout_tree(rollout, shown),
        conversation.call_tree(shown[0]),
    )
    for picture in pictures:
        text = text_of(picture, 400)
        assert "[red]bold[/red]" in text
        assert not [c for c in text if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e")]


@given(st.text())
def test_clean_text_keeps_what_is_printable(text: str) -> None:
    cleaned = render.clean(text)
    assert len(cleaned) == len(text)
    assert all(a == b for a, b in zip(text, cleaned, strict=True) if a.isprintable() or a in "\n\t")


# --- what is new in a conversation ---


def said(role: str, text: str, *more: Part) -> Message:
    return Message(role=role, parts=[Part(type="text", text=text), *more])


def test_what_was_said_or_answered_before_is_known() -> None:
    thought = Part(type="reasoning", text="hm")
    told = [[conversation.key(m) for m in (said("user", "a"), said("assistant", "b", thought))]]
    assert conversation.known([said("user", "a"), said("assistant", "b"), said("user", "c")], told) == 2
    assert conversation.known([said("user", "a")], told) == 1
    assert conversation.known([said("user", "x"), said("assistant", "b")], told) == 0
    assert conversation.known([said("user", "a")], []) == 0


def test_the_longest_of_several_conversations_counts() -> None:
    told = [[conversation.key(said("user", t)) for t in texts] for texts in ("ab", "abc", "x")]
    assert conversation.known([said("user", t) for t in "abcd"], told) == 3


# --- figures ---


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, ""), (0, "0 ns"), (999, "999 ns"), (1500, "1.5 µs"), (12_345_678, "12.3 ms"), (999_999_999, "1000 ms"),
     (59_900_000_000, "59.9 s"), (125 * 10**9, "2 m 05 s"), (3 * 3600 * 10**9 + 7 * 60 * 10**9, "3 h 07 m")],
)  # fmt: skip
def test_durations(ns: int | None, text: str) -> None:
    assert render.duration(ns) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (5 << 40, "5120 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert render.size(count) == text


@pytest.mark.parametrize(
    ("s", "text"), [(0, "now"), (59, "59 s ago"), (3600, "1 h ago"), (-5, "now"), (200_000, "2 d ago")]
)
def test_ages(s: int, text: str) -> None:
    assert render.ago(T0 - s * 10**9, T0) == text


@pytest.mark.parametrize(
    ("given", "made", "text"), [(None, None, ""), (1200, None, "1,200 → ?"), (0, 5, "0 → 5"), (None, 5, "? → 5")]
)
def test_tokens(given: int | None, made: int | None, text: str) -> None:
    assert render.tokens(given, made) == text


def test_abbreviation_says_how_much_is_missing() -> None:
    assert conversation.abbreviate("a\n  b", 10) == "a b"
    assert conversation.abbreviate("x" * 1300, 100) == f"{'x' * 100} … 1,200 characters more"
    assert conversation.abbreviate("x\n" * 300, None) == "x\n" * 300
