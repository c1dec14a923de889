"""The command `penstock mcp wrap`.

Exit codes are the server's own, 128 and its number for a signal; 127 when it cannot be started; 2 when the wrapper is
called wrongly, before anything was started.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Url
from penstock.sidecar.stdio.delivery import Destination

if TYPE_CHECKING:
    from penstock.sidecar.stdio.delivery import SpoolSender
    from penstock.sidecar.stdio.server import ToolServerProcess, TrafficRecorder
    from penstock.sidecar.stdio.spool import Spool

Command = Annotated[str, Parameter(allow_leading_hyphen=True)]
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


def wrap(*command: Command, name: str, gateway: Url = LOCAL, options: Annotated[WrapOptions, FLAT] = DEFAULT) -> None:
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
    from penstock.sidecar.stdio.delivery import say
    from penstock.sidecar.stdio.server import FORWARDED, ToolServerProcess

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
        from penstock.sidecar.stdio import spool
        from penstock.sidecar.stdio.delivery import SessionDelivery, SpoolSender, destination_record, say
        from penstock.sidecar.stdio.server import TrafficRecorder

        try:
            root = spool.directory()
        except RuntimeError:  # this machine does not know the user, as in some containers
            say("nothing is recorded, because this user has no home directory: XDG_STATE_HOME names a place for it")
            return
        folder = root / spool.new_session()
        try:
            room = spool_bytes - spool.bytes_used(root)
            self._spool = spool.Spool(folder, room, min(spool.SEGMENT, spool_bytes // 8))
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
        from penstock.gateway.model.stdio_frames import SERVER

        threading.Thread(target=self._from_client, name="penstock-in", daemon=True).start()
        out = threading.Thread(target=self._copy, args=(SERVER, self._server.stdout, 1), name="penstock-out")
        out.daemon = True
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
        from penstock.gateway.model.stdio_frames import CLIENT

        self._copy(CLIENT, 0, self._server.stdin)
        self._client_left = True

    def _copy(self, kind: int, source: int, sink: int) -> None:
        from penstock.sidecar.stdio.server import copy

        copy(kind, source, sink, self._recording)

    def _end(self, code: int) -> None:
        if self._spool is None or self._sender is None or self._recording is None:
            return
        by = "client" if self._client_left or self._server.signalled else "server"
        self._spool.end(by, code, self._recording.now_ns())
        self._sender.close(LAST_S)


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
