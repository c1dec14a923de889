"""The key map: whole, without doubles; every key is pressed on a screen that has it, and on each that has it alone."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fakes.screens import SMALL, app_of, options, running, until
from fakes.tui_world import World

from penstock.tui.app import PenstockApp
from penstock.tui.keys import BY_ID, KEYS, TITLES, VIEW_KEYS, KeyBinding, KeyMap, key_names
from penstock.tui.screens.registry import SCREENS, STANDING

WITH_WORDS = [("rollout", "t0.0"), ("compare", "rollouts", "t0.0", "t0.1")]
ENDS = ("quit", "suspend", "pager", "editor")
"""Keys that leave the screen to something else; tests of a terminal press them."""


def test_no_key_of_a_screen_means_two_things() -> None:
    general = Counter(key for row in KEYS if row.views is None for key in row.keys)
    for view in SCREENS:
        own = Counter(key for row in KEYS if row.views is not None and row.applies_to(view) for key in row.keys)
        assert not [key for key, count in (general | own).items() if count > 1], view


def test_every_screen_with_a_key_is_there_and_has_no_other() -> None:
    assert set(VIEW_KEYS) <= set(SCREENS)
    assert len(set(VIEW_KEYS.values())) == len(VIEW_KEYS)
    named = {view for row in KEYS for view in row.views or ()}
    assert named <= set(SCREENS)


def test_every_action_of_a_screen_has_a_key_and_every_such_key_an_action() -> None:
    actions = {(action.id, name) for name, named in SCREENS.items() for action in named.view.actions}
    keys = {(row.id, view) for row in KEYS if row.group == "change" for view in row.views or ()}
    assert actions == keys


def test_other_keys_take_the_place_of_those_of_the_table() -> None:
    keys = KeyMap({"quit": ["ctrl+q"]})
    assert keys.find("q", "rollouts") is None
    found = keys.find("ctrl+q", "rollouts")
    assert found is not None
    assert found.id == "quit"
    with pytest.raises(ValueError, match="'qiut' is the id of no key"):
        KeyMap({"qiut": ["x"]})


@pytest.mark.parametrize("words", [*STANDING, *WITH_WORDS], ids=lambda words: words[0])
async def test_every_key_does_something_or_says_why_not(world: World, words: tuple[str, ...]) -> None:
    """Keys that every screen has are dealt out to the screens."""
    screens = [screen[0] for screen in (*STANDING, *WITH_WORDS)]
    view = words[0]
    general = [row for row in KEYS if row.views is None][screens.index(view) :: len(screens)]
    for row in (row for row in KEYS if row.applies_to(view) and row.id not in ENDS and (row in general or row.views)):
        for key in row.keys:
            async with running(options(world.url, *words, read_only=True), SMALL) as pilot:
                app = app_of(pilot)
                before = await until(pilot, lambda text: "live" in text and "asking" not in text)
                await pilot.press(key)
                # It may have to ask the gateway first.
                try:
                    await until(pilot, partial(_changed, app, before))
                except AssertionError as error:
                    raise AssertionError(f"{row.id}: {key} did nothing and said nothing") from error


def _changed(app: PenstockApp, before: str, text: str) -> bool:
    return text != before or app.theme != "textual-dark"


async def test_a_key_that_means_nothing_says_so(world: World) -> None:
    async with running(options(world.url, "workers")) as pilot:
        await until(pilot, lambda text: "live" in text)
        await pilot.press("Z")
        await until(pilot, lambda text: "Z does nothing here. ? lists the keys." in text)
        await pilot.press("K")
        await until(pilot, lambda text: "K does nothing here; on rollout and rollouts it is: queue the rollout" in text)


def test_ids_are_names_that_a_settings_file_can_hold() -> None:
    assert len(BY_ID) == len(KEYS)


def _told(row: KeyBinding) -> str:
    return f"{' '.join(f'`{one}`' for one in key_names(row))} {row.id}"


def test_the_documented_keys_and_screens_are_those_of_the_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tui.md").read_text()
    told = [
        f"| {title} | {', '.join(_told(row) for row in KEYS if row.group == group and not row.id.startswith('go.'))} |"
        for group, title in TITLES.items()
    ]
    assert [
        line for line in page.splitlines() if line.startswith(tuple(f"| {title} |" for title in TITLES.values()))
    ] == told
    screens = [f"| `{key}` | {view} | {SCREENS[view].help} |" for view, key in VIEW_KEYS.items()]
    assert [line for line in page.splitlines() if re.match(r"\| `\d` \| ", line)] == screens
