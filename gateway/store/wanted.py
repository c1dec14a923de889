"""Which changes a follower of the feed wants. Most are told from the bytes of their record of the log, unread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.gateway.model.change import ChangeKind
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
"""What a record of the log begins with. Behind it stands the name of the rollout, resource, release or run."""


class Wanted:
    """A choice of changes."""

    def __init__(
        self,
        kinds: Iterable[ChangeKind] = (),
        names: Iterable[str] = (),
        status: Iterable[RolloutStatus] = (),
    ) -> None:
        """None of a sort is all of it. `names`: of rollouts (also of what is in them), resources, releases and runs;
        NAME* is all that begin so. `status`: rollouts that stand there when they are told, each once in a piece."""
        chosen = frozenset(kinds)
        self._kinds = frozenset(begin for begin, kind in KINDS.items() if not chosen or kind in chosen)
        given = [name.encode() for name in names]
        self._names = frozenset(name + b"\0" for name in given if not name.endswith(b"*"))
        self._begins = tuple(name[:-1] for name in given if name.endswith(b"*"))
        self.status = frozenset(status)

    def concerns(self, record: bytes) -> bool:
        """Whether a record of the log may be of what is wanted."""
        if record[:1] not in self._kinds:
            return False
        if not self._names and not self._begins:
            return True
        return record[1 : record.find(0) + 1] in self._names or record.startswith(self._begins, 1)

    def stands(self, status: RolloutStatus | None) -> bool:
        """Whether a rollout is wanted that stands there; one that is gone is not, where anything is asked."""
        return not self.status or status in self.status


EVERYTHING: Final = Wanted()
"""Every change."""
