"""What other packages remember of the tape, so that they need not read it. The writer keeps it up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.gateway.store.view import View


class Follower(Protocol):
    """Something in memory that equals what the tape has. Operations change both, so it may be a moment ahead of the
    tape.
    """

    def recall(self, view: View) -> None:
        """Starts anew with what is on the tape: it was opened, or a transaction has failed."""
        ...

    def follow(self, view: View, changes: Sequence[bytes]) -> None:
        """Reads back what others have written since. `changes`: what they have added to the log; nothing that was there
        before has been wiped of it."""
        ...
