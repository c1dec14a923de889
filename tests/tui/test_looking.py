"""What is known of the gateway comes from the gateway: a look that asks for nothing says nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from penstock.gateway.client.client import Client, ClientError
from penstock.tui.link import Link
from penstock.tui.looking import Looking, Shown
from penstock.tui.view import View

WHOAMI = b'{"role": "admin", "version": "1", "started_ns": 1}'
LOST_NS = 7


class Scripted(Client):
    """A gateway that is away until it is back."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1")
        self.away = True
        self.asked: list[str] = []

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        """Who asks, which is all that is asked for here."""
        self.asked.append(path)
        if self.away:
            raise ClientError("nothing answers there")
        self.received += len(WHOAMI)
        return WHOAMI


class Silent(View[str, None]):
    """Knows all that it shows."""

    async def look(self, client: Client) -> str:
        """Asks for nothing."""
        return "known"


class Refused(View[str, None]):
    """Is refused what it wants."""

    async def look(self, client: Client) -> str:
        """Asks for what is not there."""
        raise ClientError("there is no such rollout", 404)


class Screen:
    """A screen that is looked at."""

    def __init__(self, view: View[str, None]) -> None:
        self.client, self.shown, self.told = Scripted(), Shown(view), asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what looking tells of."""
        async with asyncio.timeout(10):
            while not condition():
                self.told.clear()
                await self.told.wait()


@asynccontextmanager
async def looked_at(view: View[str, None], link: Link) -> AsyncGenerator[Screen]:
    """Looks at it for as long as the context lasts."""
    screen = Screen(view)
    looking = Looking(screen.client, link, far=False, tell=lambda what: screen.told.set())
    looking.show(screen.shown)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(looking.run())
        yield screen
        task.cancel()


async def test_a_screen_that_asks_for_nothing_leaves_the_gateway_lost_until_it_answers() -> None:
    link = Link()
    link.failed("it was killed", LOST_NS)
    async with looked_at(Silent(), link) as screen:
        await screen.until(lambda: screen.shown.error is not None)
        assert (link.state, link.since_ns) == ("lost", LOST_NS), "it is lost since then, and was not found in between"
        screen.client.away = False
        await screen.until(lambda: link.state == "live")


async def test_a_screen_that_asks_for_nothing_does_not_ask_while_all_is_well() -> None:
    link = Link("live", LOST_NS)
    async with looked_at(Silent(), link) as screen:
        await screen.until(lambda: screen.shown.data == "known")
        assert screen.client.asked == []
        assert (link.state, link.since_ns) == ("live", LOST_NS)


async def test_a_refusal_is_an_answer() -> None:
    link = Link()
    async with looked_at(Refused(), link) as screen:
        await screen.until(lambda: screen.shown.error == "there is no such rollout")
        assert link.state == "live"
