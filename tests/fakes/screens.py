"""The TUI in a test: an app without a terminal, and its screen as text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fakes.process import PATIENCE
from textual.pilot import Pilot

from penstock.tui.app import AppOptions, PenstockApp
from penstock.tui.settings import GatewayContext, SavedViews, host

SMALL, LARGE = (80, 24), (160, 48)


def app_of(pilot: Pilot[None]) -> PenstockApp:
    """The app of a pilot."""
    assert isinstance(pilot.app, PenstockApp)
    return pilot.app


def screen_text(app: PenstockApp) -> str:
    """What is on the screen, line by line, without colours."""
    strips = app.screen._compositor.render_strips()  # pyright: ignore[reportPrivateUsage]  # no public way to a text
    return "".join(strip.text.rstrip() + "\n" for strip in strips)


def options(url: str, *view: str, read_only: bool = False) -> AppOptions:
    """Of an app that shows a gateway."""
    return AppOptions(
        {host(url): GatewayContext(gateway=url)}, host(url), view or ("rollouts",), read_only=read_only,
        saved=SavedViews(Path(os.devnull) / "views.json"),
    )  # fmt: skip


@asynccontextmanager
async def running(options: AppOptions, size: tuple[int, int] = SMALL) -> AsyncGenerator[Pilot[None]]:
    """An app on a screen of its own."""
    app = PenstockApp(options)
    async with app.run_test(size=size) as pilot:
        yield pilot


async def until(pilot: Pilot[None], seen: Callable[[str], bool], seconds: float = PATIENCE) -> str:
    """The text of the screen once it is as wanted; fails with the last one."""
    app = app_of(pilot)
    end = asyncio.get_running_loop().time() + seconds
    while not seen(text := screen_text(app)):
        assert asyncio.get_running_loop().time() < end, text
        await pilot.pause(0.02)
    return text
