"""The runner's side of `sidecar.agent.fork_server`: attempts of a function that was imported once.

The fork server starts with the first attempt, and again when it has died; attempts that it has started do not need it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from penstock.gateway.client.child_process import ChildProcess
from penstock.sidecar.agent import pipes
from penstock.sidecar.agent.process import AgentProcess, LaunchCommand, Sink

STARTS_S = 120.0
"""The longest time for an order; the first one waits for the import of the function's module; s."""
ENDS_S = 5.0
"""The longest time that the fork server may take to end; s."""


class ForkServerClient:
    """Starts attempts of one function through a fork server."""

    def __init__(self, function: str, env: Mapping[str, str], cwd: Path | None) -> None:
        """`env` and `cwd`: variables and directory in which the function's module is imported."""
        self._function, self._env, self._cwd = function, env, cwd
        self._orders: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()

    async def start(self, command: LaunchCommand, grace_s: float, sink: Sink) -> AgentProcess:
        """Start an attempt with the variables, directory and stdin of `command`. Raises OSError when it cannot be
        started.
        """
        told = {"env": dict(command.env), "cwd": None if command.cwd is None else str(command.cwd), "grace_s": grace_s}
        with ExitStack() as theirs:
            stdin = await pipes.input_pipe(theirs, command.stdin or b"")
            (out, stdout), (err, stderr), (lives, life) = [await pipes.output_pipe(theirs) for _ in range(3)]
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
                *(sys.executable, "-m", "penstock.sidecar.agent.fork_server", str(theirs.fileno()), self._function),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._env,
                cwd=self._cwd,
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
