"""One process of a server: its lines, its stderr, and how it ended.

A warden (`sidecar.run.agent.supervisor`) stands between the gateway and the server. It kills all processes that the
server has started and left behind, also when the gateway dies. Lines do not pass through it: the pipes are the server's
own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.settings import McpServer
from penstock.sidecar.run.agent.process import WardenProcess, read_messages, start_warden

LINE: Final = 64 << 20
"""Largest line in bytes; a process that writes a longer one is killed."""
OPEN_FILES: Final = 4096
"""Most open files of each process of a server: more than a server of tools needs, and a fraction of the machine's."""
GRACE_S: Final = 2.0
"""Seconds between the end of stdin and TERM, and between TERM and KILL."""
_READ: Final = 1 << 16
_SAID, _SAID_LINE = 20, 1000
"""The number of last lines of stderr that are kept, and the characters of each."""
_LOGGED, _WINDOW_S = 100, 10.0
"""Most lines of a process that are logged within so many seconds."""
_DRAIN_S: Final = 2.0
"""Longest wait for output after the process tree has ended."""
_PASSED: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ")
"""Variables of the gateway's environment that every server gets."""
_log = logging.getLogger("penstock.mcp")


class LineTooLongError(Exception):
    """A line exceeds the limit."""


class ServerProcess:
    """A running server. `run` starts it and returns when its whole process tree has ended."""

    def __init__(
        self, name: str, config: McpServer, secrets: Secrets, on_line: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """`secrets`: masked wherever the process's output is kept."""
        self.name, self._config, self._secrets, self._on_line = name, config, secrets, on_line
        self.last_lines: deque[str] = deque(maxlen=_SAID)
        """Its last lines on stderr, and lines on stdout that are no messages."""
        self.exit_reason = ""
        """The way it ended, in words; empty while it runs."""
        self.stop_requested = False
        """True if the gateway stopped it."""
        self.pid = 0
        self._why, self._gone = "", False
        self._control: socket.socket | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._started = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stopping: asyncio.TimerHandle | None = None
        self._window, self._in_window = 0.0, 0

    async def run(self) -> None:
        """Runs the process to its end, and sets `exit_reason`."""
        try:
            made = await self._spawn()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.exit_reason = f"cannot be started in {self._config.cwd or os.getcwd()}: {reason}"
            self._started.set()
            return
        self._child, self._control, self.pid = made.process, made.control, made.process.pid
        readers = [asyncio.ensure_future(self._read(made.stdout)), asyncio.ensure_future(self._listen(made.stderr))]
        self._started.set()
        try:
            told = await read_messages(made.control)
            _ = await asyncio.wait(readers, timeout=_DRAIN_S)
        finally:
            self._gone = True
            for reader in readers:
                reader.cancel()
            made.stdout.close()
            made.stderr.close()
            if self._stopping is not None:
                self._stopping.cancel()
            made.control.close()
        _ = await made.process.wait()
        self.exit_reason = _ending(told, self._why)

    async def _spawn(self) -> WardenProcess:
        config = self._config
        told: dict[str, Any] = {"grace_s": GRACE_S, "after": [], "limits": {"NOFILE": OPEN_FILES}}
        env = environment(self.name, config)
        return await start_warden(config.command or (), told, asyncio.subprocess.PIPE, env, config.cwd)

    async def write(self, line: bytes) -> None:
        """Writes a line to stdin. Raises `OSError` if the process no longer reads."""
        await self._started.wait()
        async with self._writing:
            child = self._child
            if child is None or child.stdin is None or child.stdin.is_closing() or self._gone:
                raise BrokenPipeError("it does not read any more")
            child.stdin.write(line + b"\n")
            await child.stdin.drain()

    def stop(self) -> None:
        """Stops it as servers on stdin expect: closes its stdin; TERM and KILL follow for a process that
        ignores this."""
        if self.stop_requested:
            return
        self.stop_requested = True
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        self._stopping = asyncio.get_running_loop().call_later(GRACE_S, self._order, b"T")

    def give_up(self) -> None:
        """Ends a process that no longer reads or cannot answer."""
        if not self.stop_requested:
            self._order(b"T")

    def kill(self, why: str) -> None:
        """Kills the process tree at once. `why`: the process's fault, in words."""
        self._why = self._why or why
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):
                _ = self._control.send(order)

    # Output ---------------------------------------------------------------------------------------------------------

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        try:
            async for line in _lines(stdout, LINE):
                await self._on_line(line)
        except LineTooLongError:
            self.kill(f"wrote a line of more than {LINE >> 20} MiB")
        except Exception:
            _log.exception("a line of MCP server %r could not be handled", self.name)
            self.kill("wrote a line on which the gateway failed (its log says why)")
        else:
            self.give_up()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stderr.read(_READ):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self.note(line)
            if len(rest) > _READ:
                self.note(rest)
                rest = b""
        self.note(rest)

    def note(self, line: bytes) -> None:
        """Keeps and logs a line that is no message; of very many lines only some are logged."""
        text = self._secrets.text(line[: 4 * _SAID_LINE].decode("utf-8", "replace").rstrip())[:_SAID_LINE]
        if not text:
            return
        self.last_lines.append(text)
        now = monotonic()
        if now - self._window > _WINDOW_S:
            if self._in_window > _LOGGED:
                _log.info("%s: (%d lines are left out)", self.name, self._in_window - _LOGGED)
            self._window, self._in_window = now, 0
        self._in_window += 1
        if self._in_window <= _LOGGED:
            _log.info("%s: %s", self.name, text)


def environment(name: str, config: McpServer) -> dict[str, str]:
    """The environment variables of a server: a few that every program needs, and the configured ones."""
    base = {key: os.environ[key] for key in _PASSED if key in os.environ}
    return base | config.keys(name) | config.env


async def _lines(stream: asyncio.StreamReader, longest: int) -> AsyncGenerator[bytes]:
    """The lines of a stream, without their ends."""
    parts, size = list[bytes](), 0
    while data := await stream.read(_READ):
        *whole, rest = data.split(b"\n")
        for line in whole:
            yield b"".join((*parts, line))
            parts, size = [], 0
        if rest:
            parts.append(rest)
            size += len(rest)
        if size > longest:
            raise LineTooLongError
    if parts:
        yield b"".join(parts)


def _ending(told: dict[str, Any], why: str) -> str:
    """The way it ended, from the warden's report. `why`: the reason for which it was killed."""
    if error := told.get("error"):
        return str(error)
    if "status" not in told:
        return "ended with the process that watched it"
    code = os.waitstatus_to_exitcode(told["status"])
    if why and code == -signal.SIGKILL:
        return why
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
