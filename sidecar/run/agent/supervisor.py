"""The process between a runner and one agent. No process of the agent outlives it, or the runner.

    python -I -S supervisor.py '{"control": FD, "grace_s": 5, "after": []}' COMMAND ...

This process, the *warden*, is the *subreaper* of its agent: any process that the agent starts and leaves behind, also
in a session of its own, becomes the warden's child. The tree is gone when the kernel says that the warden has no
children left, and not before. The warden kills the tree (TERM, then KILL after the grace) when the agent has ended,
when the runner asks for it, and when the runner has died in any way, which closes the other end of the control socket.

    from the runner   T: TERM, and KILL after the grace     K: KILL at once      end of file: like T
    to the runner     {"started_ns": clock, "pid": agent}  {"error": text}  {"status": wait status, "ended_ns": clock}

Its messages are lines of JSON.

There are two wardens, parent and child, because a warden may be killed too (by a cluster that cleans up, or when memory
runs out). When the inner one dies, the outer one inherits the processes that are left and kills them. When the outer
one dies, a pipe between them closes and the inner one ends as if the runner were gone.

`after` is a command that is run at the very end, such as one that removes a container; `limits` are bounds of the
command by their names in `resource` (`{"NOFILE": 4096}`). The warden is a process of its own and uses the standard
library alone: it starts in about 20 ms and no failure of the runner reaches it. Where the kernel has no subreapers
(anything but Linux) it kills the agent's process group, which a grandchild can leave. The gateway hosts servers of
tools below such wardens, too (`gateway.tools.bridge`).

`supervise` does the same for an agent that is a function: `sidecar.run.agent.callables` forks such wardens.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 0.02
"""Time between two rounds of signals; s. A process may have been started while the last round went through the table.
"""
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Signals that the warden or Python handles and whose default the agent gets back."""


class ProcStat(NamedTuple):
    """The fields of a process's /proc/PID/stat that are used here."""

    parent: int
    ticks: int
    """CPU time of the process and of the children that it has waited for; clock ticks."""
    pages: int
    """Resident memory; pages."""


def process_table() -> dict[int, ProcStat]:
    """All processes of this machine by pid; empty where there is no /proc."""
    return dict(_rows())


def _rows() -> Iterator[tuple[int, ProcStat]]:
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name of a process may hold anything, also parentheses and spaces (proc(5)).
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            yield int(name), ProcStat(int(fields[1]), sum(map(int, fields[11:15])), int(fields[21]))


