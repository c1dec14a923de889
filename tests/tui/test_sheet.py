"""A long pane is drawn when there is something new, not whenever the screen is."""

from __future__ import annotations

import pytest
from rich.text import Text
from textual.app import App, ComposeResult

from penstock.tui.widgets import sheet as module
from penstock.tui.widgets.sheet import RESTS, Sheet


class Shows(App[None]):
    """A sheet."""

    def __init__(self) -> None:
        super().__init__()
        self.sheet = Sheet()

    def compose(self) -> ComposeResult:
        yield self.sheet


async def test_what_takes_long_is_not_drawn_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [100.0], [0]

    def slow(width: int) -> Text:
        drawn[0] += 1
        now[0] += 1.0
        return Text("long")

    async with Shows().run_test() as pilot:
        assert isinstance(pilot.app, Shows)
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
        sheet, one, other = pilot.app.sheet, object(), object()
        for _ in range(3):
            sheet.show("pane", slow, one)
        assert drawn == [1]
        now[0] += RESTS
        sheet.show("pane", slow, one)
        assert drawn == [2], "ages go on, some time"
        sheet.show("pane", slow, other)
        sheet.show("another", slow, other)
        assert drawn == [4], "what is new is drawn at once"
