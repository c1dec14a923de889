"""What strangers wrote, and rows that go while somebody acts on them: no screen crashes, no terminal obeys."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

import pytest
from fakes.screens import SMALL, app_of, options, running, screen_text, until
from fakes.tui_world import World
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.console.views.noun import NounRows
from penstock.console.views.table import clean
from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import ResourceView
from penstock.tui.loader import GatewayLink, ViewLoader, ViewState
from penstock.tui.screens import span_panes
from penstock.tui.screens.registry import comparison_words
from penstock.tui.screens.tools import ToolsData as Tools
from penstock.tui.screens.tools import ToolsView
from penstock.tui.view import ScreenView
from penstock.tui.widgets import Confirm, Rows


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[" * 5_000 + b"]" * 5_000, b'{"a": "\\ud800"}'])
def test_an_odd_body_is_drawn(body: bytes) -> None:
    for line in span_panes._content(body):  # pyright: ignore[reportPrivateUsage]  # what draws it
        assert line.plain.encode()


def test_half_a_character_is_no_text_for_a_terminal() -> None:
    assert clean(json.loads('"a\\ud800b\\udfff"')) == "a\ufffdb\ufffd"


async def test_a_question_is_harmless_and_leaves_room_for_its_answer(world: World) -> None:
    async with running(options(world.url), SMALL) as pilot:
        await until(pilot, lambda text: "▶" in text)
        said: list[object] = []
        question = "Run rm on box with \x1b[2J\x9b2J\u202e" + "x " * 5_000
        app_of(pilot).push_screen(Confirm(question, reason=True), said.append)
        text = await until(pilot, lambda text: "Run rm on box with" in text and "Enter does it" in text)
        assert not set("\x1b\x9b\u202e") & set(text)
        app_of(pilot).screen.query_one(Input).value = "why " * 5_000
        await pilot.press("enter")
        await until(pilot, lambda text: "say it in 1,000" in text)
        app_of(pilot).screen.query_one(Input).value = "why " * 250
        await pilot.press("enter")
        await until(pilot, lambda text: "Enter does it" not in text)
        assert said


async def test_a_row_that_has_gone_is_not_clicked(world: World) -> None:
    async with running(options(world.url), SMALL) as pilot:
        before = await until(pilot, lambda text: "▶" in text)
        app_of(pilot).main.post_message(Rows.Clicked("gone", twice=True))
        await pilot.press("j")
        assert screen_text(app_of(pilot)) != before


async def test_a_tool_that_has_gone_is_neither_looked_at_nor_compared() -> None:
    view, none = ToolsView(), Tools({}, {}, ())
    closer = await view.load_details(Client("http://127.0.0.1"), none, "files/read")
    assert not view.panes(none, "files/read", closer, 0)
    with pytest.raises(ValueError, match="mark two rows"):
        comparison_words("resources", NounRows[ResourceView]([]), (), "desk")


class Odd(ScreenView[str, None]):
    """One odd record among what it asks for."""

    broken = True

    async def load(self, client: Client) -> str:
        if self.broken:
            raise KeyError("odd")
        return "fine"


async def test_a_record_that_cannot_be_shown_is_told_and_asked_again() -> None:
    told = asyncio.Event()
    looking = ViewLoader(Client("http://127.0.0.1"), GatewayLink(state="live"), False, lambda what: told.set())
    shown = ViewState(Odd())
    looking.show(shown)
    running = asyncio.ensure_future(looking.run())
    await told.wait()
    assert shown.error == "this cannot be shown: KeyError: 'odd'"
    Odd.broken = False
    while shown.data is None:
        told.clear()
        looking.reload()
        await told.wait()
    running.cancel()
    assert shown.error is None


async def test_a_pane_that_no_file_has_room_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> object:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    async with running(options(world.url), SMALL) as pilot:
        await until(pilot, lambda text: "▶" in text)
        await pilot.press("tab")
        await until(pilot, pane_seen(pilot))
        await pilot.press("o")
        await until(pilot, lambda text: "cannot be written to a file for less: No space left on device." in text)


def pane_seen(pilot: Pilot[None]) -> Callable[[str], bool]:
    """Whether there is a pane to open."""
    return lambda _: app_of(pilot).main.pane is not None
