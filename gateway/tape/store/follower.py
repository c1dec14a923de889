"""Memories of the tape in other packages, which save them reads. The writer keeps them up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.gateway.tape.store.view import TapeView


class Follower(Protocol):
    """State in memory that equals a part of the tape. Operations change both, so it may be a moment ahead of the
    tape."""

    def recall(self, view: TapeView) -> None:
        """Read everything back from the tape: it was opened, or a transaction has failed."""
        ...

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Read back what other processes have written since. `changes`: the records that they have added to the log;
        none of these has been wiped."""
        ...