def descendants(root: int, rows: dict[int, ProcStat]) -> list[int]:
    """The descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


Become = Callable[[int], None]
"""Makes a process the agent; does not return. It gets a pipe, which it closes on success and writes the reason to on
failure.
"""


class Warden:
    """Runs one agent to its end."""

    def __init__(self, control: int, guard: int, grace_s: float) -> None:
        """`guard`: a pipe that closes when the outer warden dies."""
        self.control: int | None = control
        self.watched = {control, guard}
        self.grace_s = grace_s
        self.agent = 0
        self.ended = False
        self.asked: set[int] = set()
        self.kill_at: float | None = None
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.waker, False)
        _ = signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)

    def run(self, become: Become) -> None:
        """Start the agent and return when it and all that it has started are gone."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _ = signal.signal(signal.SIGCHLD, self._wake_up)
        _ = signal.signal(signal.SIGTERM, self._asked_to_end)
        self._start(become)
        while self._reap():
            self._turn()

    def _start(self, become: Become) -> None:
        reading, writing = os.pipe()  # closed when it has become the agent
        parent = os.getpid()
        self.agent = os.fork()  # no thread has been started here
        if self.agent == 0:
            _leave_home(parent)
            for fd in (reading, self.wake, self.waker, *self.watched):
                os.close(fd)
            become(writing)
            os._exit(127)
        os.close(writing)
        _let_go()
        with os.fdopen(reading, "rb") as file:
            error = file.read().decode(errors="replace")
        self._tell(**({"error": error} if error else {"started_ns": time.monotonic_ns(), "pid": self.agent}))

    def _reap(self) -> bool:
        """Note the children that have ended; False when none is left."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.agent:
                    self.ended = True
                    self._tell(status=found[1], ended_ns=time.monotonic_ns())
        except ChildProcessError:
            if sys.platform != "linux":
                self._signal(signal.SIGKILL)
            return False
        return True

    def _turn(self) -> None:
        """Wait for an event and react to it."""
        if self.ended:
            self._terminate()
        waiting = select.poll()  # `select` takes no number above 1,023, and a busy parent's are larger
        for fd in (self.wake, *self.watched):
            waiting.register(fd, select.POLLIN)
        ready = [fd for fd, _ in waiting.poll(None if self.kill_at is None else SWEEP_S * 1000)]
        if self.wake in ready:
            _ = os.read(self.wake, 4096)
        for fd in self.watched.intersection(ready):
            self._obey(fd)
        if self.kill_at is not None:
            self._sweep()

    def _sweep(self) -> None:
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self._signal(signal.SIGKILL)
        else:
            self._signal(signal.SIGTERM)

    def _obey(self, fd: int) -> None:
        try:
            order = os.read(fd, 64)
        except OSError:
            order = b""
        if not order:
            os.close(fd)
            self.watched.discard(fd)
            self.control = None if fd == self.control else self.control
        self._terminate()
        if b"K" in order:
            self.kill_at = time.monotonic()

    def _wake_up(self, *_: object) -> None:
        """Do nothing: but without a handler Python does not write to the wake-up pipe."""

    def _asked_to_end(self, *_: object) -> None:
        self._terminate()

    def _terminate(self) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s

    def _signal(self, number: int) -> None:
        """Send KILL to every process each time, TERM once."""
        for pid in descendants(os.getpid(), process_table()):
            if number == signal.SIGKILL or pid not in self.asked:
                self.asked.add(pid)
                _send(os.kill, pid, number)
                _send(os.kill, pid, signal.SIGCONT)  # a stopped process cannot end
        if sys.platform != "linux":
            _send(os.killpg, self.agent, number)

    def _tell(self, **message: object) -> None:
        if self.control is not None:
            with suppress(OSError):  # the runner is gone; reading the socket says so too
                _ = os.write(self.control, json.dumps(message).encode() + b"\n")


def _leave_home(parent: int) -> None:
    """Prepare the forked agent: a session of its own, and KILL when its warden dies."""
    _ = signal.set_wakeup_fd(-1)
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    for number in RESTORED:
        _ = signal.signal(number, signal.SIG_DFL)


def _execute(argv: list[str], limits: Mapping[str, int], failure: int) -> None:
    """Become a command (exec closes what is open); on failure write the reason to `failure`."""
    try:
        _limit(limits)
        os.execvp(argv[0], argv)
    except BaseException as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        _ = os.write(failure, f"cannot start {argv[0]!r}: {reason}".encode(errors="replace")[:4000])


def _limit(limits: Mapping[str, int]) -> None:
    """Bound this process and those that it starts, as far as its own hard limits allow."""
    if not limits:
        return
    import resource

    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))


def _send(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or its pid belongs to another user
        kill(pid, number)


def _let_go() -> None:
    """Close the agent's pipes here; while they are open in this process, they would never end."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        _ = os.dup2(null, fd)


def _guard(inner: int) -> None:
    """Run the outer warden: wait for the inner one, then kill every process that it has left behind."""
    _let_go()
    with suppress(ChildProcessError):
        _ = os.waitpid(inner, 0)
        while True:
            for pid in descendants(os.getpid(), process_table()):
                _send(os.kill, pid, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(SWEEP_S)


def supervise(control: int, grace_s: float, become: Become) -> bool:
    """Run an agent to its end, in two processes; return True in the inner one, once no process of the agent is left."""
    os.set_inheritable(control, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        _ = signal.signal(number, signal.SIG_IGN)
    reading, writing = os.pipe()
    inner = os.fork()
    if inner:
        os.close(control)
        os.close(reading)
        _guard(inner)
        return False
    os.close(writing)
    Warden(control, reading, grace_s).run(become)
    return True


def main() -> None:
    told, argv = json.loads(sys.argv[1]), sys.argv[2:]
    close_inherited(told["control"])
    limits = told.get("limits", {})
    if supervise(told["control"], told["grace_s"], lambda failure: _execute(argv, limits, failure)) and told["after"]:
        _clean_up(told["after"])


def close_inherited(control: int) -> None:
    """Close descriptors that were passed on unintentionally to a process started with the descriptor `control`. Some
    event loops (uvloop) leave more open than requested, such as ends of the agent's pipes; while one is open, its
    reader does not see that the agent has closed its stdout.
    """
    found = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(256))
    for fd in map(int, found):
        if fd > 2 and fd != control:
            with suppress(OSError):
                os.close(fd)


def _clean_up(command: list[str]) -> None:
    import subprocess

    null = subprocess.DEVNULL
    _ = subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False, timeout=60)


if __name__ == "__main__":
    main()
