"""The interface of engines, and the local one. An engine starts the agent of a claim; `LocalEngine` runs it on this
machine: a command, in a container or not, or a function, forked from one process that has imported it
(`ForkServerClient`) or beside others in one process (`HostPool`). It checks the agents before the first attempt is
claimed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock.gateway.client.child_process import ChildProcess, LockedFolder, socket_folder
from penstock.gateway.model.queue import Claim
from penstock.sidecar.intercept.rules import HINTS
from penstock.sidecar.run.agent import process
from penstock.sidecar.run.agent.environment import (
    CALLABLES,
    PLACEHOLDER_CLAIM,
    UNREACHABLE_URLS,
    LaunchPlan,
    environment,
    import_environment,
    launch_plan,
    variables,
    without_templates,
)
from penstock.sidecar.run.agent.process import AgentHandle, AgentProcess, ExitStatus, LaunchCommand, Sink, Stream, start
from penstock.sidecar.run.settings import AgentSettings, RunnerSettings, UsageError


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
        await check_agents(self._settings, self._tool)
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
        from penstock.sidecar.intercept.session import AgentIdentity, SessionOptions, open_session

        whose = AgentIdentity(claim.rollout.id, claim.attempt.id, claim.token)
        async with open_session(SessionOptions(self._settings.gateway, policy, whose), Path(home)) as front:
            yield front.variables
        for problem in front.problems:
            sink("stderr", f"penstock: {problem}\n".encode())

    def _command(self, claim: Claim, made: LaunchPlan) -> LaunchCommand:
        env = environment(os.environ, made.own, self._settings.key)
        if self._tool is not None:
            return container_command(self._tool, self._settings, claim, made, env)
        return LaunchCommand(made.argv, env, made.stdin)


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


def container_command(
    tool: str, settings: RunnerSettings, claim: Claim, plan: LaunchPlan, env: Mapping[str, str]
) -> LaunchCommand:
    """The command of an attempt in a container. `env`: the environment of the tool itself, which holds the variables
    for the container.
    """
    name = container(settings.name, claim)
    agents = settings.agents
    options = [tool, "run", "--rm", "--init", "-i", f"--name={name}", *_network(settings.gateway)]
    options += [f"--env={variable}" for variable in sorted({*HINTS, *plan.own})]
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


# Checks of agents before the first attempt is claimed, because a wrong command would use up the queue.
#
# Only certain errors are refused. A function's module is imported once, in its own process and with variables like
# those of an attempt. The error is certain when the module cannot be found, imports something that is missing, or has
# no such function. Any other error there may not happen in an attempt, and is ignored.

ANSWER_S = 30.0
"""The longest time that a container engine may take to answer; s."""
IMPORT_S = 120.0
"""The longest time that an import is waited for; s. A slower one is taken as good."""


async def check_agents(settings: RunnerSettings, tool: str | None) -> None:
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


async def _function(name: str, settings: RunnerSettings) -> None:
    made = launch_plan(PLACEHOLDER_CLAIM, settings.gateway, without_templates(settings.agents), Path("input.json"))
    env = environment(os.environ, made.own, settings.key) | UNREACHABLE_URLS
    argv = (sys.executable, "-m", CALLABLES, "--check", name)
    code, said = await _last_words(argv, IMPORT_S, env)
    if code == 1:
        raise UsageError(f"--callable: {said or 'it cannot be imported'}")


async def _image(tool: str, agents: AgentSettings) -> None:
    """Check that the container engine answers and has the image or can pull it. Otherwise all attempts would try at
    once.
    """
    image = agents.image or ""
    code, said = await _last_words((tool, "version"), ANSWER_S)
    if code != 0:
        reason = said or ("it did not answer" if code is None else f"exit code {code}")
        raise UsageError(
            f"--image {image}: {Path(tool).name} cannot run containers: start it, or let this user reach it. "
            f"It says: {reason}"
        )
    code, _ = await _last_words((tool, "image", "inspect", image), ANSWER_S)
    if code == 0:
        return
    if "--pull=never" in agents.image_args:
        raise UsageError(f"--image {image}: it is not on this machine, and --pull=never forbids to get it")
    print(f"pulling {image}", file=sys.stderr, flush=True)
    platform = [word for word in agents.image_args if word.startswith("--platform=")]
    code, said = await _last_words((tool, "pull", *platform, image), None)
    if code != 0:
        raise UsageError(
            f"--image {image}: it is not on this machine and cannot be pulled: {said or f'exit code {code}'}"
        )


async def _last_words(
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


# Functions that are forked. The fork server starts with the first attempt, and again when it has died; attempts that it
# has started do not need it.

STARTS_S = 120.0
"""The longest time for an order; the first one waits for the import of the function's module; s."""
ENDS_S = 5.0
"""The longest time that the fork server may take to end; s."""


