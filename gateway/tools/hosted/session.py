"""One process with its client: assigns each line of the process to the exchange that it belongs to."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Final

import orjson

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.settings import McpServer
from penstock.gateway.tools.hosted.process import ServerProcess
from penstock.gateway.wire.dialects.mcp import (
    JsonRpcMessage,
    cancelled_request_id,
    error_of,
    messages,
    meta,
    progress_token,
)

# Holds the lines that a process has written and a client has not read yet.

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
_log = logging.getLogger("penstock.mcp")


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
