"""Checks agents before the first attempt is claimed, because a wrong command would use up the queue.

Only certain errors are refused. A function's module is imported once, in its own process and with variables like those
of an attempt. The error is certain when the module cannot be found, imports something that is missing, or has no such
function. Any other error there may not happen in an attempt, and is ignored.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from penstock.gateway.client.child_process import ChildProcess
from penstock.sidecar.run.agent.environment import (
    PLACEHOLDER_CLAIM,
    UNREACHABLE_URLS,
    environment,
    launch_plan,
    without_templates,
)
from penstock.sidecar.run.settings import AgentSettings, RunnerSettings, UsageError

ANSWER_S = 30.0
"""The longest time that a container engine may take to answer; s."""
IMPORT_S = 120.0
"""The longest time that an import is waited for; s. A slower one is taken as good."""


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
