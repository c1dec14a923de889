"""The bound on concurrent calls to an upstream, or a server of tools; further calls wait for a place, in their order.

A call that waits is an entry in a dictionary, as at the gate of an upstream (`upstreams.gate`): no task, no timer of
its own. A call that comes while others wait goes to the end.

    if places.full:
        places.wait(call.on_place)     # called when there is one; or places.leave(call.on_place)
    places.running += 1                # and at its end, whichever: places.free()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger("penstock.upstream")


class ConcurrencyLimit:
    """The places of one upstream, in one process. Used in the event loop's thread."""

    def __init__(self, what: str, most: int | None) -> None:
        """`what`: the name of the upstream, for the log. `most`: the number of places; None for no bound."""
        self.maximum = most
        self.running = 0
        """Number of calls that have a place."""
        self.waited = 0
        """Number of calls that have waited for a place, or still do."""
        self._what = what
        self._waiting: dict[Callable[[], None], None] = {}
        self._handing_on = False

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a place."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """True if a new call must wait."""
        return self.maximum is not None and (self.running >= self.maximum or bool(self._waiting))

    def wait(self, go_on: Callable[[], None]) -> None:
        """Add a call that came while others have all places."""
        self.waited += 1
        self._waiting[go_on] = None

    def leave(self, go_on: Callable[[], None]) -> None:
        """Remove a call that does not wait any more."""
        self._waiting.pop(go_on, None)

    def release(self) -> None:
        """Give back a place: waiting calls take their turns as soon as the call that had it is over."""
        self.running -= 1
        self._hand_on_soon()

    def _hand_on_soon(self) -> None:
        if self._waiting and not self._handing_on:
            self._handing_on = True
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        """Let one waiting call go on in each turn of the loop: a call may give its place back at once."""
        self._handing_on = False
        if not self._waiting or (self.maximum is not None and self.running >= self.maximum):
            return
        go_on = next(iter(self._waiting))
        del self._waiting[go_on]
        try:
            go_on()
        except Exception:
            # One call that fails must not keep the others waiting.
            _log.exception("a call that waited for %s could not go on", self._what)
        self._hand_on_soon()
