"""The runner's side of agents that are functions: forked from one process that has imported them (`fork_server`), or
many in one process (`host`).

The fork server starts with the first attempt, and again when it has died; attempts that it has started do not need it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any

from penstock.gateway.client.child_process import ChildProcess, socket_folder
from penstock.sidecar.run.agent import output
from penstock.sidecar.run.agent.output import Stream
from penstock.sidecar.run.agent.process import AgentProcess, ExitStatus, LaunchCommand, Sink, start

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
        with ExitStack() as theirs:
            stdin = await output.input_pipe(theirs, command.stdin or b"")
            (out, stdout), (err, stderr), (lives, life) = [await output.output_pipe(theirs) for _ in range(3)]
            ours, control = socket.socketpair()
            theirs.callback(control.close)
            fds = [stdin, stdout, stderr, control.fileno(), life]
            try:
                pid = await self._order(json.dumps(told).encode(), fds)
            except BaseException:
                ours.close()
                raise
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
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.sidecar.run.agent.fork_server", str(theirs.fileno()), self._function),
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


# The runner's side of `sidecar.run.agent.host`: attempts of a function that share processes.
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
                argv = (sys.executable, "-m", "penstock.sidecar.run.agent.host", path, function)
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
