"""The commands `penstock run` and `penstock release rehearse`, with their options. Heavy imports come when they run.

Exit codes of `run`: 0 done, also when some agents failed, which is what a queue is for; 1 when the gateway cannot be
reached or refuses the runner, and when there were attempts and none of them succeeded; 2 wrongly called, or agents
cannot work here; 3 stopped because agents failed in the same way, at once and one after another; 130 killed by a second
signal.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from cyclopts import Parameter

from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Url, asked_gateway, control_key, note, with_asked
from penstock.gateway.model.codes import install_hint

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from penstock.gateway.model.base import Mode
    from penstock.sidecar.intercept.rules import InterceptPolicy
    from penstock.sidecar.run.engines.local import AgentEngine
    from penstock.sidecar.run.progress import AttemptTally
    from penstock.sidecar.run.reward_judge import DryRun
    from penstock.sidecar.run.settings import AgentSettings, RunnerSettings

Words = Annotated[list[str] | None, Parameter(allow_leading_hyphen=True, negative="")]


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
    hook: Words = None
    """EVENT=module:function or EVENT=COMMAND, called with JSON at on_rollout_start, on_attempt_start, on_reward,
    on_attempt_end, on_rollout_end, or on_heartbeat for figures of your own; may be repeated."""
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
            HookSettings,
            JudgeSettings,
            RunnerSettings,
            UsageError,
            hook,
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
            hooks=HookSettings(tuple(map(hook, self.hook or ()))),
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


RUN_DEFAULTS = RunOptions()


def run(*command: str, gateway: Url = LOCAL, options: Annotated[RunOptions, FLAT] = RUN_DEFAULTS) -> None:
    """Take rollouts from the queue and run an unmodified agent on each.

    The agent finds its task on stdin as JSON, in PENSTOCK_INPUT, and in the arguments that --arg makes of it. The
    variables that clients read for their base URL and API key lead it to its rollout's own address. The first SIGINT
    or SIGTERM lets the agents finish, the second kills them and gives their attempts back.

    Parameters
    ----------
    command
        The agent and its arguments, after `--`.
    """
    from penstock.gateway.client.client import ClientError
    from penstock.sidecar.run.settings import RunnerError

    try:
        settings = options.settings(gateway, command)
        check(settings, options.on)
        if options.check is not None:
            _try(settings, options.on, options.check)
            return
        tally = _run(settings, options)
        if not tally.total and (asked := asked_gateway(gateway)):
            note(f"Asked for work: {asked}.")
    except (RunnerError, ClientError) as e:
        raise CommandError(str(e), e.code if isinstance(e, RunnerError) else 1) from None
    _report(tally, options.reward is not None)


def check(settings: RunnerSettings, on: str) -> None:
    """Raise `UsageError` for invalid options, before anything is claimed. The engine checks the agents themselves."""
    from penstock.sidecar.run.settings import UsageError

    agents = settings.agents
    if agents.callable is not None and (agents.command or agents.image):
        raise UsageError("--callable is run instead of a command, and not in an image")
    if agents.preload and (agents.callable is None or on == "kubernetes"):
        raise UsageError("--preload imports the module of --callable, on this machine or with --on ray")
    if agents.concurrency != 1:
        _check_shared(agents, on)
    if agents.policy is not None and (agents.image or agents.preload or on == "kubernetes"):
        other = "--image" if agents.image else "--preload" if agents.preload else "--on kubernetes"
        raise UsageError(f"--sidecar stands before commands and functions that start here, not with {other}")
    if not (agents.command or agents.callable or agents.image or on == "kubernetes"):
        raise UsageError("say what to run, after --, such as -- python my_agent.py")
    for option, value in (("--workers", settings.workers), ("--max", settings.most)):
        if value is not None and value < 1:
            raise UsageError(f"{option}: {value} is not a number from 1")
    if not 1 <= settings.lease_s <= 3600:
        raise UsageError(f"--lease: {settings.lease_s:g} s is not between 1s and 1h")


def _check_shared(agents: AgentSettings, on: str) -> None:
    """Raise `UsageError` for options that attempts in a shared process cannot have."""
    from penstock.sidecar.run.settings import UsageError

    if agents.concurrency < 1:
        raise UsageError(f"--concurrency: {agents.concurrency} is not a number from 1")
    if agents.callable is None or on != "here":
        raise UsageError("--concurrency runs the function of --callable, on this machine")
    if agents.preload or agents.policy is not None or agents.env:
        other = "--preload" if agents.preload else "--env" if agents.env else "--sidecar"
        raise UsageError(
            f"{other} does not go with --concurrency: variables belong to a process, and many attempts share it"
        )


def _try(settings: RunnerSettings, on: Literal["here", "ray", "kubernetes"], tasks: Path) -> None:
    """Check what can be checked without an attempt, and print what is doubtful."""
    import asyncio

    from penstock.gateway.client.environment import CURRENT_GATEWAY
    from penstock.gateway.model.toml import pluralized
    from penstock.sidecar.run.engines.local import LocalEngine
    from penstock.sidecar.run.hooks import Hooks
    from penstock.sidecar.run.reward_judge import dry_run_judge, first_task

    task, count = first_task(tasks)

    async def look() -> DryRun:
        _ = CURRENT_GATEWAY.set((settings.gateway, settings.key))
        if on == "here":
            async with LocalEngine(settings):
                pass
        return await dry_run_judge(settings.judging, task)

    _check_extra(on)
    _ = Hooks(settings)
    found = asyncio.run(look())
    if found.doubt is not None:
        print(found.doubt, file=sys.stderr)
    else:
        print(f"nothing is wrong that can be seen. On the first of {pluralized(count, 'task')}: {found.tried}")


def _run(settings: RunnerSettings, options: RunOptions) -> AttemptTally:
    import asyncio

    _check_extra(options.on)
    if options.on == "ray":
        from penstock.sidecar.run.engines import ray

        return ray.run(settings, options.ray_options)
    if options.on == "kubernetes":
        from penstock.sidecar.run.engines import kubernetes

        return asyncio.run(run_locally(settings, kubernetes.engine(settings, options.job_template)))
    from penstock.sidecar.run.engines.local import LocalEngine

    return asyncio.run(run_locally(settings, LocalEngine(settings)))


def _check_extra(on: Literal["here", "ray", "kubernetes"]) -> None:
    from importlib.util import find_spec

    from penstock.sidecar.run.settings import UsageError

    if on != "here" and find_spec(on) is None:
        raise UsageError(f"--on {on} needs more packages: {install_hint(on)}")


async def run_locally(settings: RunnerSettings, made: AbstractAsyncContextManager[AgentEngine]) -> AttemptTally:
    """Run a runner in this process until it leaves; return its tally."""
    from penstock.sidecar.run.progress import progress
    from penstock.sidecar.run.runner import Runner, signal_handlers

    with progress(settings.echo, settings.most) as shown:
        async with made as engine:
            runner = Runner(settings, engine, shown)
            with signal_handlers(runner, shown):
                return await runner.run()


def _report(tally: AttemptTally, judged: bool) -> None:
    print(tally.summary(judged), flush=True)
    if tally.ends["returned"]:
        sys.exit(130)
    if tally.stopped is not None:
        raise CommandError("stopped: the agents cannot work here; the reason stands above", 3)
    if tally.total and not tally.ends["succeeded"]:
        raise CommandError(f"no attempt succeeded: {tally.reason or 'no reason is known'}")


# `penstock release rehearse` runs an agent for a release, as `penstock run` does for the queue.
#
# The runs come from the release (`RunnerSettings.release`). It hands them out after its recorded calls were replayed,
# and plays the agent's tools itself. Several such commands may share the work. The command ends when the release has
# left its rehearsal, and prints the result.
#
# Exit codes: 0 when the release went on; 1 when it did not, or the gateway cannot be reached; 2 wrongly called; 130
# killed by a second signal.

REHEARSE_DEFAULTS = RehearseOptions()


def rehearse(
    release: str,
    /,
    *command: str,
    gateway: Url = LOCAL,
    options: Annotated[RehearseOptions, FLAT] = REHEARSE_DEFAULTS,
) -> None:
    """Run an agent on recorded tasks for a release that rehearses, until it has seen enough.

    The agent is run as penstock run does it, and finds its task in the same places. It runs no tools: the gateway plays
    them with recorded results.

    Parameters
    ----------
    release
        A release, or a resource: its newest release.
    command
        The agent and its arguments, after `--`.
    """
    import asyncio

    from penstock.gateway.client.client import ClientError
    from penstock.sidecar.run.engines.local import LocalEngine
    from penstock.sidecar.run.settings import RunnerError

    try:
        settings = options.settings(gateway, command, release)
        check(settings, "here")
        name = asyncio.run(_named(settings.gateway, settings.key, release))
        tally = asyncio.run(run_locally(replace(settings, release=name), LocalEngine(settings)))
        print(tally)
        if tally.ends["returned"]:
            sys.exit(130)
        asyncio.run(_rehearse_report(settings.gateway, settings.key, name))
    except (RunnerError, ClientError) as e:
        raise CommandError(str(e), e.code if isinstance(e, RunnerError) else 1) from None


async def _named(url: str, key: str | None, name: str) -> str:
    """The release of this name, or the newest of the resource of this name."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        every = await client.releases()
    found = [one.id for one in every if one.id == name] or [one.id for one in every if one.resource == name]
    if not found:
        hint = "`penstock release list` lists them"
        raise CommandError(with_asked(f"there is no release {name!r}, nor one of a resource of that name; {hint}", url))
    return found[0]


async def _rehearse_report(url: str, key: str | None, name: str) -> None:
    """Print the result of the rehearsal; raise `CommandError` when it was not good."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        release, audit = (await client.release(name)).release, await client.audit(name)
    last = next((entry for entry in reversed(audit) if "rehearsal" in entry.evidence), None)
    said = f"{name} is {release.stage.replace('_', ' ')}: {release.reason if last is None else last.why}"
    if last is None or last.evidence.get("ok") is False:
        raise CommandError(said)
    print(said)
