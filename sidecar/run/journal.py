"""The journal of an attempt: lines of output and other events, in their order, on their way to the tape.

An agent never waits for it: its output is taken at once, and up to `keep` bytes of it are kept. The first half of these
goes to the gateway as it comes, in batches. Later output waits in a ring of the other half's size, so that the end of a
long output, where errors are, is kept too. An event `output_dropped` counts the characters that were dropped between
the two. While the gateway is away, everything waits here. The last batch goes with the attempt's end, in one request. A
batch whose answer was lost is sent again: `piece` numbers the events of a runner, so that a repeated one can be
recognised.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.gateway.model.queue import Event, Scalar
from penstock.sidecar.run.agent.output import Stream

BATCH_S = 0.2
"""The time that the first event of a batch waits for others; s."""
LARGEST_EVENT, LARGEST_BATCH, MOST_EVENTS = 16 << 10, 256 << 10, 500
"""Limits: characters of one event's text, characters of one request, events of one request."""

Send = Callable[[list[Event]], Awaitable[bool]]


@dataclass(slots=True)
class _OutputLine:
    stream: Stream
    time_ns: int
    text: str


class Journal:
    """The events of one attempt. `send` returns True once they are stored, or False when the gateway wants no more."""

    def __init__(self, send: Send, keep: int) -> None:
        self._send = send
        self._waiting: deque[_OutputLine | Event] = deque()
        self._head, self._half = keep - keep // 2, keep // 2
        self._tail: deque[_OutputLine] = deque()
        self._tail_size = self._dropped = self._pieces = 0
        self._news, self._closed = asyncio.Event(), asyncio.Event()
        self._refused = False

    def line(self, stream: Stream, text: str) -> None:
        """Add a line of output."""
        for at in range(0, len(text) or 1, LARGEST_EVENT):
            piece = _OutputLine(stream, time.time_ns(), text[at : at + LARGEST_EVENT])
            size = len(piece.text) + 1
            if not self._tail and not self._dropped and size <= self._head:
                self._head -= size
                self._put(piece)
            else:
                self._keep_last(piece, size)

    def event(self, name: str, attributes: dict[str, Scalar]) -> None:
        """Add an event that is not output."""
        self._put(Event(name=name, time_ns=time.time_ns(), attributes=attributes))

    def _keep_last(self, piece: _OutputLine, size: int) -> None:
        self._tail.append(piece)
        self._tail_size += size
        while self._tail_size > self._half:
            gone = len(self._tail.popleft().text) + 1
            self._tail_size -= gone
            self._dropped += gone

    def _put(self, item: _OutputLine | Event) -> None:
        self._waiting.append(item)
        self._news.set()

    def release(self) -> None:
        """Send the held back end of the output too, because the agent has ended."""
        if self._dropped:
            self.event("output_dropped", {"characters": self._dropped})
        self._waiting.extend(self._tail)
        self._tail.clear()
        self._tail_size = self._dropped = 0
        self._news.set()

    async def run(self) -> None:
        """Send events until the journal is closed, or the gateway wants no more."""
        while not self._closed.is_set():
            _ = await self._news.wait()
            await self._gather()
            while not self._closed.is_set() and (batch := self._batch()):
                if not await self._send(batch):
                    self._refused = True
                    return
            self._news.clear()

    async def _gather(self) -> None:
        """Wait for the batch to grow, or until the journal is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BATCH_S):
                _ = await self._closed.wait()

    def close(self) -> None:
        """Take no more events; `run` ends after the batch that it is sending."""
        self.release()
        self._closed.set()

    async def last(self) -> list[Event]:
        """Send the rest after `run` has ended, except the last batch, which is returned for the caller to send."""
        while not self._refused and (batch := self._batch()):
            if not self._waiting:
                return batch
            self._refused = not await self._send(batch)
        return []

    def _batch(self) -> list[Event]:
        events: list[Event] = []
        size = 0
        while self._waiting and size < LARGEST_BATCH and len(events) < MOST_EVENTS:
            event = self._next()
            self._pieces += 1
            event.attributes["piece"] = self._pieces
            events.append(event)
            size += len(str(event.attributes.get("text", "")))
        return events

    def _next(self) -> Event:
        """The next event; consecutive lines of one stream become one event."""
        first = self._waiting.popleft()
        if isinstance(first, Event):
            return first
        texts, size = [first.text], len(first.text)
        while self._waiting and isinstance(after := self._waiting[0], _OutputLine) and after.stream == first.stream:
            size += len(after.text) + 1
            if size > LARGEST_EVENT:
                break
            texts.append(after.text)
            _ = self._waiting.popleft()
        return Event(name=first.stream, time_ns=first.time_ns, attributes={"text": "\n".join(texts)})
