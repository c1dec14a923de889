"""What is known of the gateway comes from the gateway, and what is looked at now is asked for now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fakes.process import PATIENCE
from fakes.waiting import News

from penstock.gateway.client.client import Client, ClientError
from penstock.tui.loader import AWAY_S, LONGEST_S, GatewayLink, ViewLoader, ViewState
from penstock.tui.view import ScreenView

WHOAMI = b'{"role": "admin", "version": "1", "started_ns": 1}'
LOST_NS = 7


class Scripted(Client):
    """A gateway that is away until it is back."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1")
        self.away = True
        self.asked: list[str] = []
        self.slow, self.given_up = asyncio.Event(), False

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        """Who asks, which is all that is asked for here."""
        self.asked.append(path)
        if self.away:
            raise ClientError("nothing answers there")
        self.received += len(WHOAMI)
        return WHOAMI


class Silent(ScreenView[str, None]):
    """Knows all that it shows."""

    async def load(self, client: Client) -> str:
        """Asks for nothing."""
        return "known"


class Slow(ScreenView[str, None]):
    """Gets no answer."""

    async def load(self, client: Client) -> str:
        """Notes when it is given up."""
        assert isinstance(client, Scripted)
        client.slow.set()
        try:
            await asyncio.Event().wait()
        finally:
            client.given_up = True
        return ""


class Large(ScreenView[str, None]):
    """Gets an answer that a slow link is busy with for long."""

    async def load(self, client: Client) -> str:
        """A megabyte."""
        client.received += 1 << 20
        return "large"


class Refused(ScreenView[str, None]):
    """Is refused what it wants."""

    async def load(self, client: Client) -> str:
        """Asks for what is not there."""
        raise ClientError("there is no such rollout", 404)


class Lacking(ScreenView[str, None]):
    """Is refused the rows that it lacks."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def load(self, client: Client) -> str:
        """Knows that there are rows."""
        return "rows"

    def needs_fill(self, data: str, visible: Sequence[str]) -> bool:
        """Always."""
        return True

    async def fill(self, client: Client, data: str, visible: Sequence[str]) -> None:
        """Asks for them."""
        self.asked.append(time.monotonic())
        raise ClientError("your key may not read this", 403)


class Screen:
    """A screen that is looked at."""

    def __init__(self, view: ScreenView[str, None], link: GatewayLink, far: bool) -> None:
        self.client, self.told = Scripted(), News()
        self.looking = ViewLoader(self.client, link, far, lambda what: self.told.tell())
        self.show(view)

    def show(self, view: ScreenView[str, None]) -> None:
        """Shows another one."""
        self.shown = ViewState(view)
        self.looking.show(self.shown)

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits for what looking tells of."""
        await self.told.until(condition, patience_s=seconds)


@asynccontextmanager
async def looked_at(view: ScreenView[str, None], link: GatewayLink, far: bool = False) -> AsyncGenerator[Screen]:
    """Looks at it for as long as the context lasts."""
    screen = Screen(view, link, far)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(screen.looking.run())
        yield screen
        task.cancel()


async def test_a_screen_that_asks_for_nothing_leaves_the_gateway_lost_until_it_answers() -> None:
    link = GatewayLink()
    link.record_failure("it was killed", LOST_NS)
    async with looked_at(Silent(), link) as screen:
        await screen.until(lambda: screen.shown.error is not None)
        assert (link.state, link.since_ns) == ("lost", LOST_NS), "it is lost since then, and was not found in between"
        screen.client.away = False
        await screen.until(lambda: link.state == "live")


async def test_a_screen_that_asks_for_nothing_does_not_ask_while_all_is_well() -> None:
    link = GatewayLink("live", LOST_NS)
    async with looked_at(Silent(), link) as screen:
        await screen.until(lambda: screen.shown.data == "known")
        assert screen.client.asked == []
        assert (link.state, link.since_ns) == ("live", LOST_NS)


async def test_another_screen_does_not_wait_for_the_answer_of_the_one_that_was_left() -> None:
    async with looked_at(Slow(), GatewayLink()) as screen:
        await asyncio.wait_for(screen.client.slow.wait(), PATIENCE)
        screen.show(Silent())
        await screen.until(lambda: screen.shown.data == "known")
        assert screen.client.given_up


async def test_another_screen_does_not_wait_for_the_pause_after_a_large_answer() -> None:
    async with looked_at(Large(), GatewayLink(), far=True) as screen:
        await screen.until(lambda: screen.shown.data == "large")
        screen.show(Silent())
        await screen.until(lambda: screen.shown.data == "known", LONGEST_S / 2)


async def test_rows_that_are_refused_are_not_asked_for_all_the_time() -> None:
    view = Lacking()
    async with looked_at(view, GatewayLink()) as screen:
        await screen.until(lambda: len(view.asked) == 2)
        assert screen.shown.error == "your key may not read this"
    assert view.asked[1] - view.asked[0] > 0.9 * AWAY_S


async def test_a_refusal_is_an_answer() -> None:
    link = GatewayLink()
    async with looked_at(Refused(), link) as screen:
        await screen.until(lambda: screen.shown.error == "there is no such rollout")
        assert link.state == "live"
