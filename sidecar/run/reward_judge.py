"""Rewards that the runner collects: the one that the agent printed, and the one that a function or a command of the
user returns.

All are part of the request that finishes the attempt, in one transaction with its end: a finished attempt has its
reward. The judge runs before that, when every call of the agent is on the tape, and only for agents that succeeded.
When a judge fails, the attempt still counts and the event `reward_error` says why its reward is missing.

A reward that the agent printed has the source `runner`, because the user's program printed it. With a judge, the
judge's reward counts, and the printed one is kept as the agent's own opinion (source `agent`, not trained on).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import traceback
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from penstock.gateway.client.console import unreadable
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Judgement, Outcome, RewardSource, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Choice, Message, Part, Transcript, TranscriptCall, Turn
from penstock.sidecar.run.agent.environment import to_json
from penstock.sidecar.run.settings import JudgeSettings, UsageError
from penstock.sidecar.run.user_code import UserCode, UserCodeError, accepts_arguments

PARTS = {"reward", "value", "rewards", "dimensions", "reason"}
MOST_REASON = 10_000


class RewardError(UserCodeError):
    """Raised when a judge returned no valid reward."""


class RewardJudge:
    """The function or command that the user has named to judge attempts, if any."""

    def __init__(self, judging: JudgeSettings) -> None:
        """Raises `UsageError` when there is no such function or command, or the function takes other arguments."""
        judge, self._timeout_s = judging.judge, judging.timeout_s
        self._code = None if judge is None else UserCode("--reward", judge)
        self.configured = judge is not None
        self.function = None if self._code is None else self._code.function
        """The judge's function; None for a command, or without a judge."""
        if judge is not None and self.function is not None:
            _check_parameters(judge, self.function)
        self.reads_calls = self.configured and (self.function is None or accepts_arguments(self.function, 3))
        """True if the judge gets the transcript."""

    async def judge(self, task: Any, output: Any, transcript: Transcript | None) -> list[Judgement]:
        """The judge's reward; raises `UserCodeError`, and whatever the function raises. `transcript` may be None when
        the judge does not read calls.
        """
        if self._code is None:
            return []
        try:
            async with asyncio.timeout(self._timeout_s):
                if self.function is not None:
                    value = await self._code.call(task, output, *([transcript] if self.reads_calls else []))
                    return _one(value, "runner", "runner-function")
                assert transcript is not None, "a command reads calls"
                said = {"task": task, "output": output, "transcript": transcript.model_dump(mode="json")}
                value = await self._code.ask(said)
        except TimeoutError:
            raise RewardError(f"it took longer than {self._timeout_s:g} s") from None
        if value is None:
            raise RewardError(f"{self._code.text!r} printed no number and no JSON object")
        return _one(value, "runner", "runner-command")


def parse_printed_reward(output: Any, judged: bool) -> list[Judgement]:
    """The reward in an agent's output, in a list; raises `RewardError` for an invalid one."""
    if not isinstance(output, dict):
        return []
    found = {name: part for name, part in cast(dict[str, Any], output).items() if name in ("reward", "rewards")}
    if not found:
        return []
    if isinstance(reason := cast(dict[str, Any], output).get("reason"), str):
        found["reason"] = reason
    return _one(found, "agent" if judged else "runner", "runner-output")


def _one(value: Any, source: RewardSource, key: str) -> list[Judgement]:
    if isinstance(value, Judgement):
        own = {name: part for name, part in (("source", source), ("key", key)) if name not in value.model_fields_set}
        return [value.model_copy(update=own)]
    parts = _parts(value)
    if parts is None:
        return []
    number, dimensions, reason = parts
    return [Judgement(value=number, dimensions=dimensions, reason=reason, source=source, key=key)]


