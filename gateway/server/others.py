"""Other processes that write the same tape: workers of one gateway, or the process that one hands over to. What they
have written is told to those who follow the feed here, and what they change of releases and of the queue counts here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock.gateway.queue.dispatcher import Dispatcher
from penstock.gateway.store import Store
from penstock.gateway.store.directory import TapeError
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.store.view import View
from penstock.gateway.store.wanted import Wanted

_RELEASES: Final = Wanted(kinds=("resource", "release"))
_log = logging.getLogger("penstock.handover")


class Written:
    """Whether others have changed releases or versions since that was looked at (a `store.follower`). Any transaction
    here follows the tape, so whoever looks now and then would not see it."""

    def __init__(self) -> None:
        self.releases = False
        self._last = 0

    def recall(self, view: View) -> None:
        """It is not known what has changed."""
        self._note(view, view.last("log") != self._last)

    def follow(self, view: View, changes: Sequence[bytes]) -> None:
        """Others have changed this."""
        self._note(view, any(map(_RELEASES.concerns, changes)))

    def _note(self, view: View, changed: bool) -> None:
        self._last = view.last("log")
        self.releases = self.releases or changed


class Others:
    """For the event loop. Costs nothing while there are none."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        dispatcher: Dispatcher,
        followed: Callable[[], Awaitable[None]],
    ) -> None:
        """`followed`: has this process follow what has changed of releases and versions."""
        self._store, self._recorder = store, recorder
        self._written = store.follower(Written)
        self._dispatcher, self._followed = dispatcher, followed
        self._living = store.living()
        self._noticing: asyncio.Future[None] | None = None
        self._unended = False
        """Whether calls of one that has died could not be ended."""
        self._unfollowed = False
        """Whether what was released could not be followed."""

    def look(self, count: bool) -> None:
        """Ten times a second: notices what they have written. `count`: whether to see which of them live."""
        if self._noticing is not None and not self._noticing.done():
            return
        before, gone = self._living, False
        if count:
            self._living = self._store.living()
            gone = self._unended or bool(before - self._living)
        again = count and self._unfollowed
        if gone or again or (len(self._living) > 1 and (self._store.behind or self._written.releases)):
            self._noticing = asyncio.ensure_future(self._notice(frozenset(self._living) if gone else None))

    def soon(self) -> None:
        """Another worker says that it has written."""
        self.look(count=False)

    async def stop(self) -> None:
        """Waits for what is being noticed."""
        if self._noticing is not None:
            await self._noticing

    async def _notice(self, living: frozenset[str] | None) -> None:
        """Has the writer follow the tape. `living`: one has died, these are left; its calls have ended."""
        failed = None
        try:
            await self._recorder.submit(lambda tape: None if living is None else tape.interrupt(living))
        except TapeError as error:
            failed = error
        if self._written.releases or self._unfollowed:
            # It can be read also where it cannot be written.
            self._written.releases = False
            await self._follow()
        if failed is not None:
            self._unended = self._unended or living is not None
            _log.error("what another process has written is not noticed: %s", failed)
            return
        if living is not None:
            self._unended = False
            await self._dispatcher.deadlines.others_left()
        self._dispatcher.others_wrote()

    async def _follow(self) -> None:
        try:
            await self._followed()
        except Exception:
            # Calls would be given what was released before, for good.
            self._unfollowed = True
            _log.exception("what another process has released is not followed: that is tried again")
        else:
            self._unfollowed = False
