"""The options of `penstock run` and of `penstock release rehearse`, and the settings of a runner that they make."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from cyclopts import Parameter

from penstock.gateway.client.console import control_key

if TYPE_CHECKING:
    from penstock.gateway.model.base import Mode
    from penstock.sidecar.intercept.rules import InterceptPolicy
    from penstock.sidecar.run.settings import RunnerSettings

Words = Annotated[list[str] | None, Parameter(allow_leading_hyphen=True, negative="")]
Command = Annotated[str, Parameter(allow_leading_hyphen=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `penstock run`: the agents and their number, their judge, what is kept of them, and where they run."""

    workers: int = 1
    """Agents at a time; with --concurrency, processes that each run so many."""
    name: str | None = None
    """Name of this worker; made of the host's name if not given."""
    arg: Words = None
    """An argument made of the task and put after the command, such as '{question}'; may be repeated."""
    stdin: bool = True
    """Give agents the task on stdin."""
    timeout: str | None = None
    """Longest run of an attempt, such as 90s, 10m or 1.5h; a rollout's own `--timeout` counts too."""
    max: int | None = None
    """Leave after so many attempts."""
    watch: Annotated[bool, Parameter(negative="--until-empty")] = False
    """Wait for more work; without it, leave when the queue is empty and nobody works on anything."""
    mode: str | None = None
    """Take only rollouts of these modes, such as train,val."""
    callable: str | None = None
    """Run module:function, a Python function that gets the task, instead of a command."""
    preload: Annotated[bool, Parameter(negative="")] = False
    """Import the function's module once, and fork it for each attempt."""
    concurrency: int = 1
    """Run so many attempts of the --callable in one process: tasks of an event loop, or threads."""
    image: str | None = None
    """Run the command in a container of this image (docker or podman; the pods' image with --on kubernetes)."""
    image_arg: Words = None
    """One more option of `docker run`; may be repeated."""
    reward: str | None = None
    """module:function that gets task, output and, if it takes a third argument, transcript, and returns the reward; or
    a shell command that gets the same as JSON on stdin and prints the reward as its last line."""
    keep_going: Annotated[bool, Parameter(negative="")] = False
    """Take more work however many agents fail at once and in the same way."""
    env: Words = None
    """NAME=VALUE, one more variable of agents; its value may use what --arg may; may be repeated."""
    echo: Annotated[bool, Parameter(negative="")] = False
    """Show what agents print."""
    lease: str = "30s"
    """How long an attempt stays this runner's when nothing is heard of it; a third of it is the heartbeat."""
    sidecar: Annotated[bool, Parameter(negative="")] = False
    """Leave base URLs alone: a front of its own takes each agent's calls to the gateway, as `penstock sidecar` does."""
    intercept: Words = None
    """With --sidecar: a model host besides the known ones, as HOST or HOST:PORT; may be repeated."""
    on_unknown: Literal["tunnel", "deny"] = "tunnel"
    """With --sidecar: what becomes of connections to all other hosts."""
    on: Literal["here", "ray", "kubernetes"] = "here"
    """Where agents run: here, on a Ray cluster (extra `ray`), or as Kubernetes Jobs (extra `kubernetes`)."""
    check: Path | None = None
    """Run nothing: check agents and try the reward function, on the first task of this JSONL file."""
    ray_options: str | None = None
    """JSON with more options of each worker's Ray actor, such as {"num_gpus": 1}."""
    job_template: Path | None = None
    """Kubernetes Job, as YAML or JSON, that attempts are put into."""

    def settings(self, gateway: str, command: tuple[str, ...]) -> RunnerSettings:
        """The settings of a runner with these options. Raises `UsageError`."""
        from penstock.sidecar.run.settings import (
            AgentSettings,
            JudgeSettings,
            RunnerSettings,
            UsageError,
            seconds,
            variable,
        )

        if gateway.startswith("unix:"):
            raise UsageError(f"agents reach no gateway at {gateway!r}: give its http:// or https:// URL")
        lease_s = seconds("--lease", self.lease)
        agents = AgentSettings(
            command=command,
            callable=self.callable,
            preload=self.preload,
            concurrency=self.concurrency,
            image=self.image,
            image_args=tuple(self.image_arg or ()),
            args=tuple(self.arg or ()),
            stdin=self.stdin,
            env=tuple(map(variable, self.env or ())),
            timeout_s=None if self.timeout is None else seconds("--timeout", self.timeout),
            # When the runner is killed, its agents have this long to end, and the lease may be a third gone.
            grace_s=min(5.0, lease_s / 2),
            policy=self._policy(),
        )
        return RunnerSettings(
            gateway=gateway.rstrip("/"),
            name=_worker_name(self.name),
            key=control_key(),
            agents=agents,
            judging=JudgeSettings(self.reward),
            workers=self.workers * self.concurrency,
            most=self.max,
            watch=self.watch,
            modes=_modes(self.mode),
            lease_s=lease_s,
            echo=self.echo,
            keep_going=self.keep_going,
        )

    def _policy(self) -> InterceptPolicy | None:
        from penstock.sidecar.intercept import egress
        from penstock.sidecar.intercept.rules import InterceptPolicy, intercepted_hosts
        from penstock.sidecar.run.settings import UsageError

        if not self.sidecar:
            if self.intercept or self.on_unknown == "deny":
                raise UsageError("--intercept and --on-unknown are for --sidecar: add it, or leave them out")
            return None
        try:
            egress.check_environment()
            return InterceptPolicy(intercepted_hosts(self.intercept or ()), self.on_unknown)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """Options of the agents that `penstock release rehearse` runs."""

    workers: int = 1
    """Agents at a time."""
    arg: Words = None
    """An argument made of the task and put after the command, such as '{question}'; may be repeated."""
    stdin: bool = True
    """Give agents the task on stdin."""
    timeout: str | None = None
    """Longest run of an agent, such as 90s, 10m or 1.5h."""
    env: Words = None
    """NAME=VALUE, one more variable of agents; may be repeated."""
    echo: Annotated[bool, Parameter(negative="")] = False
    """Show what agents print."""
    lease: str = "30s"
    """How long a run stays this command's when nothing is heard of it."""

    def settings(self, gateway: str, command: tuple[str, ...], release: str) -> RunnerSettings:
        """The settings of a runner with these options. Raises `UsageError`."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        # The release itself counts failed runs, and decides when to end.
        made = RunOptions(**given, watch=True, keep_going=True).settings(gateway, command)
        return replace(made, release=release)


def _worker_name(given: str | None) -> str:
    """The worker's name. It must be an id, also with a number behind it, which Ray's actors add."""
    from penstock.gateway.model.base import ID_PATTERN
    from penstock.sidecar.run.settings import UsageError

    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    name = given or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    if not re.fullmatch(ID_PATTERN, f"{name}-1234"):
        raise UsageError(f"--name: {name[:140]!r} is not valid: use up to 123 of A-Z a-z 0-9 . _ -")
    return name


def _modes(text: str | None) -> tuple[Mode, ...] | None:
    from penstock.gateway.model.base import Mode
    from penstock.sidecar.run.settings import UsageError

    if text is None:
        return None
    found = [mode.strip() for mode in text.split(",")]
    for mode in found:
        if mode not in get_args(Mode):
            raise UsageError(f"--mode: {mode!r} is not a mode: use {', '.join(get_args(Mode))}, with commas between")
    return tuple(cast("list[Mode]", found))
