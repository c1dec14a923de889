"""A process of a hosted server with its client: its lines, its stderr, its end, and the exchange of each line.

A warden (`sidecar.run.agent.supervisor`) stands between the gateway and the server. It kills all processes that the
server has started and left behind, also when the gateway dies. Lines do not pass through it: the pipes are the server's
own.

Only some lines name their request: an answer by its id, progress by its token, a notification of a subscription by the
request that listens. Other requests and log messages of the server belong to the only open request; if several are
open, to the stream that listens, and without one to the newest request. Everything else (`list_changed`, resources that
were updated) goes to the stream that listens, or waits for one: 1,000 messages at most, of which the oldest are dropped
first. A client that reads slowly slows its process down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import orjson

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.settings import McpServer
from penstock.gateway.wire.dialects.mcp import (
    JsonRpcMessage,
    cancelled_request_id,
    error_of,
    messages,
    meta,
    progress_token,
)
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


# -- the client: lines that it has not read yet, and the exchange of each line ----------------------------------------

_FULL: Final = 1 << 20
"""Waiting bytes above which the process is read no further."""
_WAITING, _WAITING_BYTES = 1000, 8 << 20
"""Most messages, and bytes, that wait while no client listens."""


class LineQueue:
    """Lines for one client. `next` returns them in order."""

    def __init__(self) -> None:
        self.attached = False
        """True if a client reads them."""
        self.dropped = 0
        """Lines that were dropped because too many waited while no client listened."""
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def at_end(self) -> bool:
        """True if no line follows those that `next` has returned."""
        return self._ended and not self._lines

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        if self._size > _FULL:
            self._room.clear()
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._room.set()
        self._changed.set()

    async def next(self) -> bytes | None:
        """Returns the next line, waiting for it; None at the end of the stream."""
        while not self._lines:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        line = self._lines.popleft()
        self._size -= len(line)
        if self._size <= _FULL:
            self._room.set()
        return line

    async def wait_for_room(self) -> None:
        """Waits for a slow client. Without a client, drops the oldest lines above the limit."""
        if self.attached:
            await self._room.wait()
        else:
            while len(self._lines) > _WAITING or (self._size > _WAITING_BYTES and len(self._lines) > 1):
                self._size -= len(self._lines.popleft())
                self.dropped += 1

    def detach(self) -> None:
        """Called when the client has left."""
        self.attached = False
        self._room.set()

    def take_over(self, other: LineQueue) -> None:
        """Takes the waiting lines of another stream and ends that."""
        for line in other._lines:
            self.put(line)
        other._lines.clear()
        other.end()


class PostExchange(LineQueue):
    """The requests of a client in one POST, and the lines that belong to them."""

    def __init__(self, asks: list[JsonRpcMessage], tokens: set[bytes], listens: bool) -> None:
        """`tokens`: its progress tokens; `listens`: True if its answer is an endless stream."""
        super().__init__()
        self.requests, self.tokens, self.listens = asks, tokens, listens
        self.attached = True
        self.waiting = {one.id for one in asks}
        """Ids that are not answered."""
        self.over = asyncio.Event()
        """Set when its ids may be used again."""

    def answered(self, id: bytes) -> None:
        """Removes an answered request; the last one ends the exchange."""
        self.waiting.discard(id)
        if not self.waiting:
            self.end()
            self.over.set()


LISTEN: Final = "subscriptions/listen"
"""The request whose answer is an endless stream (2026-07-28)."""
Owner = tuple[str, str]
"""Rollout and attempt that a session belongs to; empty strings if the client named none."""
_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
_OF_A_REQUEST: Final = frozenset({"notifications/message", "notifications/cancelled"})
"""Notifications that a server sends because of a request, without naming it."""
_CANCELLED_S: Final = 2.0
"""Seconds in which a request that its client has cancelled may still be answered."""


class ProcessSession:
    """One process of a server with its open requests."""

    def __init__(
        self, name: str, config: McpServer, secrets: Secrets, owner: Owner, ended: Callable[[ProcessSession], None]
    ) -> None:
        """`ended`: called when the whole process tree has ended."""
        self.name, self.owner = name, owner
        self.process = ServerProcess(name, config, secrets, self._on_line)
        self.id = ""
        """The session id of the client; empty for revisions without sessions."""
        self.answered = False
        """True if the process has answered anything."""
        self.last_active = monotonic()
        """Monotonic seconds of the last sign of its client."""
        self.last_checked = 0.0
        """Monotonic seconds of the last check whether its attempt has ended."""
        self.listener = LineQueue()
        """Lines that belong to no request."""
        self._open: dict[bytes, PostExchange] = {}
        self._ended = ended
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.process.run()
        finally:
            self.process.exit_reason = self.process.exit_reason or "was ended with the gateway"
            for id in list(self._open):
                self._fail(id, 502, self.exit_summary(), "mcp_process")
            self.listener.end()
            self._ended(self)

    def exit_summary(self) -> str:
        """The way the process ended and its last lines, as a sentence."""
        said = " | ".join(list(self.process.last_lines)[-3:])
        return f"MCP server {self.name!r} {self.process.exit_reason}; its last words: {said or 'none'}"

    @property
    def in_use(self) -> bool:
        """True if a client waits for lines of the process."""
        return self.listener.attached or any(one.attached for one in self._open.values())

    @property
    def idle(self) -> bool:
        """True if no request is open, not even one whose client has left."""
        return not self._open

    def holder(self, ids: Iterable[bytes]) -> PostExchange | None:
        """The exchange in which one of these ids is open."""
        return next((self._open[id] for id in ids if id in self._open), None)

    # From the client ------------------------------------------------------------------------------------------------

    async def request(self, sent: list[JsonRpcMessage], line: bytes) -> PostExchange:
        """Sends requests. The exchange collects the lines that belong to them until `release` is called with it."""
        asks = [one for one in sent if one.kind == "request"]
        found = {_written(about["progressToken"]) for one in asks if "progressToken" in (about := meta(one))}
        tokens = {one for one in found if one is not None}
        exchange = PostExchange(asks, tokens, any(one.method == LISTEN for one in asks))
        self._open |= dict.fromkeys(exchange.waiting, exchange)
        try:
            await self.send(sent, line)
        except asyncio.CancelledError:
            # The client left before the process got the requests: they will not be answered.
            exchange.detach()
            for one in asks:
                self._open.pop(one.id, None)
                exchange.answered(one.id)
            raise
        for one in asks if self.process.exit_reason else ():
            self._fail(one.id, 502, self.exit_summary(), "mcp_process")
        return exchange

    def _fail(self, id: bytes, status: int, message: str, reason: str) -> None:
        """Answers a request in place of the process."""
        exchange = self._open.pop(id, None)
        if exchange is not None:
            exchange.put(error_of(id, status, message, reason, None))
            exchange.answered(id)

    async def send(self, sent: list[JsonRpcMessage], line: bytes) -> None:
        """Sends messages that need no answer."""
        self.last_active = monotonic()
        try:
            await self.process.write(line)
        except OSError:
            # The process has ended or will end, which answers its open requests with an error.
            self.process.give_up()
        for one in sent:
            if (unwanted := cancelled_request_id(one)) is not None and unwanted in self._open:
                asyncio.get_running_loop().call_later(_CANCELLED_S, self._give_up, unwanted, self._open[unwanted])

    def _give_up(self, id: bytes, exchange: PostExchange) -> None:
        """Answers a cancelled request with an error if the process has not answered it."""
        if self._open.get(id) is exchange:
            self._fail(id, 499, "the client has cancelled this request", "client_cancelled")

    async def release(self, exchange: PostExchange, cancels: bool) -> None:
        """Called when the client has the answer, or has left. `cancels`: True if leaving cancels the open requests."""
        exchange.detach()
        self.last_active = monotonic()
        for id in [id for id in exchange.waiting if cancels and self._open.get(id) is exchange]:
            params = {"requestId": orjson.Fragment(id), "reason": "the client has closed the stream"}
            unwanted: dict[str, Any] = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            line = orjson.dumps(unwanted)
            await self.send(messages(line), line)

    def listen(self) -> LineQueue:
        """Opens the stream of lines that belong to no request; an earlier one ends."""
        if self.listener.dropped:
            _log.warning(
                "MCP server %r: %d messages were dropped before anybody listened", self.name, self.listener.dropped
            )
        stream = LineQueue()
        stream.take_over(self.listener)
        stream.attached = True
        self.listener = stream
        self.last_active = monotonic()
        return stream

    # From the process -----------------------------------------------------------------------------------------------

    async def _on_line(self, line: bytes) -> None:
        line = line.strip(b" \t\r")
        told = messages(line) if line else []
        if any(one.kind == "unreadable" for one in told):
            self.process.note(b"(stdout) " + line[:2000])
            return
        # A CR between tokens may become a space; in an event it would end the line.
        line = line.replace(b"\r", b" ")
        streams = list[LineQueue]()
        for one in told:
            stream = self._open.get(one.id) if one.kind == "answer" else self._place(one)
            if stream is None:
                _log.debug("a message of MCP server %r belongs to nobody", self.name)
                continue
            if stream not in streams:
                stream.put(line)
                streams.append(stream)
            if one.kind == "answer":
                self.answered = True
                self._open.pop(one.id).answered(one.id)
        for stream in streams:
            await stream.wait_for_room()

    def _place(self, one: JsonRpcMessage) -> LineQueue | None:
        """The stream of a message that is no answer; None to drop it."""
        if one.method == "notifications/progress":
            of = progress_token(one)
            return next((found for found in self._open.values() if of in found.tokens), None) or self._nobody
        subscription = meta(one).get(_SUBSCRIPTION)
        if subscription is not None:
            return self._open.get(_written(subscription) or b"")
        if one.kind != "request" and one.method not in _OF_A_REQUEST:
            return self._nobody
        waiting = [found for found in self._open.values() if found.attached and not found.listens]
        if not waiting or (len(waiting) > 1 and self.listener.attached):
            return self._nobody
        return waiting[-1]

    @property
    def _nobody(self) -> LineQueue | None:
        """The stream of messages that belong to no request; None for revisions without sessions, which have no such
        stream."""
        return self.listener if self.id else None


def _written(value: Any) -> bytes | None:
    """An id or a token as canonical JSON; None for a value that no id can have, such as a number without bounds."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return None
