"""When the recorder's thread lets others run: between two pieces of its work, the less often the more is queued.

The kernel lets a thread that computes run on for milliseconds while the event loop waits for the same core: the thread
gives the core up. A loop that is never idle then has it for some milliseconds each time, so the thread does more
between two times where more waits for it: otherwise the queue would grow until it is full, and who waits for a commit
would wait for long. Calls wait for some pieces each, and few for a whole batch.

Nor does it give way to others for long: the kernel lets any process go first, not this gateway's loop alone, and on a
busy machine each call would come to the tape late by a slice of each. Where somebody waits for the commit, the loop is
one of these others: under load its slices are what makes an operation late.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.gateway.metrics import Metrics
from penstock.gateway.store.batch import nothing

_QUEUED: Final = 2
_QUEUED_BYTES: Final = 64 << 10
"""What may be queued for each piece of work between two times."""
_SPARE_S: Final = 0.010
"""How long others may run for each batch: some slices of the kernel."""
_YIELD: Final[Callable[[], object]] = getattr(os, "sched_yield", nothing)


class GivingWay:
    """Of one thread. Made by that of the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        """They tell what is queued and what is being written."""
        self._spare = 0.0
        self._pieces = 0
        """Since it has last given way."""
        self._loop_seconds = _clock_of(threading.get_ident())

    def begin(self) -> None:
        """A batch begins."""
        self._spare = _SPARE_S

    def __call__(self, queued: int, hurry: bool) -> None:
        """A piece of work is done: lets others run, if this is a time for it. `queued`: calls that wait for the next
        batch; `hurry`: whether somebody waits for this one."""
        self._pieces += 1
        enough = self._pieces * _QUEUED > queued and self._pieces * _QUEUED_BYTES > self._metrics.recorder_queue_bytes
        if self._spare <= 0 or not enough:
            return
        self._pieces = 0
        began, loop = time.perf_counter(), self._loop_seconds()
        _YIELD()
        self._spare -= time.perf_counter() - began - (0.0 if hurry else self._loop_seconds() - loop)


def _clock_of(thread: int) -> Callable[[], float]:
    """The CPU time of a thread in seconds; always 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError):
        return float
    return lambda: time.clock_gettime(clock)
