"""What is damaged on the tape, for those who go on without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.gateway.store.codec import TORN
from penstock.gateway.store.directory import Damaged, TapeError

T = TypeVar("T")

DAMAGE: Final[tuple[type[Exception], ...]] = (Damaged, *TORN)
"""What reading a record raises, within a transaction, whenever it is tried."""
_TOLD: Final = 1000
"""Damaged places that are remembered."""
_CHECK: Final = "; run `penstock check`"
_log = logging.getLogger("penstock.tape")


class PassedOver:
    """What those who read very much leave out of it, because it is damaged. The log is told of each once."""

    def __init__(self) -> None:
        self._told = set[str]()

    def __call__(self, what: str, error: Exception) -> None:
        """`what` is left out: reading it has failed so."""
        if what in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(what)
        why = str(error).removesuffix(_CHECK)
        _log.error("left out, because it is damaged: %s: %s%s", what, why, _CHECK)


def is_damage(error: TapeError) -> bool:
    """Whether it would fail again whenever it is tried: a record makes no sense, while the tape can be read."""
    return isinstance(error, Damaged) or isinstance(error.__cause__, TORN)


def unless_damaged(read: Callable[[], T]) -> T | None:
    """What is read; None where it is damaged."""
    try:
        return read()
    except TapeError as error:
        if not is_damage(error):
            raise
        return None
