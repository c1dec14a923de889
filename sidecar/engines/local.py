"""The interface of engines, and the local one. An engine starts the agent of a claim; `LocalEngine` runs it on this
machine, in a container or not.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from penstock.gateway.client.socket_folder import LockedFolder
from penstock.gateway.model.queue import Claim
from penstock.sidecar import preflight
from penstock.sidecar.agent.environment import LaunchPlan, environment, import_environment, launch_plan, variables
from penstock.sidecar.agent.fork_client import ForkServerClient
from penstock.sidecar.agent.host_client import HostPool
from penstock.sidecar.agent.process import AgentHandle, LaunchCommand, Sink, start
from penstock.sidecar.engines import containers
from penstock.sidecar.settings import RunnerSettings


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
        self._tool = containers.tool() if agents.image else None
        self._preloaded: ForkServerClient | None = None
        if agents.preload and agents.callable is not None:
            self._preloaded = ForkServerClient(
                agents.callable, import_environment(os.environ, settings.key), agents.cwd
            )
        self._shared: HostPool | None = None
        if agents.concurrency > 1 and agents.callable is not None:
            env = import_environment(os.environ, settings.key)
            self._shared = HostPool(agents.callable, agents.concurrency, env, agents.cwd)

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
            return containers.command(self._tool, self._settings, claim, made, env)
        return LaunchCommand(made.argv, env, made.stdin, self._settings.agents.cwd)
