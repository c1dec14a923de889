"""One agent behind a front of its own: makes authority and variables, starts the command, passes signals on, reaps it.

The front ends with the agent. What passed is told to the gateway as one event for each host.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.gateway.model.queue import Event
from penstock.sidecar.intercept import trust
from penstock.sidecar.intercept.authority import Authority
from penstock.sidecar.intercept.egress import events, tell
from penstock.sidecar.intercept.front import Binding, Front, Passed
from penstock.sidecar.intercept.policy import Policy

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Whose:
    """What is known of the agent's rollout: its ids, its token, or neither."""

    rollout: str | None = None
    attempt: str | None = None
    token: str | None = None

    @property
    def binding(self) -> Binding:
        """What the gateway is told of its connections."""
        named = {"x-rollout-id": self.rollout, "x-attempt-id": self.attempt}
        key = [] if self.token is None else [("Proxy-Authorization", f"Bearer {self.token}")]
        return Binding((*((name, value) for name, value in named.items() if value), *key))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user has asked for."""

    gateway: str
    command: tuple[str, ...]
    policy: Policy
    whose: Whose


async def run(wanted: Wanted) -> tuple[int, list[str]]:
    """Runs the command. Returns its exit code (128 and the number of a signal that ended it, 127 where it is not
    there), and what its owner should know."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-sidecar-"))
    names = sorted({host for host, _ in wanted.policy.hosts})
    authority = Authority(names)
    passed: list[Passed] = []
    front = Front(wanted.gateway, wanted.policy, authority, passed.append)
    try:
        port = await front.start()
        front.bind(wanted.whose.binding)
        bundle, own = trust.write(folder, authority.pem)
        code = await _command(wanted.command, os.environ | trust.variables(bundle, own, port, names))
    finally:
        await front.stop()
        shutil.rmtree(folder, ignore_errors=True)
    problems = [f"{one.host}:{one.port}: {one.problem}" for one in passed if one.problem is not None]
    if (untold := await _tell(wanted, events(passed))) is not None:
        problems.append(f"where the agent has been is not on the tape: {untold}")
    return code, list(dict.fromkeys(problems))


async def _tell(wanted: Wanted, made: list[Event]) -> str | None:
    whose = wanted.whose
    if whose.rollout is None or not made:
        return None
    return await tell(f"{wanted.gateway}/rollout/{whose.rollout}/attempt/{whose.attempt or 'a1'}", whose.token, made)


async def _command(argv: Sequence[str], env: dict[str, str]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*argv, env=env)
    except OSError as error:
        print(f"penstock: {argv[0]!r} could not be started: {error.strerror}", file=sys.stderr)
        return 127
    loop = asyncio.get_running_loop()
    for one in _SIGNALS:
        loop.add_signal_handler(one, _pass_on, process, one)
    try:
        code = await process.wait()
    finally:
        for one in _SIGNALS:
            loop.remove_signal_handler(one)
    return 128 - code if code < 0 else code


def _pass_on(process: asyncio.subprocess.Process, one: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(one)
