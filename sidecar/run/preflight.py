"""Checks agents before the first attempt is claimed, because a wrong command would use up the queue.

Only certain errors are refused. A function's module is imported once, in its own process and with variables like those
of an attempt. The error is certain when the module cannot be found, imports something that is missing, or has no such
function. Any other error there may not happen in an attempt, and is ignored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.gateway.client.child_process import ChildProcess
from penstock.gateway.model.queue import Claim
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Outcome, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Choice, Message, Part, Transcript, TranscriptCall, Turn
from penstock.sidecar.run.agent.environment import UNREACHABLE_URLS, environment, launch_plan
from penstock.sidecar.run.reward_judge import RewardError, RewardJudge, accepts_arguments
from penstock.sidecar.run.settings import AgentSettings, JudgeSettings, RunnerSettings, UsageError

ANSWER_S = 30.0
"""The longest time that a container engine may take to answer; s."""
IMPORT_S = 120.0
"""The longest time that an import is waited for; s. A slower one is taken as good."""
PLACEHOLDER_CLAIM = Claim(
    rollout=Rollout(id="preflight"), attempt=Attempt(rollout="preflight", id="a1"), address="/preflight", token="none"
)
"""The claim that stands for an attempt before there is one."""


async def check(settings: RunnerSettings, tool: str | None) -> None:
    """Raise `UsageError` for agents that cannot work on this machine. `tool`: the command that runs containers, when
    the agents have an image.
    """
    agents = settings.agents
    if tool is not None:
        await _image(tool, agents)
    elif agents.callable is not None:
        await _function(agents.callable, settings)
    elif agents.command:
        _command(agents.command[0])


def without_templates(agents: AgentSettings) -> AgentSettings:
    """The agents without the arguments made of a task; their variables keep templates as literal text."""
    env = tuple((name, value.replace("{", "{{").replace("}", "}}")) for name, value in agents.env)
    return replace(agents, args=(), env=env)


def _command(command: str) -> None:
    path = Path(command) if "/" in command else None
    if shutil.which(command if path is None else str(path)) is not None:
        return
    if path is not None and path.is_file():
        raise UsageError(f"{command!r} cannot be executed: chmod +x {path}, or name its interpreter before it")
    where = f"in {Path.cwd()}" if path is not None else "on the PATH"
    raise UsageError(
        f"there is no command {command!r} {where}: after -- comes what is to be run, with its path if need be"
    )


# -- functions ---------------------------------------------------------------------------------------------------------


async def _function(name: str, settings: RunnerSettings) -> None:
    made = launch_plan(PLACEHOLDER_CLAIM, settings.gateway, without_templates(settings.agents), Path("input.json"))
    env = environment(os.environ, made.own, settings.key) | UNREACHABLE_URLS
    argv = (sys.executable, "-m", "penstock.sidecar.run.agent.callables", "--check", name)
    code, said = await _ask(argv, IMPORT_S, env)
    if code == 1:
        raise UsageError(f"--callable: {said or 'it cannot be imported'}")


# -- containers --------------------------------------------------------------------------------------------------------


async def _image(tool: str, agents: AgentSettings) -> None:
    """Check that the container engine answers and has the image or can pull it. Otherwise all attempts would try at
    once.
    """
    image = agents.image or ""
    code, said = await _ask((tool, "version"), ANSWER_S)
    if code != 0:
        reason = said or ("it did not answer" if code is None else f"exit code {code}")
        raise UsageError(
            f"--image {image}: {Path(tool).name} cannot run containers: start it, or let this user reach it. "
            f"It says: {reason}"
        )
    code, _ = await _ask((tool, "image", "inspect", image), ANSWER_S)
    if code == 0:
        return
    if "--pull=never" in agents.image_args:
        raise UsageError(f"--image {image}: it is not on this machine, and --pull=never forbids to get it")
    print(f"pulling {image}", file=sys.stderr, flush=True)
    platform = [word for word in agents.image_args if word.startswith("--platform=")]
    code, said = await _ask((tool, "pull", *platform, image), None)
    if code != 0:
        raise UsageError(
            f"--image {image}: it is not on this machine and cannot be pulled: {said or f'exit code {code}'}"
        )


async def _ask(
    argv: tuple[str, ...], limit_s: float | None, env: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """(exit code, last line of stderr); the code is None when the command took too long."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        _, said = await ChildProcess(process).output(limit_s)
    except TimeoutError:
        return None, ""
    lines = said.decode(errors="replace").strip().splitlines()
    return process.returncode, lines[-1].strip() if lines else ""


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
