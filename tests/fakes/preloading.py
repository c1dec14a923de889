"""The process that `penstock` commands of tests are forked from; `fakes.preloaded` starts `python preloading.py FD`.

It has imported what commands import. For each order, a length (4 bytes, big endian) with four descriptors (stdin,
stdout, stderr and one for the exit status) and then JSON, it forks a process that becomes the command, and answers with
its pid (4 bytes). When that has ended, what `os.waitpid` says of it is written to the fourth descriptor (4 bytes).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from io import TextIOWrapper

FDS = 4
WANTED = (
    "cyclopts.help",
    "docstring_parser",
    "penstock.adapters.commands",
    "penstock.gateway.process.main",
    "penstock.gateway.client.client",
    "penstock.console.commands.terminal",
    "penstock.console.commands.resources",
    "penstock.console.commands.enqueue",
    "penstock.console.commands.inspection",
    "penstock.console.commands.releases",
    "penstock.console.commands.administration",
    "penstock.console.commands.runs",
    "penstock.console.commands.serve",
    "penstock.console.views.queue",
    "penstock.console.views.releases",
    "penstock.console.views.resources",
    "penstock.console.views.rollout_tree",
    "penstock.console.views.rollouts",
    "penstock.console.views.runs",
    "penstock.sidecar.run.commands",
    "penstock.sidecar.run.runner",
    "rich.markdown",
    "rich.panel",
    "rich.table",
)
"""What most commands import: not what needs an extra, and nothing that starts a thread."""


class Forked(BaseException):
    """Raised in a fork to leave everything that it has inherited of the server's stack."""


class Server:
    """Forks commands, and says how they ended."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders, self._selector = orders, selectors.DefaultSelector()
        _ = self._selector.register(orders, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves orders until the tests are over."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._orders:
                    self._ended(key.fd, *key.data)
                elif not self._begin():
                    return

    def _begin(self) -> bool:
        """Takes an order; False when none will come."""
        head, fds, _, _ = socket.recv_fds(self._orders, 4, FDS)
        if not head:
            return False
        head += self._orders.recv(4 - len(head), socket.MSG_WAITALL)
        told = json.loads(self._orders.recv(int.from_bytes(head), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._orders.close()
            become(told, fds)
        for fd in fds[:3]:
            os.close(fd)
        _ = self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[3]))
        self._orders.sendall(pid.to_bytes(4))
        return True

    def _ended(self, pidfd: int, pid: int, status_fd: int) -> None:
        _ = self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # the test does not wait for it
            _ = os.write(status_fd, status.to_bytes(4))
        os.close(status_fd)


def become(told: dict[str, Any], fds: list[int]) -> None:
    """The fork gets the streams, variables, directory and words of its command."""
    for place, fd in enumerate(fds[:3]):
        _ = os.dup2(fd, place)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with suppress(OSError):  # that of the list itself
                os.close(fd)
    _ = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(told["env"])
    time.tzset()
    os.chdir(told["cwd"])
    sys.path[0] = os.getcwd()
    sys.argv = ["penstock", *told["arguments"]]
    cast("TextIOWrapper[Any]", sys.stdout).reconfigure(line_buffering=os.isatty(1))
    raise Forked


def main() -> None:
    """The process."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(orders.fileno(), False)
    _ = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the tests
    command = import_module("penstock.console.main")
    for name in WANTED:
        _ = import_module(name)
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    try:
        Server(orders).run()
    except Forked:
        command.main()


if __name__ == "__main__":
    main()
