"""Copies bytes from one descriptor to the other as they come, and hands them to a recorder when they have gone out."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

from penstock.gateway.model.passed import CLIENT, SERVER
from penstock.sidecar.wrapping.lines import Lines
from penstock.sidecar.wrapping.sending import Delivery, Sender, say

READ: Final = 1 << 16
"""Bytes of one read: what a pipe holds. More costs short lines time, and helps long ones little."""


class Recording:
    """What has passed in both directions, in its order: an answer never stands before its request."""

    def __init__(self, delivery: Delivery, sender: Sender) -> None:
        self._delivery, self._sender = delivery, sender
        self._lines = {CLIENT: Lines(), SERVER: Lines()}
        self._passing: deque[tuple[int, bytes, int]] = deque()
        """What was read and is being written, one read of each direction at most."""
        self._lock = threading.Lock()
        self._failed = False
        # Times do not run backwards, whatever is done to the machine's clock.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """The time."""
        return self._epoch_ns + time.monotonic_ns()

    def comes(self, kind: int, data: bytes) -> None:
        """This was read and goes out now; no byte is the end of that direction."""
        if not self._failed:
            self._passing.append((kind, data, self.now_ns()))

    def gone(self) -> None:
        """It has gone out. What the other direction has read before is recorded first: it may be what was answered."""
        if self._failed:
            return
        try:
            with self._lock:
                while self._passing:
                    self._record(*self._passing.popleft())
            self._sender.wake()
        except Exception as e:
            # Whatever is wrong with the recording is not to be the tool's problem.
            self._failed = True
            say(f"recording has failed ({type(e).__name__}: {e}); the tool works")

    def _record(self, kind: int, data: bytes, now_ns: int) -> None:
        lines = self._lines[kind]
        lines.limit = self._delivery.recorded_bytes or lines.limit
        self._delivery.spool.put(kind, lines.feed(data) if data else lines.close(), now_ns)


def copy(kind: int, source: int, sink: int, recording: Recording | None) -> None:
    """Copies until the source ends or the sink wants no more, and closes both: so each end hears of the other's."""
    with suppress(OSError):
        while data := _read(source):
            if recording is not None:
                recording.comes(kind, data)
            try:
                _write(sink, data)
            finally:
                if recording is not None:
                    recording.gone()
    for descriptor in (sink, source):
        with suppress(OSError):
            _close(descriptor)
    if recording is not None:
        recording.comes(kind, b"")
        recording.gone()


def _close(descriptor: int) -> None:
    """Closes it. The numbers of stdin and stdout stay taken: no file may get them and what is written there."""
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
    """Waits for a descriptor that somebody has made non-blocking."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    _ = waiting.poll()
