"""Runs of tools whose address named no rollout, matched with the rollouts that were alive."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.memory_tape import T0, MemoryTape, call
from fakes.mistakes import tells
from fakes.tool_calls import PAGE, TASK, Recorded, carried, model, ran, wanted

from penstock.gateway.api import tools
from penstock.gateway.api.pagination import summary
from penstock.gateway.api.tools import read_tools
from penstock.gateway.model.tools import ToolList, ToolUse
from penstock.gateway.reading.diagnosis.tool_join import CUT, PATIENCE_NS

ASKED = ("c1", "mcp__web__search", {"q": "x"})
Json = dict[str, Any]
DONE: Json = {"role": "assistant", "content": "Done."}
OTHER_PAGE = "The station has four platforms, and a fifth is under construction."


def moved(recorded: Recorded, rollout: str, later_ms: int = 0) -> Recorded:
    span, exchange = recorded
    end = None if span.end_ns is None else span.end_ns + later_ms * 10**6
    about = {"rollout": rollout, "start_ns": span.start_ns + later_ms * 10**6, "end_ns": end}
    return span.model_copy(update=about), exchange


class Story:
    """A tape of agents with model calls, and of sessions of tools that name no rollout."""

    def __init__(self) -> None:
        self.tape = MemoryTape()

    def agent(self, rollout: str, words: str | None = PAGE, task: str = "Find it.", later_ms: int = 0) -> Story:
        """Asks at 1 s, is answered at 1.1 s and goes on at 3 s; `words` is what its model is shown then."""
        said = [TASK | {"content": task}]
        self.add(rollout, model(1, said, wanted(ASKED)), later_ms)
        if words is not None:
            self.add(rollout, model(3, [*said, wanted(ASKED), carried("c1", words)], DONE), later_ms)
        return self

    def session(self, rollout: str, words: str = PAGE, later_ms: int = 0, **about: Any) -> Story:
        """A run at 2 s."""
        found = ran(2, "search", about.pop("arguments", {"q": "x"}), words, **about)
        self.add(rollout, found, later_ms, origin="implicit")
        return self

    def add(self, rollout: str, recorded: Recorded, later_ms: int = 0, **about: Any) -> None:
        self.tape.add(*moved(recorded, rollout, later_ms), **about)

    def tools(self, rollout: str, until: int | None = None, inside: bool = True) -> ToolList:
        found = self.tape.rollout(rollout)
        assert found is not None
        return read_tools(
            self.tape, summary(self.tape, found), "a1", lambda tool, arguments, agent: None, until, inside
        )

    def only(self, rollout: str) -> ToolUse:
        [use] = self.tools(rollout).tools
        return use


def test_a_run_stands_below_the_call_that_asked_in_another_rollout() -> None:
    story = Story().agent("r1").session("s1")
    seen = story.only("r1")
    assert (seen.run_in, seen.span, seen.server, seen.grade) == ("s1/a1", 2, "web", "certain")
    assert (seen.asked_by, seen.call_id, seen.carried_by, seen.asked_in) == (1, "c1", 3, None)
    told = story.only("s1")
    assert (told.asked_in, told.asked_by, told.call_id, told.grade, told.run_in) == ("r1/a1", 1, "c1", "certain", None)
    assert tells(told.reason, "r1/a1#1 asked for it", "no other rollout", "#3 carries its result")


def test_by_name_arguments_and_time_alone_it_is_likely() -> None:
    story = Story().agent("r1", words=None).session("s1")
    assert [story.only(name).grade for name in ("r1", "s1")] == ["likely", "likely"]


def test_two_rollouts_that_asked_for_the_same_are_ambiguous() -> None:
    story = Story().agent("r1").agent("r2", task="Find it as well.").session("s1")
    told = story.only("s1")
    assert (told.grade, told.asked_in, told.asked_by) == ("ambiguous", None, None)
    assert told.elsewhere == ["r1/a1#1", "r2/a1#1"]
    seen = story.only("r1")
    assert (seen.grade, seen.run_in, seen.candidates, seen.elsewhere) == ("ambiguous", "s1/a1", [1], ["r2/a1#1"])


def test_the_result_tells_two_rollouts_apart() -> None:
    story = Story().agent("r1").agent("r2", OTHER_PAGE, "Find it as well.").session("s1").session("s2", OTHER_PAGE)
    assert [(story.only(name).asked_in, story.only(name).grade) for name in ("s1", "s2")] == [
        ("r1/a1", "certain"),
        ("r2/a1", "certain"),
    ]
    assert (story.only("r1").run_in, story.only("r2").run_in) == ("s1/a1", "s2/a1")


def test_a_result_that_the_model_was_not_shown_chooses_nothing() -> None:
    # An agent with a tool of the same name inside of it; who the session's agent was is not on the tape.
    story = Story().agent("r1", OTHER_PAGE).session("s1")
    assert (story.only("s1").grade, story.only("s1").asked_by) == ("ambiguous", None)


def test_what_nobody_asked_for_stays_the_sessions_own() -> None:
    story = Story().agent("r1").session("s1", arguments={"q": "other"}, words=OTHER_PAGE)
    assert (story.only("s1").grade, story.only("s1").asked_in) == ("none", None)
    assert [(use.span, use.run_in) for use in story.tools("r1").tools] == [(None, None)]


@pytest.mark.parametrize(("late_ms", "grade"), [(0, "likely"), (PATIENCE_NS // 10**6 + 2_000, "none")])
def test_a_tool_call_without_a_result_is_not_waited_for_for_ever(late_ms: int, grade: str) -> None:
    story = Story().agent("r1", words=None).session("s1", later_ms=late_ms)
    assert story.only("s1").grade == grade


def test_a_run_before_the_answer_is_not_for_it() -> None:
    story = Story().agent("r1", later_ms=1_500).session("s1")
    assert story.only("s1").grade == "none"


def test_a_tool_call_that_has_a_run_of_its_own_is_not_asked_for_again() -> None:
    story = Story().agent("r1").session("s1")
    story.add("r1", ran(2, "search", {"q": "x"}))
    assert story.only("s1").grade == "none"
    assert [(use.span, use.run_in) for use in story.tools("r1").tools] == [(2, None)]


def test_a_rollout_that_somebody_named_is_no_session() -> None:
    story = Story().agent("r1")
    story.add("named", ran(2, "search", {"q": "x"}))
    assert story.only("named").grade == "none"
    assert story.only("r1").run_in is None


def test_where_not_all_rollouts_were_looked_at_nothing_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    for number in range(5):
        story.tape.add(call(1, f"old{number}"))
    story.agent("r1").session("s1")
    assert (story.only("s1").grade, story.tools("s1").cut) == ("certain", False)
    monkeypatch.setattr(tools, "MOST_ROLLOUTS", 3)
    told = story.only("s1")
    assert (told.grade, story.tools("s1").cut) == ("likely", True)
    assert told.reason.endswith(CUT)
    monkeypatch.setattr(tools, "MOST_ROLLOUTS", 2_000)
    monkeypatch.setattr(tools, "MOST_CALLS", 1)
    assert story.tools("s1").cut


def test_rollouts_that_have_ended_are_not_counted_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MOST_ROLLOUTS", 3)
    story = Story()
    for number in range(5):
        story.tape.add(call(1, f"old{number}"), None, ended_ns=T0 - PATIENCE_NS)
    story.agent("r1").session("s1")
    assert (story.only("s1").grade, story.tools("s1").cut) == ("certain", False)
    monkeypatch.setattr(tools, "MOST_HEADS", 4)
    assert (story.only("s1").grade, story.tools("s1").cut) == ("likely", True)


def test_old_rollouts_are_found_without_looking_at_all_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story().agent("r1").session("s1")
    day_ms = 24 * 3600 * 1000
    for number in range(40):
        story.add(f"new{number}", model(1, [TASK], DONE), day_ms + number)
    monkeypatch.setattr(tools, "MOST_ROLLOUTS", 3)
    assert story.only("s1").grade == "certain"
    # A day later none of that is alive.
    story.session("s2", later_ms=2 * day_ms)
    assert story.only("s2").grade == "none"


def test_strays_cost_nothing_where_there_are_none() -> None:
    story = Story().agent("r1").agent("r2")
    reads: list[str] = []
    original = story.tape.exchange
    story.tape.exchange = lambda span: (reads.append(span.rollout), original(span))[1]
    _ = story.tools("r1")
    assert set(reads) == {"r1"}


def test_what_a_tree_wants_is_known_without_a_call_where_no_server_ran_a_tool() -> None:
    story, reads = Story().agent("r1"), list[str]()
    original = story.tape.exchange
    story.tape.exchange = lambda span: (reads.append(span.rollout), original(span))[1]
    assert (story.tools("r1", inside=False).tools, reads) == ([], [])
    assert [use.span for use in story.session("s1").tools("r1", inside=False).tools] == [2]
    assert story.tools("r1", until=1).tools[0].asked_by == 1
