"""When the recorder's thread lets others run: between two calls, while few are queued, and for a moment in each batch.

The kernel lets a thread that computes run on for milliseconds while the event loop waits for the same core: the thread
gives the core up. While much is queued it does not, or a loop that is never idle would go on until the queue is full.
Nor does it for long: the kernel lets any process go first, not this gateway's alone, and on a busy machine each call
would come to the tape late by a slice of each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from penstock.gateway.metrics import Metrics
from penstock.gateway.store.batch import nothing

_FEW: Final = 64
_FEW_BYTES: Final = 4 << 20
"""What may be queued meanwhile: some times what comes during a commit."""
_SPARE_S: Final = 0.010
"""How long others may run for each batch: some slices of the kernel, many turns of the loop."""
_YIELD: Callable[[], object] = getattr(os, "sched_yield", nothing)


class GivingWay:
    """Of one thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        """They tell what is queued and what is being written."""
        self._spare = 0.0

    def begin(self) -> None:
        """A batch begins."""
        self._spare = _SPARE_S

    def __call__(self, queued: int) -> None:
        """Lets others run, if this is a time for it. `queued`: calls that wait for the next batch."""
        if self._spare > 0 and queued < _FEW and self._metrics.recorder_queue_bytes < _FEW_BYTES:
            began = time.perf_counter()
            _YIELD()
            self._spare -= time.perf_counter() - began