def _parts(value: Any) -> tuple[float | None, dict[str, float], str | None] | None:
    """(value, dimensions, reason) of a judge's answer; None when it returned nothing."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return _number("the reward", value), {}, None
    given = cast(dict[str, Any], value)
    number = given.get("reward", given.get("value"))
    named: Any = given.get("rewards", given.get("dimensions")) or {}
    if not isinstance(named, dict):
        raise RewardError(f"its rewards are {to_json(named)[:100]}: an object of numbers is wanted")
    loose = {name: part for name, part in given.items() if name not in PARTS}
    dimensions = {name: _number(name, part) for name, part in (cast(dict[str, Any], named) | loose).items()}
    if number is None and not dimensions:
        return None
    reason = given.get("reason")
    return (
        None if number is None else _number("reward", number),
        dimensions,
        str(reason)[:MOST_REASON].encode(errors="replace").decode() if reason else None,
    )


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{name} is {str(value)[:100]!r}: a finite number is wanted")
    return number


# `penstock run --check`: checks that agents and their judge can begin. No agent runs and nothing is claimed.
#
# Certain errors are refused: agents that cannot start, and a judge whose function does not exist, or takes neither two
# nor three arguments. Then the function is tried on a task with a stand-in for an agent's answer. An error that may
# come from the stand-in itself (it lacks a field, a value has another type) proves nothing, and is shown with its line.
# Any other error, a reward that is no number, and a missing reward give a warning: without rewards nothing is learnt.

OF_THE_STAND_IN: Final = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that a correct function may raise because the stand-in differs from its agents' answers."""
ANSWER: Final = "a stand-in for the agent's answer"


class DryRun(NamedTuple):
    """The result of `--check` for the judge."""

    tried: str
    """The trial and its end, for people."""
    doubt: str | None = None
    """A warning for the user; None when there is none."""


def first_task(path: Path) -> tuple[Any, int]:
    """(first task of a JSONL file, number of its tasks). Raises `UsageError`, also where it has none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        return json.loads(lines[0] if lines else ""), len(lines)
    except OSError as error:
        raise UsageError(f"--check: {unreadable(path, error)}") from None
    except ValueError as error:
        raise UsageError(f"--check: {path} has no task that can be read in its first line: {error}") from None


async def dry_run_judge(judging: JudgeSettings, task: Any) -> DryRun:
    """Try the judge on a task. Raises `UsageError` for one that cannot work."""
    judge = RewardJudge(judging)
    if judging.judge is None:
        return DryRun("no --reward was given, and none tried")
    if judge.function is None:
        return DryRun(f"the command {judging.judge!r} of --reward was found, and not run")
    tried = f"{judging.judge} was tried with {ANSWER}"
    try:
        said = await judge.judge(task, {}, stand_in(task))
    except OF_THE_STAND_IN as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        return DryRun(f"{tried} and raised {raised}; try it on an answer that your agent has given")
    except UserCodeError as error:
        what = str(error)
    # The function is the user's and may raise anything.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    else:
        if said:
            return DryRun(f"{tried} and gave a reward")
        what = "it returned nothing"
    return DryRun(
        tried,
        f"--reward: {judging.judge} gave no reward when it was tried on a task with {ANSWER}: {what}; if it does so "
        "with real answers, too, no rollout has a reward: mend it, or name another function",
    )


def _check_parameters(name: str, function: Any) -> None:
    if accepts_arguments(function, 2) or accepts_arguments(function, 3):
        return
    known = inspect.signature(function).parameters.values()
    if needed := [one.name for one in known if one.kind is one.KEYWORD_ONLY and one.default is one.empty]:
        module, _, own = name.rpartition(":")
        options = ", ".join(f"{option}=..." for option in needed)
        raise UsageError(
            f"--reward: {name} needs {' and '.join(needed)}: write `from functools import partial`, `from {module} "
            f"import {own}` and `grade = partial({own}, {options})` into grade.py, and name --reward grade:grade"
        )
    raise UsageError(
        f"--reward: {name}({', '.join(one.name for one in known)}) is called with two arguments, task and output, or "
        "with the transcript as a third; it can take neither two nor three"
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
