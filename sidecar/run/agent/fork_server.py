"""Starts attempts of a Python function quickly: the function is imported once, and each attempt is a fork of that
process.

    python -m penstock.sidecar.run.agent.fork_server FD module:function

The runner (`sidecar.run.agent.function_clients`) has the other end of the socket FD. For each attempt it sends a length
(4 bytes, big endian) with five descriptors: stdin, stdout, stderr, the warden's control socket, and one that stays open
until no process of the attempt is left. Then it sends JSON: `{"env": {...}, "grace_s": 5}`. The answer is the pid (4
bytes) of a fork, which becomes a warden (`sidecar.run.agent.supervisor`); its agent calls the function. So an attempt
has its own process, variables, output and end, like one that was started by a command, but needs no imports.

Objects that the function's module makes on import are made once, before any attempt has its variables. A client among
them would go past the gateway, so its base URL (`environment.imported`) names a port where nothing answers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from penstock.sidecar.run.agent import callables, supervisor
from penstock.sidecar.run.agent.functions import load

FDS = 5


class ForkServer:
    """The process from which attempts are forked. No thread may be started here."""

    def __init__(self, orders: socket.socket, function: str) -> None:
        self._orders, self._function = orders, function

    def run(self) -> None:
        """Serve orders until the runner is gone."""
        _ = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the runner alone
        _ = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended are not waited for
        while (order := self._order()) is not None:
            told, fds = order
            pid = os.fork()
            if pid == 0:
                self._attempt(told, fds)
            self._orders.sendall(pid.to_bytes(4))
            for fd in fds:
                os.close(fd)

    def _order(self) -> tuple[dict[str, Any], list[int]] | None:
        """(the order, its descriptors); None when the runner is gone."""
        head, fds, _, _ = socket.recv_fds(self._orders, 4, FDS)
        head += self._orders.recv(4 - len(head), socket.MSG_WAITALL)
        told = self._orders.recv(int.from_bytes(head), socket.MSG_WAITALL)
        return (json.loads(told), fds) if told else None

    def _attempt(self, told: dict[str, Any], fds: list[int]) -> None:
        """Turn the fork into a warden. Both of its processes hold `life` open."""
        stdin, stdout, stderr, control, life = fds
        self._orders.close()
        _ = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            _ = os.dup2(fd, place)
            os.close(fd)
        _ = supervisor.supervise(control, told["grace_s"], lambda failure: self._become(told, life, failure))
        os._exit(0)

    def _become(self, told: dict[str, Any], life: int, failure: int) -> None:
        """Become the agent, and end as a Python process ends."""
        os.close(life)
        os.environ.clear()
        os.environ.update(told["env"])
        os.close(failure)
        sys.argv = [sys.argv[0], self._function]
        raise _StackUnwind


class _StackUnwind(BaseException):
    """Raised in a fork to leave everything that it has inherited of the fork server's stack."""


def main() -> None:
    orders, function = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    supervisor.close_inherited(orders.fileno())
    os.set_inheritable(orders.fileno(), False)
    with suppress(Exception):  # each attempt tries again, and its output says why
        _ = load(function)
    # Imported objects share memory with every attempt until a write; a garbage collection at its end would write to
    # them.
    gc.freeze()
    try:
        with orders:
            ForkServer(orders, function).run()
    except _StackUnwind:
        callables.main()


if __name__ == "__main__":
    main()
