"""What `penstock doctor` says of tools, call by call; and which tool calls lost their results."""

from __future__ import annotations

import pytest
from fakes.memory_tape import call
from fakes.tool_calls import PAGE, TASK, Recorded, carried, model, ran, wanted

from penstock.gateway.diagnosis.diagnosis import diagnose
from penstock.gateway.diagnosis.tool_uses import tools_used
from penstock.gateway.model.rollout import Attempt, AttemptStatus, RolloutSummary
from penstock.gateway.model.tools import ToolList, UnansweredCall

SEARCH, OTHER, AGAIN = ("c1", "search", {"q": "x"}), ("c2", "search", {"q": "y"}), ("c2", "search", {"q": "x"})
ASKED, CARRIED = model(1, [TASK], wanted(SEARCH)), [TASK, wanted(SEARCH), carried("c1", PAGE)]
DONE = {"content": "Done."}


def used(*recorded: Recorded) -> ToolList:
    bytes_of = {span.sequence: exchange for span, exchange in recorded}
    return tools_used([span for span, _ in recorded], lambda span: bytes_of[span.sequence])


def said(*recorded: Recorded) -> list[tuple[int, str, str, str]]:
    """The findings about tools: (call, code, reason, fix)."""
    bytes_of = {span.sequence: exchange for span, exchange in recorded}
    attempt = Attempt(rollout="r1", id="a1", status=AttemptStatus.SUCCEEDED, reward=1.0)
    whole = RolloutSummary(id="r1", attempts=[attempt], reward=1.0)
    made = diagnose(whole, [span for span, _ in recorded], lambda span: bytes_of[span.sequence])
    found = [(one.sequence, finding) for one in made.attempts[0].calls for finding in one.findings]
    tools = [(sequence, it) for sequence, it in found if it.code.startswith("tool_")]
    assert not any(it.blocks for _, it in tools)
    return [(sequence, it.code, it.reason, it.fix) for sequence, it in tools]


def test_a_tool_that_went_well_is_not_worth_a_word() -> None:
    calls = (ASKED, ran(2, "search", {"q": "x"}), model(3, CARRIED, DONE))
    assert said(*calls) == []
    assert used(*calls).unanswered == []
    assert [(it.span_id, it.asked_span_id) for it in used(*calls).tools] == [(None, None)]
    # The span of the call that asked is named.
    named = model(1, [TASK], wanted(SEARCH), span_id="a" * 16), ran(2, "search", {"q": "x"}, span_id="b" * 16)
    [run] = used(*named, model(3, CARRIED, DONE)).tools
    assert (run.span_id, run.asked_span_id, run.asked_by, run.grade) == ("b" * 16, "a" * 16, 1, "certain")


def test_a_run_whose_result_was_lost() -> None:
    later = [TASK, wanted(SEARCH), {"role": "user", "content": "Never mind."}]
    calls = (ASKED, ran(2, "search", {"q": "x"}), model(3, later, DONE))
    assert used(*calls).unanswered == [UnansweredCall(asked_by=1, call_id="c1", tool="search", run=2)]
    reason = "#2 ran search, and no later call carries the result"
    assert said(*calls) == [(1, "tool_unanswered", reason, "penstock tools r1/a1")]


def test_one_of_two_tool_calls_without_a_result() -> None:
    later = [TASK, wanted(SEARCH, OTHER), carried("c1", PAGE)]
    calls = (model(1, [TASK], wanted(SEARCH, OTHER)), model(2, later, DONE))
    assert used(*calls).unanswered == [UnansweredCall(asked_by=1, call_id="c2", tool="search", run=None)]
    assert [code for _, code, _, _ in said(*calls)] == ["tool_unanswered"]


def test_a_tool_call_that_ends_the_agent_lacks_nothing() -> None:
    assert said(model(1, [TASK], wanted(("c1", "submit", {})))) == []
    assert said(ASKED, ran(2, "search", {"q": "x"})) == []


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        ("tool_error", "tool_failed", "#2 search was run and failed (tool_error)"),
        ("policy_violation", "tool_denied", "#2 search was stopped by a rule"),
    ],
)
def test_a_run_that_failed_or_was_denied(error: str, code: str, reason: str) -> None:
    bad = ran(2, "search", {"q": "x"}, status="error", error=error)
    assert said(ASKED, bad, model(3, CARRIED, DONE)) == [(1, code, reason, "penstock show r1/a1#2")]


def test_runs_that_nothing_tells_apart() -> None:
    later = [TASK, wanted(SEARCH, AGAIN), carried("c1", PAGE), carried("c2", PAGE)]
    runs = (ran(2, "search", {"q": "x"}), ran(3, "search", {"q": "x"}))
    found = said(model(1, [TASK], wanted(SEARCH, AGAIN)), *runs, model(4, later, DONE))
    assert [(sequence, code) for sequence, code, _, _ in found] == [(1, "tool_ambiguous")] * 2


def test_an_attempt_without_tools_is_not_read_twice() -> None:
    reads: list[int] = []
    span, exchange = model(1, [TASK], {"content": "Done."})
    attempt = Attempt(rollout="r1", id="a1", reward=1.0)
    whole = RolloutSummary(id="r1", attempts=[attempt], reward=1.0)
    _ = diagnose(whole, [span, call(2, kind="event")], lambda it: (reads.append(it.sequence), exchange)[1])
    assert reads == [1]
