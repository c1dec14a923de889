"""The command `penstock mcp wrap`: starts the tool server below a warden, copies bytes as they come, and records them.

Exit codes are the server's own, 128 and its number for a signal; 127 when it cannot be started; 2 when the wrapper is
called wrongly, before anything was started.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Url
from penstock.gateway.model.stdio_frames import CLIENT, SERVER
from penstock.sidecar.run.agent import supervisor
from penstock.sidecar.stdio import spool
from penstock.sidecar.stdio.delivery import Destination, SessionDelivery, SpoolSender, destination_record, say
from penstock.sidecar.stdio.spool import LineSplitter, Spool

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
LAST_S: Final = 1.0
"""The longest time for sending the last lines after the server has ended; s. The next wrapper sends the rest."""
DRAIN_S: Final = 3.0
"""The time for which the server's last output is waited for while none comes; s. A process that it has left behind may
hold its stdout.
"""
_SWITCH_S: Final = 0.0005
"""The longest time for which the sending thread may keep the interpreter from the copying ones; s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """Options of `penstock mcp wrap`: the rollout and the attempt of the session, and the size of its spool."""

    rollout: str | None = None
    """Rollout that the session belongs to. Without it: that of `penstock run`; outside of it one of its own."""
    attempt: str | None = None
    """Attempt of that rollout; a1 if not given."""
    spool: int = 256
    """Megabytes that wait on disk at most while the gateway is away, those of earlier sessions included."""


DEFAULT = WrapOptions()


def wrap(*command: str, name: str, gateway: Url = LOCAL, options: Annotated[WrapOptions, FLAT] = DEFAULT) -> None:
    """Stand before a server of tools on stdin and stdout, and record what passes.

    Put it before the command in an agent's configuration: `penstock mcp wrap --name search -- python server.py`. Bytes
    pass as they are, in both directions; the server works whether the gateway is there or not. What passes while it is
    away is kept on disk and sent later, by the next wrapper at the latest.

    Parameters
    ----------
    command
        The server and its arguments, after `--`.
    name
        What spans call the server.
    """
    if not command:
        raise CommandError(
            "say which server to start, after --: penstock mcp wrap --name search -- python server.py", 2
        )
    if not _NAME.fullmatch(name):
        raise CommandError(f"--name: {name!r} is not up to 64 letters, digits and . _ -", 2)
    for option, value in (("--rollout", options.rollout), ("--attempt", options.attempt)):
        if value is not None and (not _ID.fullmatch(value) or value in (".", "..")):
            raise CommandError(f"{option}: {value!r} is not an id: up to 128 letters, digits and . _ -", 2)
    if options.attempt is not None and options.rollout is None:
        raise CommandError("--attempt is of a rollout: say --rollout, too", 2)
    if options.spool < 1:
        raise CommandError(f"--spool: {options.spool} is not a number of megabytes from 1", 2)
    _run(command, name, find_destination(gateway, options.rollout, options.attempt, os.environ), options.spool << 20)


def _run(command: tuple[str, ...], name: str, home: Destination, spool_bytes: int) -> None:
    sys.setswitchinterval(_SWITCH_S)
    try:
        server = ToolServerProcess(command)
    except OSError as e:
        raise CommandError(f"cannot start {command[0]!r}: {e.strerror}", 127) from None
    for number in FORWARDED:
        _ = signal.signal(number, lambda number, _: server.forward(number))
    if not server.started():
        say(f"{server.error or 'the server could not be started'}: give its command after --, as a shell finds it")
        os._exit(127)
    os._exit(_WrapSession(server, name, home, spool_bytes).run())


