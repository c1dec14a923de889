"""The tool server: a process below a warden (`sidecar.run.agent.supervisor`), with pipes for stdin and stdout.

When the wrapper dies in any way, the warden ends the server and all that it has started. stderr is the wrapper's own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.gateway.model.stdio_frames import CLIENT, SERVER
from penstock.sidecar.run.agent import supervisor
from penstock.sidecar.stdio.delivery import SessionDelivery, SpoolSender, say
from penstock.sidecar.stdio.spool import LineSplitter

FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILL_AFTER_S: Final = 5.0
"""The longest time that a server may take to end after a signal, before it is killed; s."""
GRACE_S: Final = 2.0
"""The same after its wrapper is gone, and for processes that the server leaves behind when it ends; s."""


class ToolServerProcess:
    """A running server; used from the main thread. Raises OSError when not even its warden can be started."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.signalled = False
        """True if a signal has asked it to end."""
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
                start_new_session=True,  # a kill of the wrapper's process group must not hit the warden
            )
        finally:
            theirs.close()
            os.close(child_in)
            os.close(child_out)
        self._control = ours
        # Without this pipe, a signal that comes just before the main thread waits, or to another thread, would be
        # noticed late.
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
        """Pass a signal on, and kill the server when that does not end it."""
        self.signalled = True
        pid = self._said.get("pid")
        if "status" not in self._said:
            with suppress(ProcessLookupError):
                if pid is None:
                    self._order(b"T")
                else:
                    os.kill(pid, number)
            # No thread: a signal handler may run while another thread is being started.
            _ = signal.signal(signal.SIGALRM, self._kill)
            _ = signal.setitimer(signal.ITIMER_REAL, KILL_AFTER_S)

    def _kill(self, *_: object) -> None:
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        with suppress(OSError):
            _ = self._control.send(order)

    @property
    def error(self) -> str | None:
        """The reason why it could not be started; known after `started`."""
        return self._said.get("error")

    @property
    def has_output(self) -> bool:
        """True if some of its output, or its end, is unread."""
        waiting = select.poll()
        waiting.register(self.stdout, select.POLLIN)
        return bool(waiting.poll(0))

    def started(self) -> bool:
        """Wait until the server runs; False when it cannot be started."""
        while not self._said.keys() & {"started_ns", "error"} and self._listen():
            pass
        return "started_ns" in self._said

    def wait(self) -> int:
        """Wait for its end; return its exit code as shells do: 128 plus the number of a signal that ended it."""
        while "status" not in self._said and self._listen():
            pass
        status = self._said.get("status")
        if status is None:
            return 128 + signal.SIGKILL  # its warden was killed, and so was the server
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _listen(self) -> bool:
        """Wait for a signal, which its handler then handles, or for a message of the warden; False when the warden is
        gone.
        """
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


# Copies bytes from one descriptor to another as they come, and records them once they are written.

READ: Final = 1 << 16
"""The most bytes of one read: the capacity of a pipe. More would slow down short lines and help long ones little."""


class TrafficRecorder:
    """The traffic of both directions, in order: an answer never comes before its request."""

    def __init__(self, delivery: SessionDelivery, sender: SpoolSender) -> None:
        self._delivery, self._sender = delivery, sender
        self._lines = {CLIENT: LineSplitter(), SERVER: LineSplitter()}
        self._passing: deque[tuple[int, bytes, int]] = deque()
        """Bytes that were read and are being written: at most one read of each direction."""
        self._lock = threading.Lock()
        self._failed = False
        # Times never run backwards, whatever happens to the machine's clock.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """The time now, which never runs backwards; ns since the epoch."""
        return self._epoch_ns + time.monotonic_ns()

    def before_write(self, kind: int, data: bytes) -> None:
        """Note bytes that were read and are about to be written; empty bytes are the end of the direction."""
        if not self._failed:
            self._passing.append((kind, data, self.now_ns()))

    def after_write(self) -> None:
        """Record the bytes that are written. Bytes that the other direction read before come first: these may be the
        answer to them.
        """
        if self._failed:
            return
        try:
            with self._lock:
                while self._passing:
                    self._record(*self._passing.popleft())
            self._sender.wake()
        except Exception as e:
            # An error of the recording must not affect the tool.
            self._failed = True
            say(f"recording has failed ({type(e).__name__}: {e}); the tool works")

    def _record(self, kind: int, data: bytes, now_ns: int) -> None:
        lines = self._lines[kind]
        lines.limit = self._delivery.recorded_bytes or lines.limit
        self._delivery.spool.put(kind, lines.feed(data) if data else lines.close(), now_ns)


def copy(kind: int, source: int, sink: int, recording: TrafficRecorder | None) -> None:
    """Copy until the source ends or the sink is closed, then close both, so that each end notices the other's end."""
    with suppress(OSError):
        while data := _read(source):
            if recording is not None:
                recording.before_write(kind, data)
            try:
                _write(sink, data)
            finally:
                if recording is not None:
                    recording.after_write()
    for descriptor in (sink, source):
        with suppress(OSError):
            _close(descriptor)
    if recording is not None:
        recording.before_write(kind, b"")
        recording.after_write()


def _close(descriptor: int) -> None:
    """Close a descriptor. Those of stdin and stdout stay taken: no other file may get their numbers, and with them our
    output.
    """
    if descriptor > 2:
        os.close(descriptor)
        return
    null = os.open(os.devnull, os.O_RDWR)
    _ = os.dup2(null, descriptor)
    os.close(null)


def _read(source: int) -> bytes:
    while True:
        try:
            return os.read(source, READ)
        except BlockingIOError:
            _ready(source, select.POLLIN)


def _write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except BlockingIOError:
            _ready(sink, select.POLLOUT)


def _ready(descriptor: int, event: int) -> None:
    """Wait for a descriptor that another process has made non-blocking."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    _ = waiting.poll()
