"""The recorded demo as it is shown: every screen of it at its end, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from fakes.screens import screen_text, until
from textual.pilot import Pilot

from penstock.tui.app import Options, PenstockApp
from penstock.tui.recording import Clock, PlayedClient, Recording, load
from penstock.tui.settings import Context

DEMO = Path(__file__).parents[2] / "tui" / "demo.jsonl.gz"


@cache
def recording() -> Recording:
    """Read once."""
    return load(DEMO)


@asynccontextmanager
async def played(words: Sequence[str], size: tuple[int, int]) -> AsyncGenerator[Pilot[None]]:
    """A screen of the demo, once it has all that it asks for."""
    clock = Clock(recording(), at_end=True)
    contexts = {"demo": Context(gateway="http://127.0.0.1:4747", read_only=True)}
    options = Options(
        contexts,
        "demo",
        words,
        connect=lambda _: PlayedClient(recording(), clock),
        now_ns=clock.now_ns,
        note=lambda: "played",
    )
    app = PenstockApp(options)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda text: "live" in text.splitlines()[0] and "asking" not in text)
        yield pilot


def app_of(pilot: Pilot[None]) -> PenstockApp:
    """The app of a pilot."""
    assert isinstance(pilot.app, PenstockApp)
    return pilot.app


async def settled(pilot: Pilot[None]) -> str:
    """The screen once all that it asks for is answered, and to draw it again changes nothing."""
    app, before = app_of(pilot), ""
    while True:
        await until(pilot, lambda text: "asking" not in text and _answered(app))
        app.main.draw()
        await pilot.pause()
        text = screen_text(app)
        if text == before and _answered(app):
            return text
        before = text


def _answered(app: PenstockApp) -> bool:
    shown = app.main.shown
    if shown.data is None or shown.view.wants(shown.data, app.main.rows.in_sight()):
        return False
    return shown.chosen is None or shown.closer_of == shown.chosen
