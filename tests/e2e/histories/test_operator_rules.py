"""The checker finds what is planted about rollouts that somebody cancels and queues again."""

from __future__ import annotations

import pytest
from e2e.histories.history import Operation, Result
from e2e.histories.planted import attempt, call, claim, did, entry, finish, held, only, problems, reward, span, told
from e2e.histories.tape import Tape

from penstock.gateway.model.rollout import AttemptStatus

CANCELLED = AttemptStatus.CANCELLED


def asked(action: str, begin: float, end: float, result: Result = "ok") -> Operation:
    """By an operator; `action` is the reason, too."""
    return did(action, begin, end, result, "operator", rollout="q1", why=action)


@pytest.fixture
def again(history: list[Operation], tape: Tape) -> tuple[list[Operation], Tape]:
    """The rollout was cancelled while its first attempt ran, queued again, and its second attempt succeeded."""
    history[4:5] = [
        asked("cancel", 7.0, 8.0), finish(8.5, 9.0, "refused", status="failed"), asked("requeue", 9.0, 10.0),
        claim(11.0, 12.0, "a2", "w2"), held(12.5, 13.0, "a2"), finish(13.0, 14.0, attempt="a2"),
        did("follow", 19.0, 19.0, actor="f2", since=5),
        told(6, "rollout q1", "cancelled", "f2"), told(7, "rollout q1", "requeuing", "f2"),
        told(8, "rollout q1", "succeeded", "f2"),
    ]  # fmt: skip
    tape.attempts = {("q1", "a1"): attempt(1, CANCELLED), ("q1", "a2"): attempt(2, worker="w2")}
    history[-2] = told(5, "attempt q1/a1", "cancelled")
    tape.feed |= {7: "rollout q1", 8: "rollout q1"}
    tape.audit = [entry(1, "cancel", "cancel"), entry(2, "requeue", "requeue")]
    tape.spans[1].attempt = "a2"
    return history, tape


def test_a_rollout_that_is_cancelled_and_queued_again_is_no_problem(again: tuple[list[Operation], Tape]) -> None:
    assert problems(*again) == []


def test_what_was_answered_and_not_done(history: list[Operation], tape: Tape) -> None:
    history.append(asked("requeue", 9.0, 10.0))
    found = problems(history, tape)
    assert any("answered and not done" in one for one in found)
    assert any("and nobody was given it" in one for one in found)
    history[-1].result = "unknown"
    assert problems(history, tape) == []


def test_what_was_refused_and_is_done(again: tuple[list[Operation], Tape]) -> None:
    again[0][4].result = "refused"
    assert "done 1 times: cancel" in only(*again)


def test_what_is_done_twice(again: tuple[list[Operation], Tape]) -> None:
    again[1].audit.append(entry(3, "requeue", "requeue"))
    assert "done 2 times: requeue" in "\n".join(problems(*again))


def test_what_nobody_asked_for(again: tuple[list[Operation], Tape]) -> None:
    again[1].audit.append(entry(3, "requeue", "else"))
    assert only(*again) == "requeue_rollout of q1 (else) was never asked for"


def test_a_gap_in_the_audit_log(again: tuple[list[Operation], Tape]) -> None:
    again[1].audit[1] = entry(3, "requeue", "requeue")
    assert only(*again) == "the audit log counts [1, 3]"


def test_a_rollout_that_was_queued_again_and_is_lost(again: tuple[list[Operation], Tape]) -> None:
    history, tape = again
    del history[7:10], tape.attempts["q1", "a2"]
    tape.rollouts["q1"] = "failed"
    found = problems(history, tape)
    assert any("the rollout is failed, and nobody was given it" in one for one in found)


def test_an_attempt_more_than_was_asked_for(again: tuple[list[Operation], Tape]) -> None:
    history, tape = again
    history[9:10] = [finish(13.0, 14.0, attempt="a2"), claim(15.0, 16.0, "a3", "w3"), held(16.0, 16.5, "a3")]
    tape.attempts["q1", "a3"] = attempt(3, worker="w3")
    (found,) = problems(history, tape)
    assert "q1 was queued again 1 times, its attempts are ['cancelled', 'succeeded', 'succeeded']" in found


def test_an_attempt_that_was_superseded_and_changes_something(again: tuple[list[Operation], Tape]) -> None:
    history, tape = again
    tape.rollouts["q1"] = "failed"
    history[-1].asked["status"] = history[12].asked["status"] = history[13].asked["status"] = "failed"
    history[13].asked["status"] = "failed"
    assert "q1 is failed, its last attempt is succeeded, and it was told to requeue" in problems(history, tape)


def test_two_attempts_that_run(again: tuple[list[Operation], Tape]) -> None:
    again[1].attempts["q1", "a1"].status = AttemptStatus.RUNNING
    assert "q1/a1 is running, and a2 was given" in problems(*again)


def test_a_rollout_that_is_given_although_it_was_cancelled(again: tuple[list[Operation], Tape]) -> None:
    history, tape = again
    history[6] = asked("requeue", 15.0, 16.0)
    found = "\n".join(problems(history, tape))
    assert "and after that: claim" in found
    assert "and after that: finish" in found


def test_an_attempt_that_goes_on_although_it_was_cancelled(again: tuple[list[Operation], Tape]) -> None:
    history, tape = again
    history.insert(5, held(8.2, 8.4))
    found = "\n".join(problems(history, tape))
    assert "and after that: heartbeat" in found
    assert "q1/a1 was cancelled, and went on" in found


def test_a_cancelled_rollout_that_stands_otherwise(history: list[Operation], tape: Tape) -> None:
    history.append(asked("cancel", 9.0, 10.0))
    tape.audit = [entry(1, "cancel", "cancel")]
    assert "q1 is succeeded, its last attempt is succeeded, and it was told to cancel" in problems(history, tape)


def test_an_end_that_is_told_again_after_the_rollout_was_queued_again(history: list[Operation], tape: Tape) -> None:
    """The same end may be told for ever."""
    again = [finish(7.0, 7.5, "unknown"), asked("requeue", 8.0, 9.0), claim(9.0, 10.0, "a2", "w2"), finish(11.0, 12.0)]
    history[4:5] = [*again, finish(13.0, 14.0, attempt="a2")]
    history[-1:] = [told(6, "rollout q1", "requeuing"), told(7, "rollout q1", "succeeded")]
    tape.feed[7] = "rollout q1"
    tape.attempts["q1", "a2"] = attempt(2, worker="w2")
    tape.spans += [reward(3)]
    tape.spans[-1].attempt = "a2"
    tape.audit = [entry(1, "requeue", "requeue")]
    assert problems(history, tape) == []
    del history[4]
    assert "q1/a1 went on after a2 was given" in "\n".join(problems(history, tape))


def test_calls_go_on_after_a_cancel(again: tuple[list[Operation], Tape]) -> None:
    """They are recorded, whatever was told to the rollout."""
    history, tape = again
    history.append(call(8.2, 8.4, name="00000000000000c3"))
    tape.spans.append(span(3, "00000000000000c3"))
    assert problems(history, tape) == []
