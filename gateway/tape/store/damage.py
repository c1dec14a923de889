"""Damage on the tape, for readers that go on without the damaged records."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.gateway.tape.store.codec import CORRUPTION_ERRORS
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError

T = TypeVar("T")

DAMAGE_ERRORS: Final[tuple[type[Exception], ...]] = (DamagedRecordError, *CORRUPTION_ERRORS)
"""Errors that a damaged record raises, within a transaction, at every try."""
_TOLD: Final = 1000
"""Damaged places that are remembered, so that each is logged once."""
_CHECK: Final = "; run `penstock check`"
_log = logging.getLogger("penstock.tape")


class DamageLog:
    """Damaged records that long reads leave out. Each is logged once."""

    def __init__(self) -> None:
        self._told = set[str]()

    def __call__(self, what: str, error: Exception) -> None:
        """Log once that `what` is left out, because reading it raised `error`."""
        if what in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(what)
        why = str(error).removesuffix(_CHECK)
        _log.error("left out, because it is damaged: %s: %s%s", what, why, _CHECK)


def is_damage(error: TapeError) -> bool:
    """True if the error would occur at every try: a record makes no sense, while the tape can be read."""
    return isinstance(error, DamagedRecordError) or isinstance(error.__cause__, CORRUPTION_ERRORS)


def unless_damaged(read: Callable[[], T]) -> T | None:
    """Return the result of `read`; None if it meets damage."""
    try:
        return read()
    except TapeError as error:
        if not is_damage(error):
            raise
        return None
