"""The interface of engines, and the local one. An engine starts the agent of a claim; `LocalEngine` runs it on this
machine, in a container or not.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from penstock.gateway.client.child_process import LockedFolder
from penstock.gateway.model.queue import Claim
from penstock.sidecar.run import preflight
from penstock.sidecar.run.agent.environment import LaunchPlan, environment, import_environment, launch_plan, variables
from penstock.sidecar.run.agent.function_clients import ForkServerClient, HostPool
from penstock.sidecar.run.agent.process import AgentHandle, LaunchCommand, Sink, start
from penstock.sidecar.run.settings import RunnerSettings, UsageError

# Agents in containers: the `docker run` (or podman's, which takes the same options) of an attempt. Pure, but `tool`.
#
# Variables are passed by name, so that no token is in a list of processes. The container has the attempt's name. The
# warden removes it at the very end, also when the runner was killed, because the end of `docker run` alone does not
# end a container.

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
    argv = (*options, *agents.image_args, agents.image or "", *plan.argv)
    return LaunchCommand(argv, env, plan.stdin, after=(tool, "rm", "--force", name))


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


class AgentEngine(Protocol):
    """Starts the agents of claims."""

    def running(self, claim: Claim, sink: Sink) -> AbstractAsyncContextManager[AgentHandle]:
        """Start the agent of an attempt and yield it; at the end no process of it is left. Raises `TaskTemplateError`,
        OSError or ValueError when it cannot be started.
        """
        ...


class LocalEngine:
    """Runs agents on this machine."""

    def __init__(self, settings: RunnerSettings) -> None:
        """Raises `UsageError` when the agents need a container and no tool can run it."""
        agents = settings.agents
        self._settings = settings
        self._tool = tool() if agents.image else None
        self._preloaded: ForkServerClient | None = None
        if agents.preload and agents.callable is not None:
            self._preloaded = ForkServerClient(agents.callable, import_environment(os.environ, settings.key))
        self._shared: HostPool | None = None
        if agents.concurrency > 1 and agents.callable is not None:
            env = import_environment(os.environ, settings.key)
            self._shared = HostPool(agents.callable, agents.concurrency, env)

    async def __aenter__(self) -> LocalEngine:
        """Raises `UsageError` when agents certainly cannot work here."""
        await preflight.check(self._settings, self._tool)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._preloaded is not None:
            await self._preloaded.close()
        if self._shared is not None:
            await self._shared.close()

    @asynccontextmanager
    async def running(self, claim: Claim, sink: Sink) -> AsyncGenerator[AgentHandle]:
        if self._shared is not None:
            own = variables(claim, self._settings.gateway)
            agent = await self._shared.start(claim.rollout.input, own, self._settings.agents.grace_s, sink)
            try:
                yield agent
            finally:
                agent.close()
            return
        with LockedFolder("penstock-") as home:
            async with self._front(claim, home, sink) as front:
                made = launch_plan(
                    claim, self._settings.gateway, self._settings.agents, Path(home, "input.json"), front
                )
                if made.file is not None:
                    _ = made.file.write_text(made.task, encoding="utf-8")
                starting = start if self._preloaded is None else self._preloaded.start
                agent = await starting(self._command(claim, made), self._settings.agents.grace_s, sink)
                try:
                    yield agent
                finally:
                    agent.close()

    @asynccontextmanager
    async def _front(self, claim: Claim, home: str, sink: Sink) -> AsyncGenerator[dict[str, str] | None]:
        """Yield the variables that lead to this agent's own front; None when it has base URLs. Problems that kept its
        calls from the gateway are added to its output.
        """
        policy = self._settings.agents.policy
        if policy is None:
            yield None
            return
        # Imported late: it needs `cryptography`, which makes the certificates.
        from penstock.sidecar.intercept.egress_report import AgentIdentity
        from penstock.sidecar.intercept.session import SessionOptions, open_session

        whose = AgentIdentity(claim.rollout.id, claim.attempt.id, claim.token)
        async with open_session(SessionOptions(self._settings.gateway, policy, whose), Path(home)) as front:
            yield front.variables
        for problem in front.problems:
            sink("stderr", f"penstock: {problem}\n".encode())

    def _command(self, claim: Claim, made: LaunchPlan) -> LaunchCommand:
        env = environment(os.environ, made.own, self._settings.key)
        if self._tool is not None:
            return command(self._tool, self._settings, claim, made, env)
        return LaunchCommand(made.argv, env, made.stdin)
