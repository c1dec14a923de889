"""The command `penstock run`. Everything heavy is imported when it runs.

Exit codes: 0 done, also when some agents failed, which is what a queue is for; 1 when the gateway cannot be reached or
refuses the runner, and when there were attempts and none of them succeeded; 2 wrongly called, or agents cannot work
here; 3 stopped because agents failed in the same way, at once and one after another; 130 killed by a second signal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Url
from penstock.sidecar.run.options import Command, RunOptions

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from penstock.sidecar.run.engines.local import AgentEngine
    from penstock.sidecar.run.progress import AttemptTally
    from penstock.sidecar.run.settings import AgentSettings, RunnerSettings

DEFAULT = RunOptions()


def run(*command: Command, gateway: Url = LOCAL, options: Annotated[RunOptions, FLAT] = DEFAULT) -> None:
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
    except (RunnerError, ClientError) as e:
        raise CommandError(str(e), e.code if isinstance(e, RunnerError) else 1) from None
    _report(tally)


def check(settings: RunnerSettings, on: str) -> None:
    """Raise `UsageError` for invalid options, before anything is claimed. `preflight` checks the agents themselves."""
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


def _try(settings: RunnerSettings, on: str, tasks: Path) -> None:
    """Check what can be checked without an attempt, and print what is doubtful."""
    import asyncio

    from penstock.sidecar.run.engines.local import LocalEngine
    from penstock.sidecar.run.judge_check import dry_run_judge, first_task

    task = first_task(tasks)

    async def look() -> str | None:
        if on == "here":
            async with LocalEngine(settings):
                pass
        return await dry_run_judge(settings.judging, task)

    _check_extra(on)
    doubt = asyncio.run(look())
    print(doubt if doubt is not None else "nothing is wrong that can be seen", file=sys.stderr if doubt else sys.stdout)


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


def _check_extra(on: str) -> None:
    from importlib.util import find_spec

    from penstock.sidecar.run.settings import UsageError

    if on != "here" and find_spec(on) is None:
        raise UsageError(f"--on {on} needs more packages: pip install 'penstock-gateway[{on}]'")


async def run_locally(settings: RunnerSettings, made: AbstractAsyncContextManager[AgentEngine]) -> AttemptTally:
    """Run a runner in this process until it leaves; return its tally."""
    from penstock.sidecar.run.progress import progress
    from penstock.sidecar.run.runner import Runner, signal_handlers

    with progress(settings.echo, settings.most) as shown:
        async with made as engine:
            runner = Runner(settings, engine, shown)
            with signal_handlers(runner, shown):
                return await runner.run()


def _report(tally: AttemptTally) -> None:
    print(tally, flush=True)
    if tally.ends["returned"]:
        sys.exit(130)
    if tally.stopped is not None:
        raise CommandError("stopped: the agents cannot work here; the reason stands above", 3)
    if tally.total and not tally.ends["succeeded"]:
        raise CommandError(f"no attempt succeeded: {tally.reason or 'no reason is known'}")
