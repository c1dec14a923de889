"""The server of tools: a process below a warden (`sidecar.agent.supervisor`), with pipes for stdin and stdout.

The warden ends it, and all that it has started, when the wrapper dies in any way. stderr is the wrapper's own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.sidecar.agent import supervisor

FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILL_AFTER_S: Final = 5.0
"""How long a server may take after a signal; then it is killed."""
GRACE_S: Final = 2.0
"""The same when its wrapper is gone, and for what it leaves behind when it ends."""


class Server:
    """A server that runs; for the main thread. Raises OSError when not even its warden can be started."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.signalled = False
        """Whether a signal has asked it to end."""
        child_in, self.stdin = os.pipe()
        self.stdout, child_out = os.pipe()
        ours, theirs = socket.socketpair()
        told: dict[str, Any] = {"control": theirs.fileno(), "grace_s": GRACE_S, "after": []}
        try:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(told), *argv],
                stdin=child_in,
                stdout=child_out,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what kills the wrapper's process group must not kill who cleans up after it
            )
        finally:
            theirs.close()
            os.close(child_in)
            os.close(child_out)
        self._control = ours
        # A signal that comes just before the main thread waits, or to another thread, would not be heard of in time.
        self._woken, written = os.pipe()
        for end in (self._woken, written):
            os.set_blocking(end, False)
        _ = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        self._waiting = select.poll()
        for readable in (self._control, self._woken):
            self._waiting.register(readable, select.POLLIN)
        self._said: dict[str, Any] = {}
        self._rest = b""

    def forward(self, number: int) -> None:
        """Passes a signal on, and kills the server when that does not end it."""
        self.signalled = True
        pid = self._said.get("pid")
        if "status" not in self._said:
            with suppress(ProcessLookupError):
                if pid is None:
                    self._order(b"T")
                else:
                    os.kill(pid, number)
            # No thread: a handler may run while one is being started.
            _ = signal.signal(signal.SIGALRM, self._kill)
            _ = signal.setitimer(signal.ITIMER_REAL, KILL_AFTER_S)

    def _kill(self, *_: object) -> None:
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        with suppress(OSError):
            _ = self._control.send(order)

    @property
    def error(self) -> str | None:
        """Why it could not be started; known once `started` has come back."""
        return self._said.get("error")

    @property
    def has_output(self) -> bool:
        """Whether something of its output was not read yet, or its end."""
        waiting = select.poll()
        waiting.register(self.stdout, select.POLLIN)
        return bool(waiting.poll(0))

    def started(self) -> bool:
        """Waits until it runs; False when it does not."""
        while not self._said.keys() & {"started_ns", "error"} and self._listen():
            pass
        return "started_ns" in self._said

    def wait(self) -> int:
        """Its exit code, as shells give it: 128 and the number of a signal that ended it."""
        while "status" not in self._said and self._listen():
            pass
        status = self._said.get("status")
        if status is None:
            return 128 + signal.SIGKILL  # its warden was killed, and it with it
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _listen(self) -> bool:
        """Waits for a signal, which is handled then, or for what its warden says; False when that says no more."""
        ready = [handle for handle, _ in self._waiting.poll()]
        if self._woken in ready:
            _ = os.read(self._woken, 4096)
        if self._control.fileno() not in ready:
            return True
        try:
            data = self._control.recv(4096)
        except OSError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._said |= json.loads(line)
        return bool(data)
