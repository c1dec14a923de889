"""Copies bytes from one descriptor to another as they come, and records them once they are written."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

from penstock.gateway.model.stdio_frames import CLIENT, SERVER
from penstock.sidecar.wrapping.delivery import SessionDelivery, SpoolSender, say
from penstock.sidecar.wrapping.lines import LineSplitter

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
