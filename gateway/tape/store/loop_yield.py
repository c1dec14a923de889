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

import os
import threading
import time
from collections.abc import Callable
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

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        """Holds the numbers of queued calls and bytes."""
        self._spare = 0.0
        self._pieces = 0
        """Pieces of work since the last yield."""
        self._loop_seconds = _clock_of(threading.get_ident())

    def begin(self) -> None:
        """Called when a batch begins."""
        self._spare = _SPARE_S

    def __call__(self, queued: int, hurry: bool) -> None:
        """Called after each piece of work: yield the core if it is time to. `queued`: calls that wait for the next
        batch; `hurry`: True if somebody waits for this one."""
        self._pieces += 1
        enough = self._pieces * _QUEUED > queued and self._pieces * _QUEUED_BYTES > self._metrics.recorder_queue_bytes
        if self._spare <= 0 or not enough:
            return
        self._pieces = 0
        began, loop = time.perf_counter(), self._loop_seconds()
        _YIELD()
        self._spare -= time.perf_counter() - began - (0.0 if hurry else self._loop_seconds() - loop)


def _clock_of(thread: int) -> Callable[[], float]:
    """Return a function that reads the CPU time of a thread in seconds; always 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError):
        return float
    return partial(time.clock_gettime, clock)