class _WrapSession:
    """A session, from the first byte to the last."""

    def __init__(self, server: ToolServerProcess, name: str, home: Destination, spool_bytes: int) -> None:
        self._server = server
        self._spool: Spool | None = None
        self._sender: SpoolSender | None = None
        self._recording: TrafficRecorder | None = None
        self._client_left = False
        self._begin(name, home, spool_bytes)

    def _begin(self, name: str, home: Destination, spool_bytes: int) -> None:
        """Begin to record. A failure of the recording does not prevent the use of the server."""
        try:
            root = spool.directory()
        except RuntimeError:  # this machine does not know the user, as in some containers
            say("nothing is recorded, because this user has no home directory: XDG_STATE_HOME names a place for it")
            return
        folder = root / spool.new_session()
        try:
            room = spool_bytes - spool.bytes_used(root)
            self._spool = Spool(folder, room, min(spool.SEGMENT, spool_bytes // 8))
            spool.write_about(folder, destination_record(home, name))
        except OSError as e:
            say(f"nothing is recorded, because {root} cannot be written ({e.strerror}): XDG_STATE_HOME names another")
            self._spool = None
            return
        delivery = SessionDelivery(self._spool, home, name)
        self._sender = SpoolSender(delivery, root, spool_bytes)
        self._recording = TrafficRecorder(delivery, self._sender)

    def run(self) -> int:
        """Copy until the server has ended; return its exit code."""
        threading.Thread(target=self._from_client, name="penstock-in", daemon=True).start()
        args = (SERVER, self._server.stdout, 1, self._recording)
        out = threading.Thread(target=copy, args=args, name="penstock-out", daemon=True)
        out.start()
        code = self._server.wait()
        self._drain(out)
        self._end(code)
        return code

    def _drain(self, out: threading.Thread) -> None:
        """Wait until the server's last output is written. A client may read it slowly, as it may with the server
        itself; but a client that has asked the server to end by a signal reads no more.
        """
        while out.is_alive():
            out.join(DRAIN_S)
            if self._server.signalled or not self._server.has_output:
                return

    def _from_client(self) -> None:
        copy(CLIENT, 0, self._server.stdin, self._recording)
        self._client_left = True

    def _end(self, code: int) -> None:
        if self._spool is None or self._sender is None or self._recording is None:
            return
        by = "client" if self._client_left or self._server.signalled else "server"
        self._spool.end(by, code, self._recording.now_ns())
        self._sender.close(LAST_S)


# The tool server: a process below a warden (`sidecar.run.agent.supervisor`), with pipes for stdin and stdout. When the
# wrapper dies in any way, the warden ends the server and all that it has started. stderr is the wrapper's own.

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


# Finds the rollout of a wrapper: the one on the command line, else the one that `penstock run` has set.
#
# MCP clients often give a server only a few of their variables; the official SDKs do. So missing ones are taken from
# the parent processes, which are the agent's own, if they belong to this user.

ADDRESS: Final = "PENSTOCK_URL"
TOKEN, ADMIN_KEY = "PENSTOCK_TOKEN", "PENSTOCK_ADMIN_KEY"
_ABOVE: Final = 16
"""The most parent processes that are examined."""


def find_destination(gateway: str, rollout: str | None, attempt: str | None, own: Mapping[str, str]) -> Destination:
    """The address and key that a session is sent with. Without a rollout the gateway makes one for it."""
    if rollout is not None:
        address = f"{gateway.rstrip('/')}/rollout/{rollout}/attempt/{attempt or 'a1'}"
        return Destination(address, own.get(TOKEN) or own.get(ADMIN_KEY))
    known = own if ADDRESS in own else inherited(os.getppid())
    if address := known.get(ADDRESS):
        return Destination(address.rstrip("/"), known.get(TOKEN))
    return Destination(gateway.rstrip("/"), own.get(TOKEN) or own.get(ADMIN_KEY))


def inherited(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables of the nearest process, from `pid` upwards, that has the address of a rollout; empty when none
    has.
    """
    for _ in range(_ABOVE):
        try:
            lines = (proc / str(pid) / "environ").read_bytes().split(b"\0")
            above = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1]
        except (OSError, IndexError):
            break
        pairs = (line.decode(errors="replace").partition("=") for line in lines)
        found = {name: value for name, _, value in pairs}
        if ADDRESS in found:
            return found
        pid = int(above)
    return {}
