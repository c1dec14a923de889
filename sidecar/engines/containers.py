"""Agents in containers: the `docker run` (or podman's, which takes the same options) of an attempt. Pure, but `tool`.

Variables are passed by name, so that no token is in a list of processes. The container has the attempt's name. The
warden removes it at the very end, also when the runner was killed, because the end of `docker run` alone does not end a
container.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from urllib.parse import urlsplit

from penstock.gateway.model.queue import Claim
from penstock.sidecar.agent.environment import LaunchPlan
from penstock.sidecar.agent.process import LaunchCommand
from penstock.sidecar.settings import RunnerSettings, UsageError

TOOLS = ("docker", "podman")
LOCAL = ("localhost", "::1")


def tool() -> str:
    """The command that runs containers here; raises `UsageError` when there is none."""
    found = next(filter(None, map(shutil.which, TOOLS)), None)
    if found is None:
        raise UsageError(f"--image needs {' or '.join(TOOLS)}, and neither is on the PATH")
    return found


def command(
    tool: str, settings: RunnerSettings, claim: Claim, plan: LaunchPlan, env: Mapping[str, str]
) -> LaunchCommand:
    """The command of an attempt in a container. `env`: the environment of the tool itself, which holds the variables
    for the container.
    """
    name = container(settings.name, claim)
    agents = settings.agents
    options = [tool, "run", "--rm", "--init", "-i", f"--name={name}", *_network(settings.gateway)]
    options += [f"--env={variable}" for variable in sorted(plan.own)]
    if plan.file is not None:
        options += [f"--volume={plan.file}:{plan.file}:ro"]
    if agents.cwd is not None:
        options += [f"--workdir={agents.cwd}"]
    argv = (*options, *agents.image_args, agents.image or "", *plan.argv)
    return LaunchCommand(argv, env, plan.stdin, None, after=(tool, "rm", "--force", name))


def container(worker: str, claim: Claim) -> str:
    """The container's name, which no other attempt has; each character that an id allows and a name does not becomes a
    dash.
    """
    name = f"{worker}\0{claim.rollout.id}\0{claim.attempt.id}".encode()
    readable = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{claim.rollout.id}-{claim.attempt.id}")[:60]
    return f"penstock-{readable}-{blake2b(name, digest_size=6).hexdigest()}"


def _network(gateway: str) -> list[str]:
    """The option for a gateway on a loopback address, which is reachable only from the machine's own network."""
    host = urlsplit(gateway).hostname or ""
    return ["--network=host"] if host in LOCAL or host.startswith("127.") else []
