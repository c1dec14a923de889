"""The check of a judge."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

from penstock.gateway.model.rollout import Attempt, AttemptStatus, Outcome, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Choice, Message, Part, Transcript, TranscriptCall, Turn
from penstock.sidecar.run.reward_judge import RewardError, RewardJudge, accepts_arguments
from penstock.sidecar.run.settings import JudgeSettings, UsageError

# `penstock run --check`: checks that agents and their judge can begin. No agent runs and nothing is claimed.
#
# Certain errors are refused: agents that cannot start, and a judge whose function does not exist, or takes neither two
# nor three arguments. Then the function is tried on a task with a stand-in for an agent's answer. An error that may
# come from the stand-in itself (it lacks a field, a value has another type) proves nothing. Any other error, a reward
# that is no number, and a missing reward give a warning: without rewards nothing is learnt.

OF_THE_STAND_IN: Final = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that a correct function may raise because the stand-in differs from its agents' answers."""
ANSWER: Final = "a stand-in for the agent's answer"


def first_task(path: Path) -> Any:
    """The first task of a JSONL file; None where it has none. Raises `UsageError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n", 1)
        return json.loads(lines[0]) if lines[0].strip() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"--check: {path} has no task that can be read in its first line: {error}") from None


async def dry_run_judge(judging: JudgeSettings, task: Any) -> str | None:
    """A warning for the user, None when there is none. Raises `UsageError` for a judge that cannot work."""
    judge = RewardJudge(judging)
    if judging.judge is None or judge.function is None:
        return None
    _check_parameters(judging.judge, judge.function)
    try:
        said = await judge.judge(task, {}, stand_in(task))
    except OF_THE_STAND_IN:
        return None
    except RewardError as error:
        what = str(error)
    # The function is the user's and may raise anything.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    else:
        if said:
            return None
        what = "it returned nothing"
    return (
        f"--reward: {judging.judge} gave no reward when it was tried on a task with {ANSWER}: {what}; if it does so "
        "with real answers, too, no rollout has a reward: mend it, or name another function"
    )


def _check_parameters(name: str, function: Any) -> None:
    if not (accepts_arguments(function, 2) or accepts_arguments(function, 3)):
        raise UsageError(
            f"--reward: {name}({', '.join(inspect.signature(function).parameters)}) is called with two arguments, task "
            "and output, or with the transcript as a third; it can take neither two nor three"
        )


def stand_in(task: Any) -> Transcript:
    """The transcript of an agent that has made one call."""
    rollout = Rollout(id="check", input=task)
    attempt = Attempt(rollout="check", id="a1", status=AttemptStatus.SUCCEEDED)
    asked = Message(role="user", parts=[Part(type="text", text=json.dumps(task))])
    answer = Choice(index=0, message=Message(role="assistant", parts=[Part(type="text", text=ANSWER)]))
    turn = Turn(dialect="chat", messages=[asked], choices=[answer])
    call = TranscriptCall(span=Span(rollout="check", attempt="a1", sequence=1), turn=turn)
    return Transcript(rollout=rollout, attempt=attempt, outcome=Outcome(exit_code=0, output={}), calls=[call])
