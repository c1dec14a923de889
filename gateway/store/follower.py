"""What other packages remember of the tape, so that they need not read it. The writer keeps it up to date."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.store.view import View


class Follower(Protocol):
    """Something in memory that equals what the tape has. Operations change both, so it may be a moment ahead of the
    tape.
    """

    def recall(self, view: View) -> None:
        """Starts anew with what is on the tape: a transaction has failed, or somebody else has written."""
        ...
