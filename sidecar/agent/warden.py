"""Starts a command below a warden (`sidecar.agent.supervisor`), and hears what the warden says until it is gone."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.sidecar.agent import pipes, supervisor


class Started(NamedTuple):
    """What is held of it here."""

    process: asyncio.subprocess.Process
    """The warden."""
    control: socket.socket
    """Gives orders; closing it, on purpose or by dying, ends the command and all that it has started."""
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader


async def start(
    command: Sequence[str],
    told: Mapping[str, Any],
    stdin: bytes | int,
    env: Mapping[str, str],
    cwd: Path | None,
) -> Started:
    """Start a command; raises OSError or ValueError when it cannot even be tried. `told`: what its warden is told,
    besides its socket. `stdin`: what the command reads, or a constant of `asyncio.subprocess`.
    """
    with ExitStack() as theirs:
        ours, control = socket.socketpair()
        theirs.callback(control.close)
        try:
            (out, stdout), (err, stderr) = await pipes.output(theirs), await pipes.output(theirs)
            words = json.dumps({"control": control.fileno(), **told})
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", supervisor.__file__, words, *command),
                stdin=await pipes.given(theirs, stdin) if isinstance(stdin, bytes) else stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),  # uvloop takes no other mapping
                cwd=cwd,
                pass_fds=(control.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for whoever starts it alone
            )
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return Started(process, ours, out, err)


async def follow(control: socket.socket) -> dict[str, Any]:
    """All that a warden says until it is gone."""
    loop, said = asyncio.get_running_loop(), b""
    with suppress(OSError, ValueError):  # ValueError: of uvloop, where it is closed already
        while data := await loop.sock_recv(control, 4096):
            said += data
    messages: dict[str, Any] = {}
    for line in said.splitlines():
        messages |= json.loads(line)
    return messages
