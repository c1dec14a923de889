"""What rollouts were given while the tape took no pin: kept until it does."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import islice
from typing import Final

from penstock.gateway.releases.operations import ReleaseOperations, Wanted
from penstock.gateway.store.directory import Damaged, TapeError
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.store.transaction import Transaction

_MOST: Final = 16_384
"""Rollouts that are kept."""
_AT_ONCE, _RETRY_S = 100, 1.0
"""Pins that one transaction catches up with, and how long after a tape that took none."""
_log = logging.getLogger("penstock.releases")


class Unwritten:
    """By rollout; for the event loop. They may make no other call, and what has seen two versions must be marked."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wanted: dict[str, Wanted] = {}
        self._writing = False
        self._most = _AT_ONCE

    def add(self, wanted: Wanted) -> None:
        """What a rollout is given now, in place of what it was."""
        if len(self._wanted) < _MOST or wanted.rollout in self._wanted:
            self._wanted[wanted.rollout] = wanted
        if not self._writing:
            self._writing = True
            self._write_later()

    def forget(self, rollout: str) -> None:
        """It was forgotten."""
        self._wanted.pop(rollout, None)

    def _write_later(self) -> None:
        _ = asyncio.get_running_loop().call_later(_RETRY_S, self._write)

    def _write(self) -> None:
        wanted = list(islice(self._wanted.values(), self._most))

        def pin(transaction: Transaction) -> None:
            for one in wanted:
                # All that it needs is given: nobody is assigned now.
                _ = ReleaseOperations(transaction).pin(one, 0)

        self._recorder.submit(pin).add_done_callback(partial(self._written, wanted))

    def _written(self, wanted: list[Wanted], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if isinstance(error, TapeError) and not isinstance(error, Damaged):
            self._write_later()
            return
        if error is not None and len(wanted) > 1:
            # Which of them it is shows one by one.
            self._most = 1
            self._write()
            return
        for one in wanted:
            if error is not None:
                _log.error("the versions of rollout %s are not on the tape", one.rollout, exc_info=error)
            if self._wanted.get(one.rollout) is one:
                del self._wanted[one.rollout]
        self._writing = bool(self._wanted)
        if error is not None or not self._writing:
            self._most = _AT_ONCE
        if self._writing:
            self._write()
