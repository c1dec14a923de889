"""Starts a command below a warden (`sidecar.run.agent.supervisor`), reads the warden's messages until it is gone."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.sidecar.run.agent import output, supervisor


class WardenProcess(NamedTuple):
    """A warden that was started: its process, its control socket, and the outputs of its command."""

    process: asyncio.subprocess.Process
    """The warden."""
    control: socket.socket
    """The socket for orders; when it closes, on purpose or because this process dies, the command and all that it has
    started end.
    """
    stdout: output.OutputPipe
    stderr: output.OutputPipe


async def start(
    command: Sequence[str],
    told: Mapping[str, Any],
    stdin: bytes | int,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> WardenProcess:
    """Start a command below a warden. Raises OSError or ValueError when it cannot be started. `told`: more settings for
    the warden, besides its socket. `stdin`: bytes for the command, or a constant of `asyncio.subprocess`.
    """
    with ExitStack() as theirs:
        ours, control = socket.socketpair()
        theirs.callback(control.close)
        try:
            (out, stdout), (err, stderr) = await output.output_pipe(theirs), await output.output_pipe(theirs)
            words = json.dumps({"control": control.fileno(), **told})
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", supervisor.__file__, words, *command),
                stdin=await output.input_pipe(theirs, stdin) if isinstance(stdin, bytes) else stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),  # uvloop takes no other mapping
                cwd=cwd,
                pass_fds=(control.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the starting process alone
            )
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return WardenProcess(process, ours, out, err)


async def read_messages(control: socket.socket) -> dict[str, Any]:
    """Read the warden's messages until it is gone; return them merged into one object."""
    loop, said = asyncio.get_running_loop(), b""
    with suppress(OSError, ValueError):  # ValueError: from uvloop, when the socket is closed already
        while data := await loop.sock_recv(control, 4096):
            said += data
    messages: dict[str, Any] = {}
    for line in said.splitlines():
        messages |= json.loads(line)
    return messages
