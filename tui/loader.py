"""Keeps what a screen shows up to date: asks when something has changed, never more often than the link allows.

Three tasks ask, so that none waits for another: the look itself, the closer look at the chosen row, and the rows that a
long list lacks. A closer look begins a moment after the selection has stopped, and is cancelled when another row is
selected. Another screen is asked for at once: it waits neither for the answer to the screen before, nor for the pause
between two looks at one screen. Errors are shown by the screen, which keeps its data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from yarl import URL

from penstock.console.views.table import age
from penstock.gateway.client.client import Client, ClientError
from penstock.tui.view import ScreenView

# The link to the gateway: its state, and the pauses between questions.
#
# A far link (to another machine) has a budget of bytes: after an answer of B bytes the next question waits for B /
# `FAR_BYTES_S` seconds. So a screen that changes all the time costs a bounded rate, whatever its size.

FAR_BYTES_S: Final = 8_000
"""Bytes a second that looks may take from a far gateway: below 10 KB/s, which leaves room for the feed."""
NEAR_S, FAR_S = 0.25, 1.0
"""Least time between two looks at the same screen; s."""
LONGEST_S: Final = 15.0
"""Longest pause that a large answer causes; s."""
AWAY_S: Final = 1.0
"""Time between two looks while the gateway does not answer; s."""


def is_remote(url: str) -> bool:
    """True if a gateway is on another machine."""
    host = URL(url).host or ""
    return not (host == "localhost" or host.startswith("127.") or host == "::1")


def pause(far: bool, received: int, took_s: float) -> float:
    """The pause after a look that received so many bytes in so much time; s."""
    if not far:
        return max(NEAR_S, 2 * took_s)
    return min(max(FAR_S, received / FAR_BYTES_S), LONGEST_S)


@dataclass(slots=True)
class GatewayLink:
    """The state of the link."""

    state: Literal["connecting", "live", "lost"] = "connecting"
    since_ns: int = 0
    """The beginning of this state; ns since the epoch."""
    why: str = ""
    """The last error; empty while there is none."""

    def record_answer(self, now_ns: int) -> bool:
        """Note an answer; True if the state changes."""
        if self.state == "live":
            return False
        self.state, self.since_ns, self.why = "live", now_ns, ""
        return True

    def record_failure(self, why: str, now_ns: int) -> bool:
        """Note a failure; True if the state changes."""
        news = self.state != "lost"
        if news:
            self.since_ns = now_ns
        self.state, self.why = "lost", why
        return news

    def words(self, now_ns: int) -> str:
        """The state for the line on top."""
        match self.state:
            case "connecting":
                return "connecting ..."
            case "live":
                return "live"
            case "lost":
                return f"lost for {age(self.since_ns, now_ns)}, trying again"


STILL_S: Final = 0.12
"""The time for which a selection must not move before a closer look; s."""
T = TypeVar("T")
RefreshKind = Literal["data", "closer", "rows", "link"]


@dataclass(slots=True)
class ViewState:
    """A view on the screen, its data, and the person's place in it."""

    view: ScreenView[Any, Any]
    data: Any = None
    """The data of its last look; None before the first."""
    error: str | None = None
    """The error of its last look; None when it succeeded."""
    chosen: str | None = None
    """Id of the selected row."""
    details: Any = None
    details_of: str | None = None
    """Id of the row that `closer` is of."""
    details_error: str | None = None
    tab: int = 0
    """Index of the pane that is shown."""
    columns: Sequence[str] = ()
    """Names of the columns that are shown, in their order; empty for all."""
    sort: str = ""
    reverse: bool = False
    search: str = ""
    """The text that `/` searches for in the loaded rows."""
    following: bool = True
    """True while the selection stays on the first row, whatever it is."""
    focus: Literal["rows", "panes"] = "rows"
    zoomed: bool = False
    """True while the pane has the whole screen."""

    def forget(self) -> None:
        """Drop the data: it is of another gateway, of an older tape, or of another range of time."""
        self.view.forget()
        self.data = self.error = self.details = self.details_of = self.details_error = None


