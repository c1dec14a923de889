"""The moments at which the recorder's thread yields the core: between two pieces of its work, the less often the more
is queued.

The kernel lets a thread that computes run on for milliseconds while the event loop waits for the same core, so the
thread yields the core. A loop that is never idle then has it for some milliseconds each time. So the thread does more
between two yields when more is queued: otherwise the queue would grow until it is full, and commits would be late. Each
call then waits for a few pieces, and few calls wait for a whole batch.

Nor does it yield for long: the kernel may run any process, not only this gateway's loop, and on a busy machine each
call would come to the tape late by a slice of each process. When somebody waits for the commit, the time of the loop
counts as well: under load the loop's slices are what makes an operation late.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sized
from functools import partial
from typing import Final

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tape.store.tables import no_op

_QUEUED: Final = 2
_QUEUED_BYTES: Final = 64 << 10
"""Calls and bytes that may be queued for each piece of work between two yields."""
_SPARE_S: Final = 0.010
"""Seconds that others may run for each batch: some slices of the kernel."""
_YIELD: Final[Callable[[], object]] = getattr(os, "sched_yield", no_op)


class LoopYield:
    """The yields of one thread. Made in the thread of the event loop."""

    def __init__(self, metrics: Metrics, queue: Sized, hurry: threading.Event) -> None:
        """`queue`: calls that wait for the next batch; `hurry`: set if somebody waits for it."""
        self._metrics, self._queue, self._hurry = metrics, queue, hurry
        self._hurried = False
        self._until = math.inf
        self._spare = 0.0
        self._pieces = 0
        """Pieces of work since the last yield."""
        self._loop_seconds = _clock_of(threading.get_ident())

    def begin(self, hurried: bool = False, until: float = math.inf) -> None:
        """Called when a batch begins. `hurried`: somebody waits for it; `until`: monotonic time after which it is late,
        and yields no more."""
        self._hurried, self._until, self._spare = hurried, until, _SPARE_S

    def __call__(self) -> None:
        """Called after each piece of work: yield the core if it is time to."""
        pieces = self._pieces = self._pieces + 1
        if pieces * _QUEUED <= len(self._queue) or pieces * _QUEUED_BYTES <= self._metrics.recorder_queue_bytes:
            return
        if self._spare <= 0 or time.monotonic() > self._until:
            return
        self._pieces = 0
        began, loop = time.perf_counter(), self._loop_seconds()
        _YIELD()
        used = 0.0 if self._hurried or self._hurry.is_set() else self._loop_seconds() - loop
        self._spare -= time.perf_counter() - began - used


def _clock_of(thread: int) -> Callable[[], float]:
    """Return a function that reads the CPU time of a thread in seconds; always 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError):
        return float
    return partial(time.clock_gettime, clock)
