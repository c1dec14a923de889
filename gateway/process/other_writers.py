"""Other processes that write the same tape: workers of one gateway, or the other side of a handover. Their changes wake
the followers of the feed here, and their changes of releases and of the queue take effect here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.view import ChangeFilter, TapeView
from penstock.gateway.work.dispatcher import Dispatcher

_RELEASES: Final = ChangeFilter(kinds=("resource", "release"))
_log = logging.getLogger("penstock.handover")


class ReleaseChangeFollower:
    """Remembers whether others have changed releases or versions since the last check (a `store.feed`). Any
    transaction here follows the tape, so a check from time to time would miss the change."""

    def __init__(self) -> None:
        self.releases = False
        self._last = 0

    def recall(self, view: TapeView) -> None:
        """Note a change if the log has moved: its kind is unknown."""
        self._note(view, view.last("log") != self._last)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Note a change if others have changed releases or versions."""
        self._note(view, any(map(_RELEASES.matches, changes)))

    def _note(self, view: TapeView, changed: bool) -> None:
        self._last = view.last("log")
        self.releases = self.releases or changed


class OtherWriters:
    """Follows the other processes. For the event loop; costs nothing while there are none."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        dispatcher: Dispatcher,
        followed: Callable[[], Awaitable[None]],
    ) -> None:
        """`followed`: makes this process follow changes of releases and versions."""
        self._store, self._recorder = store, recorder
        self._written = store.follower(ReleaseChangeFollower)
        self._dispatcher, self._followed = dispatcher, followed
        self._living = store.live_writers()
        self._noticing: asyncio.Future[None] | None = None
        self._unended = False
        """True if the calls of a dead process could not be ended."""
        self._unfollowed = False
        """True if changes of releases could not be followed."""

    @property
    def present(self) -> bool:
        """True while another process writes the tape: then `poll` is needed ten times a second, else once."""
        return len(self._living) > 1

    def poll(self, count: bool) -> None:
        """Notice new transactions of others. `count`: also check which of them live."""
        if self._noticing is not None and not self._noticing.done():
            return
        before, gone = self._living, False
        if count:
            self._living = self._store.live_writers()
            gone = self._unended or bool(before - self._living)
        again = count and self._unfollowed
        if gone or again or (self.present and (self._store.behind or self._written.releases)):
            self._noticing = asyncio.ensure_future(self._notice(frozenset(self._living) if gone else None))

    def poll_now(self) -> None:
        """Called when another worker reports that it has written."""
        self.poll(count=False)

    async def stop(self) -> None:
        """Wait for the check in progress."""
        if self._noticing is not None:
            await self._noticing

    async def _notice(self, living: frozenset[str] | None) -> None:
        """Make the writer follow the tape. `living`: set when a process has died: the open calls of all other processes
        are ended."""
        failed = None
        try:
            await self._recorder.submit(lambda tape: None if living is None else tape.interrupt(living))
        except TapeError as error:
            failed = error
        if self._written.releases or self._unfollowed:
            # The tape can be read also where it cannot be written.
            self._written.releases = False
            await self._follow()
        if failed is not None:
            self._unended = self._unended or living is not None
            _log.error("what another process has written is not noticed: %s", failed)
            return
        if living is not None:
            self._unended = False
            await self._dispatcher.deadlines.other_writer_left()
        self._dispatcher.other_writer_committed()

    async def _follow(self) -> None:
        try:
            await self._followed()
        except Exception:
            # Otherwise calls would get the old versions for good.
            self._unfollowed = True
            _log.exception("what another process has released is not followed: that is tried again")
        else:
            self._unfollowed = False
