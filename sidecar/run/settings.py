"""The settings of a runner: which gateway, which agents, how many at a time, and what happens to their output.

Plain values only: the same settings go to a runner on another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from penstock.gateway.model import times
from penstock.gateway.model.base import Mode
from penstock.sidecar.intercept.rules import InterceptPolicy


class RunnerError(Exception):
    """Raised when the runner cannot go on; ends `penstock run` with one line on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(RunnerError):
    """Raised when the runner was called wrongly (exit code 2)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agents to run: the command or function of each attempt, and its surroundings."""

    command: tuple[str, ...] = ()
    """The command; with an image, the arguments of its entry point."""
    callable: str | None = None
    """module:function, instead of a command."""
    preload: bool = False
    """Import the function's module once for all attempts."""
    concurrency: int = 1
    """Attempts of the function in one process at a time; with 1 each has a process of its own."""
    image: str | None = None
    """Container image that the command is run in."""
    image_args: tuple[str, ...] = ()
    """More options for `docker run`."""
    args: tuple[str, ...] = ()
    """Templates that are filled in from the task and put after the command."""
    stdin: bool = True
    """Give the task on stdin."""
    env: tuple[tuple[str, str], ...] = ()
    """More variables; their values are templates too."""
    timeout_s: float | None = None
    """Longest run of an agent; s. A rollout's own `timeout_s` counts too."""
    grace_s: float = 5.0
    """Time between TERM and KILL; s."""
    policy: InterceptPolicy | None = None
    """With a policy, each agent gets its own front and no base URLs; None: base URLs and no front."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The judge that gives rewards besides the agent itself."""

    judge: str | None = None
    """module:function, called in the runner, or a shell command; None is no judge."""
    timeout_s: float = 300.0
    """Longest time that one reward may take; s."""


HookEvent = Literal[
    "on_rollout_start", "on_attempt_start", "on_reward", "on_attempt_end", "on_rollout_end", "on_heartbeat"
]
"""The moments at which a hook may be called."""


@dataclass(frozen=True, slots=True)
class HookSettings:
    """The hooks of a runner: code of the user that is called around attempts and changes nothing of them."""

    hooks: tuple[tuple[HookEvent, str], ...] = ()
    """(event, module:function or a shell command); those of one event are called in this order."""
    timeout_s: float = 30.0
    """Longest time that one hook may take; s."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """All settings of a runner."""

    gateway: str
    """URL of the gateway."""
    name: str
    """The worker's name."""
    key: str | None = field(default=None, repr=False)
    """Admin key of the gateway."""
    agents: AgentSettings = AgentSettings()
    """The agents to run."""
    judging: JudgeSettings = JudgeSettings()
    """The judge of the attempts."""
    hooks: HookSettings = HookSettings()
    """The hooks around the attempts."""
    workers: int = 1
    """Number of agents at a time."""
    most: int | None = None
    """Number of attempts after which the runner leaves; None is no limit."""
    watch: bool = False
    """Wait for more work when the queue is empty."""
    modes: tuple[Mode, ...] | None = None
    """Modes of the rollouts to take from the queue; None is all."""
    release: str | None = None
    """The release whose rehearsal provides the attempts; None is the queue."""
    lease_s: float = 30.0
    """The time after the last heartbeat for which an attempt stays this runner's; s."""
    keep_output: int = 1 << 20
    """Bytes of output to keep of each attempt."""
    echo: bool = False
    """Show what agents print."""
    keep_going: bool = False
    """Take more work even if agents fail alike and at once."""


def seconds(option: str, text: str) -> float:
    """The seconds of a time such as `90s`, `10m` or `1.5h`; raises `UsageError`."""
    try:
        return times.seconds(option, text)
    except ValueError as e:
        raise UsageError(str(e)) from None


def variable(text: str) -> tuple[str, str]:
    """The (name, value) of an `--env` option; raises `UsageError`."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not equals:
        raise UsageError(f"--env: {text!r} is not NAME=VALUE")
    return name, value


def hook(text: str) -> tuple[HookEvent, str]:
    """The (event, function or command) of a `--hook` option; raises `UsageError`."""
    event, equals, code = text.partition("=")
    if event not in get_args(HookEvent):
        raise UsageError(f"--hook: {event!r} is no event: use {', '.join(get_args(HookEvent))}")
    if not equals or not code.strip():
        raise UsageError(f"--hook: {text!r} is not EVENT=module:function or EVENT=COMMAND")
    return cast(HookEvent, event), code