class ViewLoader:
    """Asks the gateway for one screen at a time."""

    def __init__(self, client: Client, link: GatewayLink, far: bool, tell: Callable[[RefreshKind], None]) -> None:
        self._client, self._link, self._far, self._tell = client, link, far, tell
        self._shown: ViewState | None = None
        self._look_due, self._closer_due, self._fill_due = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._looks_left, self._fills_left = asyncio.Event(), asyncio.Event()
        self._visible: Sequence[str] = ()
        self.paused = False

    # Changes of the shown view ----------------------------------------------------------------------------------------

    def show(self, shown: ViewState) -> None:
        """Switch to another screen, and look at it now."""
        self._shown, self._visible = shown, ()
        self._looks_left.set()
        self._fills_left.set()
        self.reload()
        self.reload_details()

    def reload(self) -> None:
        """Look again, because something has changed."""
        self._look_due.set()

    def reload_details(self) -> None:
        """Look closer, because another row is selected, or its data has changed."""
        self._closer_due.set()

    def set_visible(self, visible: Sequence[str]) -> None:
        """Note the rows that are in sight, and fill them."""
        self._visible = visible
        self._fill_due.set()

    # Asking -----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask the gateway for the shown view's data, its selected row and its visible rows, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._looks())
            group.create_task(self._closer_looks())
            group.create_task(self._fills())

    async def _looks(self) -> None:
        while True:
            wait = await self._look()
            # Changes during the pause are seen by the next look.
            await _until(self._looks_left, wait)
            shown = self._shown
            await _until(self._look_due, None if shown is None or self.paused else shown.view.every_s)

    async def _look(self) -> float:
        """Look once; return the pause before the next look in s."""
        self._look_due.clear()
        self._looks_left.clear()
        shown = self._shown
        if shown is None or (self.paused and shown.data is not None):
            return 0.0
        began, received = time.monotonic(), self._client.received
        answer = await _unless(self._looks_left, self._asked(self._looked(shown.view)))
        if answer is None:
            return 0.0
        data, shown.error = answer
        if data is not None:
            shown.data = data
            self._closer_due.set()
            self._fill_due.set()
        self._tell("data")
        if self._link.state == "lost":
            self._look_due.set()
            return AWAY_S
        return pause(self._far, self._client.received - received, time.monotonic() - began)

    async def _looked(self, view: ScreenView[Any, Any]) -> Any:
        """Look once; while the gateway is lost, make sure that something is asked of it."""
        received = self._client.received
        data = await view.load(self._client)
        if self._link.state == "lost" and self._client.received == received:
            await self._client.whoami()
        return data

    async def _closer_looks(self) -> None:
        while True:
            await self._closer_due.wait()
            while self._closer_due.is_set():
                self._closer_due.clear()
                await _until(self._closer_due, STILL_S)
            shown = self._shown
            if shown is not None and shown.data is not None and shown.chosen is not None:
                await self._closer_look(shown, shown.chosen)

    async def _closer_look(self, shown: ViewState, id: str) -> None:
        """Look closer at a row, unless another one is selected meanwhile."""
        looking = asyncio.ensure_future(self._asked(shown.view.load_details(self._client, shown.data, id)))
        again = False
        while not looking.done():
            due = asyncio.ensure_future(self._closer_due.wait())
            try:
                await asyncio.wait([looking, due], return_when=asyncio.FIRST_COMPLETED)
            finally:
                due.cancel()
            if self._closer_due.is_set() and (shown is not self._shown or shown.chosen != id):
                looking.cancel()
                return
            # The same row is due again: the running look need not stop for it.
            again = again or self._closer_due.is_set()
            self._closer_due.clear()
        found, shown.details_error = looking.result()
        if found is not None:
            shown.details = found
        shown.details_of = id
        self._tell("closer")
        if again:
            self._closer_due.set()

    async def _fills(self) -> None:
        while True:
            await self._fill_due.wait()
            self._fill_due.clear()
            self._fills_left.clear()
            shown = self._shown
            if shown is None or shown.data is None or not shown.view.needs_fill(shown.data, self._visible):
                continue
            began, received = time.monotonic(), self._client.received
            _, shown.error = await self._asked(shown.view.fill(self._client, shown.data, self._visible))
            self._tell("rows")
            if shown.view.needs_fill(shown.data, self._visible):
                self._fill_due.set()
            took_s = time.monotonic() - began
            # A refused question would be refused again: pause.
            away = self._link.state == "lost" or shown.error is not None
            wait = AWAY_S if away else pause(self._far, self._client.received - received, took_s)
            await _until(self._fills_left, wait)

    async def _asked(self, question: Coroutine[Any, Any, Any]) -> tuple[Any, str | None]:
        """(answer, None), or (None, error). Some questions need nothing from the gateway: without received bytes, the
        state of the link stays.
        """
        received = self._client.received
        try:
            found, error = await question, None
        except ClientError as e:
            found, error = None, str(e)
            if e.temporary:
                self._link.record_failure(error, time.time_ns())
                self._tell("link")
                return None, error
        except Exception as e:
            # An odd record: other screens still work, and this one works again once the record is gone.
            return None, f"this cannot be shown: {type(e).__name__}: {e}"
        answered = error is not None or self._client.received > received
        if answered and self._link.record_answer(time.time_ns()):
            self._tell("link")
        return found, error


async def _unless(event: asyncio.Event, question: Coroutine[Any, Any, T]) -> T | None:
    """The answer; None when the event came first, and the question was cancelled."""
    asking, due = asyncio.ensure_future(question), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([asking, due], return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        asking.cancel()
        due.cancel()


async def _until(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, for at most so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
