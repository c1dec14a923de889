"""The page of a rollout: strangers write no markup, it stands alone, it stays small, and it says what differs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes.memory_tape import T0, call
from fakes.shown import Outline
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.console.views.rollout_page import LARGEST, ComparedRollout, RolloutRecord, rollout_page
from penstock.console.views.rollout_tree import TranscriptStep
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.rollout import Attempt, Outcome, Reward, RolloutStatus, RolloutSummary, Totals
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn

NOW = T0 + 7200 * 10**9
STRANGE = "</pre></style></details><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'\x00\x1b[31m\u202e"


def message(role: str, *parts: Part) -> Message:
    return Message(role=role, parts=list(parts))


def said(text: str, role: str = "user") -> Message:
    return message(role, Part(type="text", text=text))


def summary(spans: int, **fields: Any) -> RolloutSummary:
    totals = Totals(calls=spans, input_tokens=100, output_tokens=20)
    attempt = Attempt(rollout="r1", id="a1", created_ns=T0, spans=spans, **fields)
    known: dict[str, Any] = {"created_ns": T0, "last_seen_ns": T0 + 10**9, "status": RolloutStatus.SUCCEEDED}
    return RolloutSummary(id="r1", attempts=[attempt], totals=totals, **known)


def record(words: str) -> RolloutRecord:
    """A rollout in which everything that somebody else may write is this."""
    asks = Part(type="tool_call", id="c", name=words, arguments=words)
    result = message("tool", Part(type="tool_call_response", id="c", text=words))
    odd = [Part(type=kind, text=words, data={"a": words}) for kind in ("reasoning", "refusal", "unknown", "media")]
    answer = Choice(message=message(words, asks, Part(type="text", text=words), *odd), finish=words)
    turn = Turn(
        dialect="chat", messages=[said(words, words), result], tools=[Tool(name=words)], choices=[answer, answer],
        error=words, problems=[words],
    )  # fmt: skip
    reward = Reward(value=1, reason=words).attributes()
    spans = [
        call(1, model=words, agent=words, error=words, first_byte_ns=10**8, versions={words: words}, arm=words),
        Span(rollout="r1", attempt="a1", sequence=2, kind="event", name=words, attributes={"k": words}, start_ns=T0),
        Span(rollout="r1", attempt="a1", sequence=3, kind="reward", attributes=reward, start_ns=T0 + 2 * 10**9),
    ]
    used = ToolUse(
        tool=words, server=words, grade="certain", reason=words, rule=words, start_ns=1, end_ns=2, error=words
    )
    rollout = summary(3, outcome=Outcome(reason=words, signal=words), worker="w1")
    rollout = rollout.model_copy(update={"input": {words: words}})
    details = [SpanDetail(span=one, turn=turn if one.kind == "llm" else None) for one in spans]
    return RolloutRecord(rollout, details, tools=[used])


def other(words: str) -> ComparedRollout:
    steps = [TranscriptStep(words, words, 1), TranscriptStep("user", f"{words} one", 2)]
    return ComparedRollout(summary(1), steps, [steps[0], TranscriptStep("user", f"{words} two", 2)])


def tags(html: str) -> list[tuple[str, list[str]]]:
    """Marks of differences depend on the words."""
    return [one for one in Outline(html).tags if one[0] not in ("ins", "del")]


HARMLESS = tags(rollout_page(record("harmless"), NOW, other("harmless")))


@given(st.text(min_size=1, max_size=60).filter(lambda words: bool("".join(words.split()))))
@example(STRANGE)
@example("<!-- ")
def test_whatever_was_said_is_text(words: str) -> None:
    made = rollout_page(record(words), NOW, other(words))
    assert tags(made) == HARMLESS
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", made)


def test_the_page_stands_alone() -> None:
    made = rollout_page(record(STRANGE), NOW, other(STRANGE))
    assert not {tag for tag, _ in Outline(made).tags} & {"script", "link", "img", "iframe", "object", "form", "image"}
    assert not re.search(r"url\(|@import", made)
    assert set(re.findall(r'href="(.)', made)) == {"#"}
    assert made.count("default-src 'none'") == 1
    assert "prefers-color-scheme: dark" in made
    anchors = re.findall(r' id="([^"]+)"', made)
    assert len(set(anchors)) == len(anchors)
    assert {f"#{name}" for name in anchors} >= set(re.findall(r'href="([^"]+)"', made))


@pytest.mark.parametrize("letter", ["a", "<", "\U0001f600"])
def test_fifty_long_calls_stay_below_a_megabyte(letter: str) -> None:
    question = said(f"Look. {letter * 60_000}")
    long = [Choice(message=said(letter * 90_000, "assistant"))]
    turns = [Turn(dialect="chat", messages=[question, said(f"{at}")], choices=long) for at in range(50)]
    details = [SpanDetail(span=call(at), turn=turn) for at, turn in enumerate(turns, 1)]
    steps = [TranscriptStep("assistant", f"{at} {letter * 90_000}", at) for at in range(50)]
    made = rollout_page(RolloutRecord(summary(80), details), NOW, ComparedRollout(summary(1), steps[1:], steps))
    assert 50_000 < len(made.encode()) <= LARGEST
    assert "characters are not shown: penstock show r1/a1#50</p>" in made
    assert "50 of 80 spans are shown: --calls 80 shows all." in made


@pytest.mark.parametrize("kind", ["messages", "names", "tools"])
def test_calls_of_many_messages_and_long_names_stay_below_a_megabyte_too(kind: str) -> None:
    long, answer = "m" * 50_000, [Choice(message=said("The answer.", "assistant"))]
    messages = [said(f"{at} {long[:400]}") for at in range(200)] if kind == "messages" else [said(long, long)]
    offered = [Tool(name=long)] if kind == "tools" else []
    turn = Turn(dialect="chat", messages=messages, choices=answer, tools=offered)
    spans = [call(at, model=long if kind == "names" else "m") for at in range(1, 51)]
    # Each call has a conversation of its own.
    details = [
        SpanDetail(span=it, turn=turn.model_copy(update={"messages": [said(str(it.sequence)), *messages]}))
        for it in spans
    ]
    made = rollout_page(RolloutRecord(summary(50), details), NOW)
    assert len(made.encode()) <= LARGEST
    assert made.count("The answer.</pre>") == 50
    assert kind == "names" or "of this call not shown: penstock show r1/a1#50</p>" in made


def test_the_page_says_what_happened_and_what_differs() -> None:
    again = said("How is the weather?")
    first = Turn(
        dialect="chat", messages=[again], choices=[Choice(message=said("Which city?", "assistant"), finish="stop")]
    )
    second = Turn(dialect="chat", messages=[again, said("Which city?", "assistant"), said("Bern")])
    spans = [call(1, first_byte_ns=200_000_000), call(2, status="error", error="http_429")]
    details = [SpanDetail(span=one, turn=turn) for one, turn in zip(spans, (first, second), strict=True)]
    theirs = [TranscriptStep("user", "Hello", 1), TranscriptStep("assistant", "It is warm today.", 1)]
    ours = [theirs[0], TranscriptStep("assistant", "It is cold today.", 1)]
    found = ComparedRollout(summary(1).model_copy(update={"id": "r0"}), theirs, ours)
    made = rollout_page(RolloutRecord(summary(2), details), NOW, found)
    shown = " ".join("".join(Outline(made).said).split())
    assert "Against r0" in shown
    assert "1 of 2 steps differ" in shown
    assert "It is <del>warm</del> today." in made
    assert "It is <ins>cold</ins> today." in made
    assert "… 2 messages as before" in shown
    assert shown.count("How is the weather?") == 1
    # Of 1.8 s the first call took 0.8 s, the first 0.2 s of which it waited.
    bars = re.findall(r'<i class="([a-z ]+)" style="left: ([\d.]+)%; width: ([\d.]+)%">', made)
    assert bars == [("llm waits", "0.00", "11.11"), ("llm", "11.11", "33.33"), ("bad", "55.56", "44.44")]
    same = ComparedRollout(found.rollout, ours, ours)
    assert "2 steps, and all are equal" in rollout_page(RolloutRecord(summary(0), []), NOW, same)
    nobody = summary(0).model_copy(update={"attempts": []})
    assert "Nobody has tried it yet" in rollout_page(RolloutRecord(nobody, []), NOW)
