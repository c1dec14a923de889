"""Pins that were given while the tape took none: kept in memory until it does.

They are written with the next span of their rollout, in one transaction: a killed gateway must leave no span on the
tape with a version that the rollout's pins do not name. A rollout may make no other call, and one that has seen two
versions must be marked: so all pins are also written a moment later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from penstock.gateway.model.release import Pin
from penstock.gateway.releases.canary.assignment import Requester
from penstock.gateway.releases.operations import PinRequest, ReleaseOperations
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction

_MOST: Final = 16_384
"""Rollouts whose pins are kept."""
_NOBODY: Final = Requester("", "", "online", {})
"""An asker for pins that are all given: nothing is assigned."""
_AT_ONCE, _RETRY_S = 100, 1.0
"""Rollouts whose pins one transaction writes, and seconds until the next try after a tape that took none."""
_log = logging.getLogger("penstock.releases")


class PendingPins:
    """Pending pins by rollout; for the event loop, but for the function that `pin_writer` returns."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pins: dict[str, Sequence[Pin]] = {}
        self._writing = False
        self._most = _AT_ONCE

    def add(self, rollout: str, pins: Sequence[Pin]) -> None:
        """Replace the pending pins of a rollout: all that it has now."""
        if len(self._pins) < _MOST or rollout in self._pins:
            self._pins[rollout] = pins
        if not self._writing:
            self._writing = True
            self._write_later()

    def forget(self, rollout: str) -> None:
        """Drop the pending pins of a forgotten rollout."""
        self._pins.pop(rollout, None)

    def pin_writer(self, rollout: str) -> Callable[[Transaction, SpanEntry], None] | None:
        """Return the function that writes the pins in the transaction of the rollout's next span; None for no pins."""
        pins = self._pins.get(rollout)
        return None if pins is None else partial(_with_span, pins)

    def _write_later(self) -> None:
        _ = asyncio.get_running_loop().call_later(_RETRY_S, self._write)

    def _write(self) -> None:
        some = list(islice(self._pins.items(), self._most))

        def pin(transaction: Transaction) -> None:
            for rollout, pins in some:
                _pin(transaction, rollout, pins)

        self._recorder.submit(pin).add_done_callback(partial(self._written, some))

    def _written(self, some: list[tuple[str, Sequence[Pin]]], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if isinstance(error, TapeError) and not isinstance(error, DamagedRecordError):
            self._write_later()
            return
        if error is not None and len(some) > 1:
            # One of them fails: written one by one, they show which.
            self._most = 1
            self._write()
            return
        for rollout, pins in some:
            if error is not None:
                _log.error("the versions of rollout %s are not on the tape", rollout, exc_info=error)
            if self._pins.get(rollout) is pins:
                del self._pins[rollout]
        self._writing = bool(self._pins)
        if error is not None or not self._writing:
            self._most = _AT_ONCE
        if self._writing:
            self._write()


def _pin(transaction: Transaction, rollout: str, pins: Sequence[Pin]) -> None:
    _ = ReleaseOperations(transaction).pin(PinRequest(rollout, _NOBODY, (), pins), 0)


def _with_span(pins: Sequence[Pin], transaction: Transaction, entry: SpanEntry) -> None:
    try:
        _pin(transaction, entry.rollout, pins)
    except (DamagedRecordError, OperationRefusedError, ValueError) as error:
        # The span is written all the same; `PendingPins` logs the error.
        _log.debug("the versions of rollout %s are not on the tape with its span", entry.rollout, exc_info=error)