class ForkServerClient:
    """Starts attempts of one function through a fork server."""

    def __init__(self, function: str, env: Mapping[str, str]) -> None:
        """`env`: variables with which the function's module is imported."""
        self._function, self._env = function, env
        self._orders: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()

    async def start(self, command: LaunchCommand, grace_s: float, sink: Sink) -> AgentProcess:
        """Start an attempt with the variables, directory and stdin of `command`. Raises OSError when it cannot be
        started.
        """
        told = {"env": dict(command.env), "grace_s": grace_s}
        # A fork server that is killed may hold their ends of the pipes for a while: readers do not wait for that.
        with ExitStack() as theirs, ExitStack() as unstarted:
            stdin = await process.input_pipe(theirs, command.stdin or b"")
            pipes = [await process.output_pipe(theirs, unstarted) for _ in range(3)]
            (out, stdout), (err, stderr), (lives, life) = pipes
            ours, control = socket.socketpair()
            theirs.callback(control.close)
            unstarted.callback(ours.close)
            pid = await self._order(json.dumps(told).encode(), [stdin, stdout, stderr, control.fileno(), life])
            _ = unstarted.pop_all()
        ours.setblocking(False)
        return AgentProcess(pid, {"stdout": out, "stderr": err}, lives.read, ours, sink)

    async def _order(self, told: bytes, fds: list[int]) -> int:
        """Have an attempt started; return the pid of its warden."""
        async with self._turn:
            if self._orders is not None:
                try:
                    return await self._asked(self._orders, told, fds)
                except OSError:
                    # The fork server has died since the last order.
                    await self.close()
            self._orders = await self._begin()
            return await self._asked(self._orders, told, fds)

    async def _asked(self, orders: socket.socket, told: bytes, fds: list[int]) -> int:
        try:
            return await asyncio.to_thread(_ask, orders, told, fds)
        except TimeoutError:
            self._kill()
            raise OSError(f"{self._function} was not imported within {STARTS_S:g} s") from None
        except asyncio.CancelledError:
            # Its answer would be taken for the answer to the next order.
            self._kill()
            raise

    async def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (sys.executable, "-m", CALLABLES, "--fork", str(theirs.fileno()), self._function)
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                env=self._env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._process = ChildProcess(process)
        ours.settimeout(STARTS_S)
        return ours

    async def close(self) -> None:
        """Close the fork server; attempts that run go on."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None:
            # While it imports it does not read its socket.
            _ = await self._process.end(ENDS_S)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _ask(orders: socket.socket, told: bytes, fds: list[int]) -> int:
    """Send an order and wait for its answer, the pid. Blocks; raises OSError when the fork server is gone."""
    _ = socket.send_fds(orders, [len(told).to_bytes(4)], fds)
    orders.sendall(told)
    answer = orders.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        raise OSError("the process that attempts are forked from has died")
    return int.from_bytes(answer)


# Functions that share processes.
#
# A process takes up to `size` attempts at a time. It stands below a warden of its own, so nothing of it outlives the
# runner. An attempt that does not stop when it is told to (a thread cannot be killed) is *left behind*: for the
# runner it has ended; its process takes no more work and is killed as soon as no other attempt runs in it.

GRACE_S = 1.0
"""Time between TERM and KILL of a process whose attempts have ended; s."""
LONGEST_LINE = 1 << 26
"""The most bytes of one piece of output."""
_NAME = "host"


class SharedAgent:
    """One attempt in a process that it shares with others."""

    def __init__(self, host: _HostProcess, number: int, grace_s: float, sink: Sink) -> None:
        self._host, self.number, self._grace_s, self.sink = host, number, grace_s, sink
        self._began, self._asked = monotonic_ns(), False
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Pid of the shared process's warden."""
        return self._host.pid

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Tell the attempt to stop; it is left behind if it has not ended after the grace."""
        if not self._asked:
            self._asked = True
            self._host.say({"stop": self.number})
            _ = asyncio.get_running_loop().call_later(self._grace_s, self.kill)

    def kill(self) -> None:
        """Leave the attempt behind, if it has not ended."""
        if not self._ended.done():
            self._host.leave(self)

    def close(self) -> None:
        """Leave the attempt behind, as `kill` does."""
        self.kill()

    def end(self, exit_code: int | None, error: str | None = None) -> None:
        """Record the end of the attempt, unless it has ended already."""
        if not self._ended.done():
            self.sink("stdout", b"")
            self.sink("stderr", b"")
            self._ended.set_result(ExitStatus(exit_code, duration_ns=monotonic_ns() - self._began, error=error))


class _HostProcess:
    """A process that runs many attempts, seen from the runner."""

    def __init__(self) -> None:
        self.agents: dict[int, SharedAgent] = {}
        self.retired = False
        """True if it takes no more work."""
        self._process: AgentProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._last: list[str] = []
        self._ended: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def begin(self, function: str, env: Mapping[str, str]) -> None:
        """Start the process; raises OSError when it cannot be started."""
        with socket_folder("penstock-", _NAME) as home:
            path = str(Path(home, _NAME))
            server = await asyncio.start_unix_server(self._serve, path, limit=LONGEST_LINE)
            try:
                argv = (sys.executable, "-m", CALLABLES, "--host", path, function)
                self._process = await start(LaunchCommand(argv, env), GRACE_S, self._print)
                self._ended = asyncio.ensure_future(self._wait(self._process))
                connected = asyncio.ensure_future(self._connected.wait())
                _ = await asyncio.wait({connected, self._ended}, timeout=STARTS_S, return_when=asyncio.FIRST_COMPLETED)
                _ = connected.cancel()
            finally:
                server.close()
        if not self._connected.is_set():
            await self.close()
            raise OSError(f"the process of {function} did not start: {' '.join(self._last) or 'it said nothing'}")

    def say(self, order: dict[str, Any]) -> None:
        """Send an order, if the process still listens."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(order).encode() + b"\n")

    def run(self, agent: SharedAgent, task: Any, variables: Mapping[str, str]) -> None:
        self.agents[agent.number] = agent
        self.say({"run": agent.number, "task": task, "variables": dict(variables)})

    def leave(self, agent: SharedAgent) -> None:
        """Leave an attempt behind that does not stop: this process ends when its others have."""
        self.retired = True
        _ = self.agents.pop(agent.number, None)
        agent.end(None, "it did not stop when it was told to")
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self.retired and not self.agents and self._process is not None:
            self._process.kill()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connected.set()
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                self._heard(json.loads(line))
        writer.close()

    def _heard(self, said: dict[str, Any]) -> None:
        agent = self.agents.get(said["of"])
        if agent is None:
            return
        if "stream" in said:
            agent.sink(said["stream"], said["text"].encode(errors="replace"))
            return
        del self.agents[agent.number]
        agent.end(said["exit_code"])
        self._end_when_idle()

    async def _wait(self, process: AgentProcess) -> None:
        """Wait for the process to end; then its attempts end too."""
        ending = await process.wait()
        self.retired = True
        how = ending.error or ending.signal or f"exit code {ending.exit_code}"
        for agent in list(self.agents.values()):
            agent.end(None, f"the process that it shared with others has ended: {how}")
        self.agents.clear()

    def _print(self, stream: Stream, data: bytes) -> None:
        """Print output that belongs to no attempt."""
        if text := data.decode(errors="replace"):
            self._last = text.strip().splitlines()[-1:] or self._last
            print(text, end="", file=sys.stderr, flush=True)

    async def close(self) -> None:
        self.retired = True
        if self._process is not None:
            self._process.kill()
        if self._ended is not None:
            await self._ended


class HostPool:
    """Starts attempts of one function in as few processes as their size allows."""

    def __init__(self, function: str, size: int, env: Mapping[str, str]) -> None:
        """`size`: attempts of one process at a time. `env`: variables of the processes."""
        self._function, self._size, self._env = function, size, env
        self._hosts: list[_HostProcess] = []
        self._number = 0
        self._turn = asyncio.Lock()

    async def start(self, task: Any, variables: Mapping[str, str], grace_s: float, sink: Sink) -> SharedAgent:
        """Start an attempt. Raises OSError when no process can be started for it."""
        async with self._turn:
            host = await self._free()
            self._number += 1
            agent = SharedAgent(host, self._number, grace_s, sink)
            host.run(agent, task, variables)
            return agent

    async def _free(self) -> _HostProcess:
        self._hosts = [host for host in self._hosts if not host.retired or host.agents]
        for host in self._hosts:
            if not host.retired and len(host.agents) < self._size:
                return host
        host = _HostProcess()
        await host.begin(self._function, self._env)
        self._hosts.append(host)
        return host

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()
