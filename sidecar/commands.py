"""The command `penstock run`. Everything heavy is imported when it runs.

Exit codes: 0 done, also when some agents failed, which is what a queue is for; 1 when the gateway cannot be reached or
refuses the runner, and when there were attempts and none of them succeeded; 2 wrongly called, or agents cannot work
here; 3 stopped because agents failed in the same way, at once and one after another; 130 killed by a second signal.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url, admin_key

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from penstock.gateway.model.base import Mode
    from penstock.sidecar.engines.local import Engine
    from penstock.sidecar.progress import Tally
    from penstock.sidecar.settings import Settings

Words = Annotated[list[str] | None, Parameter(allow_leading_hyphen=True, negative="")]
Command = Annotated[str, Parameter(allow_leading_hyphen=True)]


def run(
    *command: Command,
    gateway: Url = LOCAL,
    workers: int = 1,
    name: str | None = None,
    arg: Words = None,
    stdin: bool = True,
    timeout: str | None = None,
    max: int | None = None,
    watch: Annotated[bool, Parameter(negative="--until-empty")] = False,
    mode: str | None = None,
    callable: str | None = None,
    preload: Annotated[bool, Parameter(negative="")] = False,
    image: str | None = None,
    image_arg: Words = None,
    reward: str | None = None,
    reward_command: str | None = None,
    reward_timeout: str = "5m",
    reward_on_failure: Annotated[float | None, Parameter(allow_leading_hyphen=True)] = None,
    keep_going: Annotated[bool, Parameter(negative="")] = False,
    env: Words = None,
    cwd: Path | None = None,
    keep_output: str = "1MiB",
    echo: Annotated[bool, Parameter(negative="")] = False,
    lease: str = "30s",
    grace: str | None = None,
    on: Literal["here", "ray", "kubernetes"] = "here",
    ray_address: str | None = None,
    ray_options: str | None = None,
    job_template: Path | None = None,
    namespace: str | None = None,
) -> None:
    """Take rollouts from the queue and run an unmodified agent on each.

    The agent finds its task on stdin as JSON, in PENSTOCK_INPUT, and in the arguments that --arg makes of it. The
    variables that clients read for their base URL and API key lead it to its rollout's own address. The first SIGINT
    or SIGTERM lets the agents finish, the second kills them and gives their attempts back.

    Parameters
    ----------
    command
        The agent and its arguments, after `--`.
    workers
        Agents at a time.
    name
        Name of this worker; made of the host's name if not given.
    arg
        An argument made of the task and put after the command, such as '{question}'; may be repeated.
    stdin
        Give agents the task on stdin.
    timeout
        Longest run of an attempt, such as 90s, 10m or 1.5h; a rollout's own `--timeout` counts too.
    max
        Leave after so many attempts.
    watch
        Wait for more work; without it, leave when the queue is empty and nobody works on anything.
    mode
        Take only rollouts of these modes, such as train,val.
    callable
        Run module:function, a Python function that gets the task, instead of a command.
    preload
        Import the function's module once, and fork it for each attempt.
    image
        Run the command in a container of this image (docker or podman; the pods' image with --on kubernetes).
    image_arg
        One more option of `docker run`; may be repeated.
    reward
        module:function that gets task, output and transcript and returns the reward.
    reward_command
        Shell command that gets the same as JSON on stdin and prints the reward as its last line.
    reward_timeout
        Longest time that one reward may take, such as 90s, 10m or 1.5h.
    reward_on_failure
        Reward of an attempt with which its rollout fails, such as 0; a rollout's own configuration is first.
    keep_going
        Take more work however many agents fail at once and in the same way.
    env
        NAME=VALUE, one more variable of agents; its value may use what --arg may; may be repeated.
    cwd
        Directory that agents start in.
    keep_output
        How much of an attempt's output is kept as events.
    echo
        Show what agents print.
    lease
        How long an attempt stays this runner's when nothing is heard of it; a third of it is the heartbeat.
    grace
        Time between TERM and KILL, at most half of the lease; 5s, or half of a shorter lease, if not given.
    on
        Where agents run: here, on a Ray cluster (extra `ray`), or as Kubernetes Jobs (extra `kubernetes`).
    ray_address
        Address of the Ray cluster; the one that Ray finds if not given.
    ray_options
        JSON with more options of each worker's Ray actor, such as {"num_gpus": 1}.
    job_template
        Kubernetes Job, as YAML or JSON, that attempts are put into.
    namespace
        Namespace of the Jobs; the configured one if not given.
    """
    from penstock.gateway.client.client import ClientError
    from penstock.sidecar.settings import Agents, Judging, RunnerError, Settings, seconds, size, variable

    try:
        lease_s = seconds("--lease", lease)
        agents = Agents(
            command=command,
            callable=callable,
            preload=preload,
            image=image,
            image_args=tuple(image_arg or ()),
            args=tuple(arg or ()),
            stdin=stdin,
            env=tuple(map(variable, env or ())),
            cwd=None if cwd is None else cwd.absolute(),
            timeout_s=None if timeout is None else seconds("--timeout", timeout),
            grace_s=min(5.0, lease_s / 2) if grace is None else seconds("--grace", grace),
        )
        settings = Settings(
            gateway=gateway.rstrip("/"),
            name=worker_name(name),
            key=admin_key(),
            agents=agents,
            judging=Judging(reward, reward_command, seconds("--reward-timeout", reward_timeout)),
            workers=workers,
            most=max,
            watch=watch,
            modes=_modes(mode),
            lease_s=lease_s,
            keep_output=size("--keep-output", keep_output),
            echo=echo,
            reward_on_failure=reward_on_failure,
            keep_going=keep_going,
        )
        check(settings, on)
        tally = _run(settings, on, Place(ray_address, ray_options, job_template, namespace))
    except (RunnerError, ClientError) as e:
        raise Failure(str(e), e.code if isinstance(e, RunnerError) else 1) from None
    _report(tally)


@dataclass(frozen=True, slots=True)
class Place:
    """Options of other places than this machine."""

    ray_address: str | None
    ray_options: str | None
    job_template: Path | None
    namespace: str | None


def worker_name(given: str | None) -> str:
    """A worker's name is an id, and Ray's actors put a number behind it."""
    from penstock.gateway.model.base import ID_PATTERN
    from penstock.sidecar.settings import UsageError

    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    name = given or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    if not re.fullmatch(ID_PATTERN, f"{name}-1234"):
        raise UsageError(f"--name: {name[:140]!r} is not valid: use up to 123 of A-Z a-z 0-9 . _ -")
    return name


def _modes(text: str | None) -> tuple[Mode, ...] | None:
    from penstock.gateway.model.base import Mode
    from penstock.sidecar.settings import UsageError

    if text is None:
        return None
    found = [mode.strip() for mode in text.split(",")]
    for mode in found:
        if mode not in get_args(Mode):
            raise UsageError(f"--mode: {mode!r} is not a mode: use {', '.join(get_args(Mode))}, with commas between")
    return tuple(cast("list[Mode]", found))


def check(settings: Settings, on: str) -> None:
    """What is wrong with the options is said before anything is claimed. What is wrong with agents says `preflight`."""
    from penstock.sidecar.settings import UsageError

    agents = settings.agents
    if agents.callable is not None and (agents.command or agents.image):
        raise UsageError("--callable is run instead of a command, and not in an image")
    if agents.preload and (agents.callable is None or on == "kubernetes"):
        raise UsageError("--preload imports the module of --callable, on this machine or with --on ray")
    if not (agents.command or agents.callable or agents.image or on == "kubernetes"):
        raise UsageError("say what to run, after --, such as -- python my_agent.py")
    for option, value in (("--workers", settings.workers), ("--max", settings.most)):
        if value is not None and value < 1:
            raise UsageError(f"{option}: {value} is not a number from 1")
    if not 1 <= settings.lease_s <= 3600:
        raise UsageError(f"--lease: {settings.lease_s:g} s is not between 1s and 1h")
    # When the runner is killed, its agents have this long to end, and the lease may be a third gone.
    if settings.agents.grace_s > settings.lease_s / 2:
        message = f"--grace: {settings.agents.grace_s:g} s is more than half of --lease ({settings.lease_s:g} s)"
        raise UsageError(f"{message}: an agent could outlive its lease and run beside the next attempt")
    if agents.cwd is not None and not agents.image and on == "here" and not agents.cwd.is_dir():
        raise UsageError(f"--cwd: {agents.cwd} is not a directory")
    if settings.reward_on_failure is not None and not math.isfinite(settings.reward_on_failure):
        raise UsageError(f"--reward-on-failure: {settings.reward_on_failure} is not a finite number, such as 0 or -1")


def _run(settings: Settings, on: str, place: Place) -> Tally:
    import asyncio

    _check_extra(on)
    if on == "ray":
        from penstock.sidecar.engines import ray

        return ray.run(settings, place.ray_address, place.ray_options)
    if on == "kubernetes":
        from penstock.sidecar.engines import kubernetes

        return asyncio.run(here(settings, kubernetes.engine(settings, place.job_template, place.namespace)))
    from penstock.sidecar.engines.local import Here

    return asyncio.run(here(settings, Here(settings)))


def _check_extra(on: str) -> None:
    from importlib.util import find_spec

    from penstock.sidecar.settings import UsageError

    if on != "here" and find_spec(on) is None:
        raise UsageError(f"--on {on} needs more packages: pip install 'penstock-gateway[{on}]'")


async def here(settings: Settings, made: AbstractAsyncContextManager[Engine]) -> Tally:
    """A runner in this process, until it leaves."""
    from penstock.sidecar.agent.signals import heeding
    from penstock.sidecar.progress import progress
    from penstock.sidecar.runner import Runner

    with progress("bar" if sys.stderr.isatty() else "lines", settings.echo, settings.most) as shown:
        async with made as engine:
            runner = Runner(settings, engine, shown)
            with heeding(runner, shown):
                return await runner.run()


def _report(tally: Tally) -> None:
    print(tally, flush=True)
    if tally.ends["returned"]:
        sys.exit(130)
    if tally.stopped is not None:
        raise Failure("stopped: the agents cannot work here; the reason stands above", 3)
    if tally.total and not tally.ends["succeeded"]:
        raise Failure(f"no attempt succeeded: {tally.reason or 'no reason is known'}")
