"""Changes of the tape without those that cannot be read, so that one damaged record does not keep back all others."""

from __future__ import annotations

import logging
from itertools import islice

from penstock.gateway.model.change import Change
from penstock.gateway.store import Store
from penstock.gateway.store.codec import UNREADABLE
from penstock.gateway.store.damage import is_damage
from penstock.gateway.store.directory import Damaged, TapeError

_log = logging.getLogger("penstock.otlp")


def changes(tape: Store, since: int, limit: int) -> tuple[list[Change], int]:
    """See `Reader.changes`."""
    try:
        return tape.changes(since, limit)
    except TapeError as error:
        if not is_damage(error):
            raise
        return _one_by_one(tape, since, limit)


def _one_by_one(tape: Store, since: int, limit: int) -> tuple[list[Change], int]:
    found, lost, last = list[Change](), list[str](), since
    with tape.view() as view:
        if (hole := view.hole("log", since + 1)) is not None:
            return [], hole[1]
        first, records = view.log_segment(since + 1)
        for last, record in enumerate(islice(records, since + 1 - first, since + 1 - first + limit), since + 1):
            try:
                change = view.change(last, record)
            except (Damaged, *UNREADABLE) as error:
                lost.append(f"change {last} ({error})")
                continue
            if change is not None:
                found.append(change)
    if lost:
        more = f" and {len(lost) - 1} more up to change {last}" if len(lost) > 1 else ""
        _log.error("%s%s cannot be read and is passed over; run `penstock check`", lost[0], more)
    return found, last
