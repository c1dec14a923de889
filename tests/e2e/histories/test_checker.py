"""The checker finds what is planted: one small violation each, beside a history in which nothing is wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from e2e.histories import checker
from e2e.histories.history import History, Operation, read
from e2e.histories.planted import (
    CALL,
    HERE,
    OTHER,
    USED,
    attempt,
    call,
    claim,
    did,
    fault,
    finish,
    held,
    only,
    reward,
    span,
    told,
    tool,
    used,
)
from e2e.histories.tape import Tape
from e2e.histories.tool_server import text_of

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.release import Pin
from penstock.gateway.model.rollout import AttemptStatus
from penstock.gateway.model.span import SpanStatus


def test_a_history_without_a_fault_has_no_problem(history: list[Operation], tape: Tape) -> None:
    assert checker.problems(history, tape, strict=True) == []
    assert checker.problems(history, tape, strict=False) == []


def test_a_lost_call(history: list[Operation], tape: Tape) -> None:
    tape.spans = [reward()]
    tape.feed[3] = "span q1/a1#1"
    history.append(fault("kill", 9.0, 10.0))
    assert "lost: call" in only(history, tape)
    assert "lost: call" in only(history, tape, strict=False), "its attempt had been finished before the kill"


def test_what_a_kill_may_take_away(history: list[Operation], tape: Tape) -> None:
    """By default the last moments; with `strict` nothing that an upstream has seen."""
    history += [call(8.5, 8.6, name=OTHER), fault("kill", 9.0, 10.0), finish(11.0, 12.0)]
    assert "lost: call" in only(history, tape)
    assert checker.problems(history, tape, strict=False) == []
    history[-3] = call(8.5, 8.6, "unknown", OTHER)
    assert checker.problems(history, tape, strict=True) == []
    tape.seen[OTHER] = "the provider has it"
    assert "lost: call" in only(history, tape)


def test_a_call_that_was_answered_is_not_interrupted(history: list[Operation], tape: Tape) -> None:
    tape.spans[0].status = SpanStatus.INTERRUPTED
    assert "q1/a1#1 (interrupted) was answered" in only(history, tape, strict=False)


def test_a_call_that_is_there_twice(history: list[Operation], tape: Tape) -> None:
    tape.spans.append(span(3))
    assert "on the tape 2 times" in only(history, tape)


def test_a_call_without_an_end(history: list[Operation], tape: Tape) -> None:
    history.append(call(8.0, 9.0, "unknown", OTHER))
    tape.spans.append(span(3, OTHER, status=SpanStatus.OPEN))
    assert "has no end" in only(history, tape)


def test_a_call_that_nobody_made(history: list[Operation], tape: Tape) -> None:
    tape.spans.append(span(3, OTHER))
    assert "was never asked for" in only(history, tape)


def test_the_answer_of_another_call(history: list[Operation], tape: Tape) -> None:
    tape.spans[0] = span(response_id="chatcmpl-else")
    assert "of another call" in only(history, tape)


def test_a_tool_call_that_is_lost(history: list[Operation], tape: Tape) -> None:
    history.append(tool(6.0, 6.5))
    assert "lost: tool" in only(history, tape)
    history[-1].result = "unknown"
    assert checker.problems(history, tape, strict=True) == []
    tape.seen = {USED: "echo"}
    assert "lost: tool" in only(history, tape)


def test_a_tool_call_that_is_there_twice_without_an_end_or_elsewhere(history: list[Operation], tape: Tape) -> None:
    history.append(tool(6.0, 6.5))
    tape.answers[USED] = text_of(USED)
    tape.spans += [used(3), used(4)]
    assert "on the tape 2 times" in only(history, tape)
    tape.spans[-2:] = [used(3, status=SpanStatus.OPEN)]
    assert any("has no end" in one for one in checker.problems(history, tape, strict=True))
    tape.spans[-1:] = [used(3, attempt="a2")]
    assert "has another address" in only(history, tape)
    tape.spans[-1:] = [used(3, USED[:-1] + "2"), used(4)]
    assert "was never asked for" in only(history, tape)


@pytest.mark.parametrize("kind", ["echo", "fails", "later"])
def test_the_end_and_the_answer_of_a_tool(kind: str, history: list[Operation], tape: Tape) -> None:
    history.append(tool(6.0, 6.5, kind))
    end = ("error", "tool_error") if kind == "fails" else ("ok", None)
    tape.answers[USED], tape.spans = text_of(USED), [*tape.spans, used(3, status=end[0], error=end[1])]
    assert checker.problems(history, tape, strict=True) == []
    tape.answers[USED] = "else"
    assert "has the answer 'else' of another call" in only(history, tape)
    tape.answers[USED] = history[-1].answer["text"] = "else"
    assert any("it was answered 'else'" in one for one in checker.problems(history, tape, strict=True))
    history[-1].answer["text"] = text_of(USED)
    tape.spans[-1] = used(3, status="error", error="ended_early")
    assert "was answered: tool" in only(history, tape)
    history.append(fault("reload", 6.2, 9.0))
    assert bool(checker.problems(history, tape, strict=True)) == (kind != "later"), "another process saw the answer"


def test_a_rollout_that_was_queued_and_is_lost(history: list[Operation], tape: Tape) -> None:
    history.append(did("enqueue", 9.0, 9.5, rollouts=["q2"], answer={"created": ["q2"]}))
    assert only(history, tape) == "rollout q2 was queued and is not there"


def test_a_rollout_that_is_made_twice(history: list[Operation], tape: Tape) -> None:
    history.append(did("enqueue", 9.0, 9.5, rollouts=["q1"], answer={"created": ["q1"]}))
    assert only(history, tape) == "rollout q1 was made 2 times"


def test_an_attempt_that_two_workers_are_given(history: list[Operation], tape: Tape) -> None:
    history.insert(2, claim(3.0, 3.5, worker="w2"))
    found = checker.problems(history, tape, strict=True)
    assert any("was given twice" in one for one in found)
    assert any("was given to w2; the tape says" in one for one in found)


def test_a_rollout_that_is_given_again_while_its_lease_is_alive(history: list[Operation], tape: Tape) -> None:
    history[4:5] = [claim(7.0, 14.9, "a2", "w2"), finish(15.5, 16.0, "refused"), finish(16.0, 17.0, attempt="a2")]
    tape.attempts = {("q1", "a1"): attempt(1, AttemptStatus.UNRESPONSIVE), ("q1", "a2"): attempt(2, worker="w2")}
    tape.feed[5] = "attempt q1/a2"
    history[-2] = told(5, "attempt q1/a2", "succeeded")
    tape.spans[1].attempt = "a2"
    assert "was given while a1 had its lease until 15.000" in only(history, tape)
    history[4] = claim(7.0, 15.1, "a2", "w2")
    assert checker.problems(history, tape, strict=True) == []
    history[4] = claim(7.0, 14.9, "a2", "w2")
    history.append(did("heartbeat", 14.0, 14.5, "unknown", lease_s=10.0, names=[["q1", "a7"]]))
    assert checker.problems(history, tape, strict=True) == [], "its worker names others only"


def test_an_attempt_that_goes_on_after_another_was_given(history: list[Operation], tape: Tape) -> None:
    history[4:5] = [
        claim(15.1, 15.2, "a2", "w2"),
        held(15.5, 15.6),
        finish(16.0, 17.0, attempt="a2"),
    ]
    tape.attempts = {("q1", "a1"): attempt(1, AttemptStatus.UNRESPONSIVE), ("q1", "a2"): attempt(2, worker="w2")}
    tape.feed[5] = "attempt q1/a2"
    history[-2] = told(5, "attempt q1/a2", "succeeded")
    tape.spans[1].attempt = "a2"
    assert "q1/a1 went on after a2 was given" in only(history, tape)


def test_an_end_that_is_another_one(history: list[Operation], tape: Tape) -> None:
    tape.attempts["q1", "a1"].status, tape.rollouts["q1"] = AttemptStatus.FAILED, "failed"
    history[-2].asked["status"] = history[-1].asked["status"] = "failed"
    assert "ended as succeeded; the tape says" in only(history, tape)


@pytest.mark.parametrize("there", [0, 2])
def test_a_reward_that_is_lost_or_there_twice(history: list[Operation], tape: Tape, there: int) -> None:
    tape.spans[1:] = [reward(2 + number) for number in range(there)]
    assert f"is there {there} times" in only(history, tape)


def test_a_reward_that_was_refused_and_is_there(history: list[Operation], tape: Tape) -> None:
    tape.spans.append(reward(3, "late"))
    history.append(did("reward", 9.0, 10.0, "refused", key="late", **HERE, answer={"status": 503}))
    assert "answered with ['refused'], and is there 1 times" in only(history, tape)
    history[-1].result = "unknown"
    assert checker.problems(history, tape, strict=True) == []


def test_a_gap_in_what_a_follower_is_told(history: list[Operation], tape: Tape) -> None:
    del history[7]
    assert only(history, tape) == "f1 was told of 3 after 1, and not of [2]"


def test_a_follower_that_comes_back_and_misses_something(history: list[Operation], tape: Tape) -> None:
    history[9:10] = [did("follow", 23.5, 23.5, actor="f1", since=3)]
    assert only(history, tape) == "f1 was told of 5 after 3, and not of [4]"


def test_a_cursor_that_goes_back(history: list[Operation], tape: Tape) -> None:
    history.append(did("change", 30.0, 30.0, actor="f1", cursor=6, what="rollout q1", status="succeeded"))
    assert only(history, tape) == "f1 was told of 6 after 6"


def test_another_content_of_a_cursor(history: list[Operation], tape: Tape) -> None:
    tape.feed[4] = "span q1/a1#2"
    found = checker.problems(history, tape, strict=True)
    assert "f1 was told of span q1/a1#1 at 4, where others see span q1/a1#2" in found


def test_a_cursor_that_is_not_known_any_more(history: list[Operation], tape: Tape) -> None:
    history.append(did("follow", 30.0, 30.0, actor="f1", since=9, refused="the feed ends at 6"))
    assert "is not known any more" in only(history, tape)


def test_a_gap_in_the_feed(history: list[Operation], tape: Tape) -> None:
    tape.feed |= {9: "resource travel"}
    assert only(history, tape) == "3 cursors of the feed are not there, and there are 1 calls"


def test_a_move_that_the_tables_do_not_have(history: list[Operation], tape: Tape) -> None:
    history[-2].asked["status"] = "failed"
    assert only(history, tape) == "attempt q1/a1 went from failed to succeeded, as f1 saw it"


def test_two_arms_of_a_rollout(history: list[Operation], tape: Tape) -> None:
    history.append(call(5.0, 6.0, name=OTHER))
    tape.spans[0].arm = "r-1:stable"
    tape.spans.append(span(3, OTHER, arm="r-1:candidate"))
    assert "has the arms ['r-1:candidate', 'r-1:stable'] of travel" in only(history, tape)


def test_two_versions_of_a_rollout(history: list[Operation], tape: Tape) -> None:
    history.append(call(5.0, 6.0, name=OTHER))
    tape.spans[0].versions = {"travel": "v2"}
    tape.spans.append(span(3, OTHER, versions={"travel": "v1"}))
    assert "was served by the versions ['v1', 'v2'] of travel" in only(history, tape)
    tape.pins["q1"] = [Pin(resource="travel", version="v1", release="r-2", mixed=True)]
    tape.stages["r-2"] = "rolled_back"
    assert checker.problems(history, tape, strict=True) == []


def test_arms_and_versions_of_two_resources(history: list[Operation], tape: Tape) -> None:
    history.append(call(5.0, 6.0, name=OTHER))
    tape.released["r-3"], tape.stages["r-3"] = "policy", "rolled_back"
    tape.spans[0].arm, tape.spans[0].versions = "r-1:stable", {"travel": "v1"}
    tape.spans.append(span(3, OTHER, arm="r-1:stable,r-3:candidate", versions={"travel": "v1", "policy": "v2"}))
    tape.served[OTHER] = "policy@v2"
    assert checker.problems(history, tape, strict=True) == []
    tape.spans[0].arm, tape.spans[0].versions = "r-1:stable,r-3:stable", {"travel": "v1", "policy": "v1"}
    tape.pins["q1"] = [Pin(resource="travel", version="v1", release="r-3", mixed=True)]
    arms, versions = checker.problems(history, tape, strict=True)
    assert "has the arms ['r-3:candidate', 'r-3:stable'] of policy" in arms
    assert "was served by the versions ['v1', 'v2'] of policy" in versions


def test_weights_that_were_not_served(history: list[Operation], tape: Tape) -> None:
    tape.spans[0].versions, tape.served[CALL] = {"policy": "v1"}, "policy@v2"
    assert only(history, tape) == "q1#1 names policy@v1, and was served by policy@v2"
    tape.spans[0].versions = {}
    assert only(history, tape) == "q1#1 names None, and was served by policy@v2"


def test_weights_that_were_not_there(history: list[Operation], tape: Tape) -> None:
    refused = did("call", 5.0, 6.0, "refused", call=OTHER, **HERE, model="policy", answer={"status": 404, "error": "x"})
    history.append(refused)
    assert "its weights were not there" in only(history, tape)


def test_a_version_that_was_not_served(history: list[Operation], tape: Tape) -> None:
    tape.spans[0].versions = {"travel": "v2"}
    tape.seen[CALL] = "Rule 1 is the newest."
    assert only(history, tape) == "q1#1 names v2, and was served by v1"


def test_a_decision_that_does_not_stand(history: list[Operation], tape: Tape) -> None:
    history.append(did("decide", 9.0, 10.0, release="r-1", action="rollback"))
    assert "the tape has it as promoted" in only(history, tape)


def test_a_mistake_of_the_gateway(history: list[Operation], tape: Tape) -> None:
    history.append(did("version", 9.0, 10.0, "refused", answer={"status": 500, "error": "a bug"}))
    assert "answered with 500" in only(history, tape)


def test_a_history_is_on_disk_before_the_next_operation(tmp_path: Path) -> None:
    with closing(History(tmp_path / "history")) as history:
        with history.doing("finish", "w1", rollout="q1") as one:
            one.answer["x"] = 1
        with history.doing("finish", "w1", rollout="q2"):
            raise ClientError("gone")
        with history.doing("finish", "w1", rollout="q3"):
            raise ClientError("no", 409)
    with (tmp_path / "history").open("a") as file:
        _ = file.write('{"kind": "cut off')
    found = read(tmp_path / "history")
    assert [(one.asked["rollout"], one.result) for one in found] == [("q1", "ok"), ("q2", "unknown"), ("q3", "refused")]
    assert found[0].begin <= found[0].end <= found[1].begin
