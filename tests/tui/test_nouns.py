"""Every noun of the registry as a command, as JSON, as a screen and as text, against one gateway."""

from __future__ import annotations

import json
import re

import pytest
from fakes.screens import LARGE, options, running, until
from fakes.tui_world import World

from penstock.console.main import main
from penstock.console.mcp_server.server import TOOLS
from penstock.console.views.registry import NOUNS, noun_view
from penstock.tui.screens.registry import SCREENS
from penstock.tui.view import positional_words

LISTED = [name for name in NOUNS if not positional_words(noun_view(name))]

_AGE = re.compile(r"\d+ (s|m)\b")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that a command prints."""
    main([*words])
    return "".join(capsys.readouterr()).splitlines()


@pytest.mark.parametrize("name", LISTED)
def test_a_noun_says_the_same_as_a_command_and_as_a_screen(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    view, words, gateway = noun_view(name), NOUNS[name].command.split(), ("--gateway", world.url)
    table = said(capsys, *words, *gateway)
    rows = [view.row.model_construct(**json.loads(line)) for line in said(capsys, *words, "--json", *gateway)]
    title, *screen = said(capsys, "tui", "--plain", *gateway, name)
    assert title.startswith("== ")
    assert title.endswith(f"(penstock {NOUNS[name].command})")
    if view.whole is None and rows:
        ids = {line.split()[0] for line in table}
        assert {view.key(row).split()[0] for row in rows} <= ids
        assert {line.split()[0] for line in screen if line} >= {view.key(row).split()[0] for row in rows[:20]}
    else:
        # A second may pass between the two.
        assert {_AGE.sub("", line) for line in table} & {_AGE.sub("", line) for line in screen}, (table, screen)


async def test_a_noun_without_a_screen_of_its_own_shows_what_is_known_of_a_row(world: World) -> None:
    async with running(options(world.url, "prices"), LARGE) as pilot:
        text = await until(pilot, lambda text: "[Fields]" in text and "asking" not in text)
        assert "for a million tokens" in text
        assert "model " in text.split("[Fields]")[1]


def test_screens_and_tools_are_those_of_the_registry() -> None:
    assert {*NOUNS} <= {*SCREENS}
    assert {f"list_{name}" for name in NOUNS if noun_view(name).tool} <= {tool.name for tool in TOOLS}
    assert all(noun_view(name).name == name for name in NOUNS)
