"""Asks the grader once more about a rollout on the tape: a difference is the grader's own noise.

The grader is the one that `rollouts.run` names for the runner, `--reward` or `--reward-command`, and the runner's own
code asks it. The second judgement is kept in memory: a second reward on the tape would replace the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.gateway.model.times import seconds
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.model.transcript import Transcript
from penstock.sidecar.reward_judge import RewardJudge
from penstock.sidecar.settings import JudgeSettings, UsageError

OPTIONS: Final = ("--reward", "--reward-command", "--reward-timeout")
PATIENCE: Final = "5m"
"""Default of `penstock run`."""


class Regrader:
    def __init__(self, judge: RewardJudge) -> None:
        self._judge = judge

    async def judge(self, transcript: Transcript) -> tuple[float | None, str]:
        """Return (reward, ""), or (None, why there is none)."""
        output = None if transcript.attempt.outcome is None else transcript.attempt.outcome.output
        try:
            said = await self._judge.judge(transcript.rollout.input, output, transcript)
        # A grader is the user's program: any error is reported, and the advice goes on without it.
        except Exception as error:
            return None, f"the grader, asked again: {type(error).__name__}: {error}"
        value = next((one.value for one in said if one.value is not None), None)
        return value, "" if value is not None else "the grader, asked again, gives no reward"


def regrader(words: Sequence[str]) -> Regrader | None:
    """Return the grader that arguments of `penstock run` name; None if they name none. Raises `ConfigError`."""
    given = {name: _value(words, name) for name in OPTIONS}
    if not (given["--reward"] or given["--reward-command"]):
        return None
    try:
        patience = seconds("--reward-timeout", given["--reward-timeout"] or PATIENCE)
        return Regrader(RewardJudge(JudgeSettings(given["--reward"], given["--reward-command"], patience)))
    except (UsageError, ValueError) as error:
        raise ConfigError(f"rollouts.run: {error}") from None


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option, as --option VALUE or --option=VALUE; None if it is not given."""
    for at, word in enumerate(words):
        if word == "--":
            return None
        if word == option and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
