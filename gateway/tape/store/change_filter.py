"""The choice of changes that a follower of the feed wants. Most are told apart by the first bytes of their record of
the log, without decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.gateway.model.answers import ChangeKind
from penstock.gateway.model.rollout import RolloutStatus

KINDS: Final[dict[bytes, ChangeKind]] = {
    b"s": "span",
    b"o": "span",
    b"a": "attempt",
    b"r": "rollout",
    b"v": "resource",
    b"e": "release",
    b"t": "run",
    b"f": "forgotten",
}
"""The first byte of a record of the log. The name of the rollout, resource, release or run follows it."""


class ChangeFilter:
    """A filter of changes by kind, name and status."""

    def __init__(
        self,
        kinds: Iterable[ChangeKind] = (),
        names: Iterable[str] = (),
        status: Iterable[RolloutStatus] = (),
    ) -> None:
        """An empty argument selects all. `names`: of rollouts (with their attempts and spans), resources, releases and
        runs; NAME* selects all that begin with NAME. `status`: only rollouts that have one of these when they are told,
        each once a page."""
        chosen = frozenset(kinds)
        self._kinds = frozenset(begin for begin, kind in KINDS.items() if not chosen or kind in chosen)
        given = [name.encode() for name in names]
        self._names = frozenset(name + b"\0" for name in given if not name.endswith(b"*"))
        self._begins = tuple(name[:-1] for name in given if name.endswith(b"*"))
        self.status = frozenset(status)

    def matches(self, record: bytes) -> bool:
        """True if a record of the log may be a wanted change."""
        if record[:1] not in self._kinds:
            return False
        if not self._names and not self._begins:
            return True
        return record[1 : record.find(0) + 1] in self._names or record.startswith(self._begins, 1)

    def matches_status(self, status: RolloutStatus | None) -> bool:
        """True if a rollout of this status is wanted; None, for one that is gone, is not when any status is asked
        for."""
        return not self.status or status in self.status


ALL_CHANGES: Final = ChangeFilter()
"""The filter that every change passes."""
