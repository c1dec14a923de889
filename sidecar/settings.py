"""The settings of a runner: which gateway, which agents, how many at a time, and what happens to their output.

Plain values only: the same settings go to a runner on another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.gateway.model import times
from penstock.gateway.model.base import Mode
from penstock.sidecar.intercept.policy import Policy

SIZES = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class RunnerError(Exception):
    """The runner cannot go on; ends `penstock run` with one line on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(RunnerError):
    """The runner was called wrongly."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


@dataclass(frozen=True, slots=True)
class Agents:
    """What is run for each attempt."""

    command: tuple[str, ...] = ()
    """The command; with an image, what its entry point is given."""
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
    cwd: Path | None = None
    """Directory that agents start in; None is the runner's own."""
    timeout_s: float | None = None
    """Longest run of an agent; s. A rollout's own `timeout_s` counts too."""
    grace_s: float = 5.0
    """Between TERM and KILL; s."""
    policy: Policy | None = None
    """Each agent has a front of its own, and no base URLs; None: they have base URLs and no front."""


@dataclass(frozen=True, slots=True)
class Judging:
    """Where rewards come from, besides the agent itself."""

    function: str | None = None
    """module:function, called in the runner."""
    command: str | None = None
    """A shell command."""
    timeout_s: float = 300.0
    """Longest time that one reward may take; s."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a runner is told."""

    gateway: str
    """URL of the gateway."""
    name: str
    """The worker's name."""
    key: str | None = field(default=None, repr=False)
    """Admin key of the gateway."""
    agents: Agents = Agents()
    """What is run."""
    judging: Judging = Judging()
    """How it is judged."""
    workers: int = 1
    """Agents at a time."""
    most: int | None = None
    """Attempts after which the runner leaves."""
    watch: bool = False
    """Wait for more work when the queue is empty."""
    modes: tuple[Mode, ...] | None = None
    """What is taken from the queue; None is everything."""
    release: str | None = None
    """The release whose rehearsal is run; None is the queue."""
    lease_s: float = 30.0
    """How long an attempt stays the runner's when nothing is heard of it; s."""
    keep_output: int = 1 << 20
    """Bytes of output kept of each attempt."""
    echo: bool = False
    """Show what agents print."""
    reward_on_failure: float | None = None
    """Reward of an attempt with which its rollout fails; None is none."""
    keep_going: bool = False
    """Take more work however agents fail."""


def seconds(option: str, text: str) -> float:
    """A time such as `90s`, `10m` or `1.5h`."""
    try:
        return times.seconds(option, text)
    except ValueError as e:
        raise UsageError(str(e)) from None


def size(option: str, text: str) -> int:
    """A size such as `64KiB`, `1MiB` or `0`; bytes."""
    match = re.fullmatch(r"([0-9]{1,12})\s*(|kib|mib|gib)", text.lower())
    if match is None:
        raise UsageError(f"{option}: {text!r} is not a size: a whole number and KiB, MiB or GiB, such as 1MiB")
    return int(match[1]) * SIZES[match[2]]


def variable(text: str) -> tuple[str, str]:
    """A variable as `--env` is given it."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not equals:
        raise UsageError(f"--env: {text!r} is not NAME=VALUE")
    return name, value
