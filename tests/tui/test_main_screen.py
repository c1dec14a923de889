"""The one screen: rows, filters, what a person changes, and a gateway that goes and comes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fakes.process import Gateway
from fakes.screens import LARGE, SMALL, app_of, options, running, screen_text, until
from fakes.tui_world import World
from textual.pilot import Pilot

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.app import PenstockApp
from penstock.tui.keys import HINTS, KeyMap
from penstock.tui.main_screen import hints
from penstock.tui.settings import GatewayContext, host


def chosen(text: str) -> str:
    """The row that the gutter points at."""
    found = re.search(r"^▶.(\S+)", text, re.MULTILINE)
    assert found, text
    return found[1]


async def shown(pilot: Pilot[None]) -> str:
    """The first screen, once it is there."""
    return await until(pilot, lambda text: "live" in text and "▶" in text)


async def test_it_shows_the_newest_rollouts_and_follows_them(world: World) -> None:
    async with running(options(world.url)) as pilot, Client(world.url) as client:
        assert chosen(await shown(pilot)) == world.rollouts[0]
        await client.enqueue([RolloutSpec(id="newest", input="x")])
        assert chosen(await until(pilot, lambda text: "newest" in text)) == "newest"
        await pilot.press("j")
        assert chosen(screen_text(app_of(pilot))) == world.rollouts[0]
        await client.enqueue([RolloutSpec(id="newer-still", input="x")])
        count = (await client.stats(spans=0)).tape["rollouts"]
        text = await until(pilot, lambda text: f"{count} on the tape" in text)
        assert chosen(text) == world.rollouts[0], "the selection stays on its row"
        await pilot.press("f")
        assert chosen(await until(pilot, lambda text: "newer-still" in text)) == "newer-still"
        for rollout in ("newest", "newer-still"):
            await client.cancel(rollout)


async def test_it_counts_rollouts_that_come_while_the_list_is_longer_than_a_page(gateway: Gateway) -> None:
    async with Client(gateway.url) as client:
        await client.enqueue([RolloutSpec(id=f"first-{number}", input="x") for number in range(90)])
        async with running(options(gateway.url)) as pilot:
            await until(pilot, lambda text: "90 on the tape" in text)
            await client.enqueue([RolloutSpec(id=f"later-{number}", input="x") for number in range(7)])
            await until(pilot, lambda text: "97 on the tape" in text)


async def test_a_wrong_filter_is_said_and_the_last_good_one_stays(world: World) -> None:
    async with running(options(world.url, "rollouts", "status:failed"), LARGE) as pilot:
        before = await until(pilot, lambda text: "found" in text and "▶" in text)
        rows = re.findall(r"^[▶ ] (t\d\.\d)", before, re.MULTILINE)
        assert rows
        assert all("failed" in line for line in before.splitlines() if re.match(r"[▶ ] t\d", line))
        await pilot.press("slash", *"statu:x", "enter")
        wrong = await until(pilot, lambda text: "unknown field 'statu'" in text)
        assert re.findall(r"^[▶ ] (t\d\.\d)", wrong, re.MULTILINE) == rows
        await pilot.press(*["backspace"] * 7, *"tus:succeeded")
        await pilot.press("escape", "slash", *["backspace"] * 20, *"status:succeeded", "enter")
        text = await until(pilot, lambda text: "found  status:succeeded" in text and "▶" in text)
        assert "failed" not in text
        await pilot.press("escape")
        await until(pilot, lambda text: "on the tape" in text)


async def test_a_filter_is_completed_as_it_is_typed(world: World) -> None:
    async with running(options(world.url)) as pilot:
        await shown(pilot)
        await until(pilot, lambda text: bool(app_of(pilot).fields))
        await pilot.press("slash", *"sta")
        await until(pilot, lambda text: "status:  started>" in text)
        await pilot.press("tab", *"fa")
        await until(pilot, lambda text: text.splitlines()[-1].startswith("status:failed"))
        await pilot.press("tab", "enter")
        await until(pilot, lambda text: "found  status:failed" in text)


async def test_the_palette_goes_anywhere_and_says_what_is_wrong(world: World) -> None:
    async with running(options(world.url)) as pilot:
        await shown(pilot)
        await pilot.press("colon", *"workers", "enter")
        await until(pilot, lambda text: "Workers and queue" in text and "Queue open" in text)
        await pilot.press("minus")
        await until(pilot, lambda text: "on the tape" in text)
        await pilot.press("colon", *"wrkers", "enter")
        await until(pilot, lambda text: "there is no screen 'wrkers'; there are" in text)
        await pilot.press("colon", *"ctx nowhere", "enter")
        await until(pilot, lambda text: "there is no context 'nowhere'" in text)
        await pilot.press("colon", *"theme nord", "enter")
        await until(pilot, lambda text: "Theme nord." in text)
        assert app_of(pilot).theme == "nord"


async def test_a_context_that_leads_nowhere_is_said_and_the_one_that_is_shown_stays(world: World) -> None:
    here = options(world.url)
    more = {
        "typo": GatewayContext(gateway="example.org"),
        "locked": GatewayContext(gateway=world.url, key="PENSTOCK_NO_SUCH_KEY"),
    }
    async with running(replace(here, contexts={**here.contexts, **more}), LARGE) as pilot:
        await shown(pilot)
        await pilot.press("colon", *"ctx typo", "enter")
        await until(pilot, lambda text: "'example.org' is not the URL of a gateway" in text)
        await pilot.press("colon", *"ctx locked", "enter")
        text = await until(pilot, lambda text: "the variable PENSTOCK_NO_SUCH_KEY" in text)
        assert host(world.url) in text.splitlines()[0]


async def test_a_message_goes_when_the_next_key_is_pressed(world: World) -> None:
    async with running(options(world.url)) as pilot:
        await shown(pilot)
        await pilot.press("x")
        await until(pilot, lambda text: "x does nothing here." in text)
        await pilot.press("j")
        await until(pilot, lambda text: "does nothing" not in text and "? keys" in text.splitlines()[-1])


@pytest.mark.parametrize("width", [20, 50, 80, 160])
@pytest.mark.parametrize("view", ["rollouts", "groups", "releases", "tools", "log"])
def test_the_line_of_keys_names_help_and_the_way_out_and_cuts_none_off(view: str, width: int) -> None:
    keys = KeyMap({}).for_view(view)
    by_id = {key.id: key for key in keys}
    own = [key for key in keys if key.group == "change"]
    line = hints([*own, *(by_id[id] for id in HINTS if id in by_id)], width).plain
    assert len(line) <= width
    assert line.endswith("? keys  q quit")
    assert all(" " in piece for piece in line.strip().split("  "))


async def test_the_command_that_is_copied_names_the_gateway_that_penstock_would_not_ask(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_GATEWAY", raising=False)
    first, second = world.ended[:2]
    async with running(options(world.url, "compare", "rollouts", first, second), LARGE) as pilot:
        await until(pilot, lambda text: "step" in text and "asking" not in text)
        await pilot.press("y")
        named = f"--gateway {world.url}"
        await until(pilot, lambda text: f"penstock show {first} {named}; penstock show {second} {named}" in text)
        monkeypatch.setenv("PENSTOCK_GATEWAY", world.url)
        await pilot.press("y")
        await until(
            pilot, lambda text: text.splitlines()[-1] == f"Copied: penstock show {first}; penstock show {second}"
        )


async def test_a_crash_shows_where_it_happened_and_no_values(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        key = " ".join(["the", "secret"])
        raise RuntimeError(len(key))

    monkeypatch.setattr(PenstockApp, "show_help", crash)
    with pytest.raises(RuntimeError):
        async with running(options(world.url)) as pilot:
            await pilot.press("question_mark")
    told = capsys.readouterr().err
    assert "in crash" in told
    assert "the secret" not in told
    assert "locals" not in told


async def test_what_is_changed_is_asked_first_and_done_once(world: World) -> None:
    async with running(options(world.url, "workers")) as pilot, Client(world.url) as client:
        await until(pilot, lambda text: "Queue open" in text)
        await pilot.press("P")
        await until(pilot, lambda text: "The queue is open. Hand out no work until it is opened" in text)
        await pilot.press("escape")
        await until(pilot, lambda text: "Nothing was changed." in text)
        assert (await client.queue()).state == "open"
        await pilot.press("P")
        await until(pilot, lambda text: "Enter does it" in text)
        await pilot.press(*"lunch", "enter")
        await until(pilot, lambda text: "Queue paused" in text)
        assert (await client.queue()).state == "paused"
        await pilot.press("P")
        await until(pilot, lambda text: "Nothing is changed: the queue is paused already." in text)
        await pilot.press("U")
        await until(pilot, lambda text: "Enter does it" in text)
        await pilot.press("enter")
        await until(pilot, lambda text: "Queue open" in text)
        assert (await client.queue()).state == "open"


async def test_who_may_only_read_is_told_so(world: World) -> None:
    async with running(options(world.url, "workers", read_only=True)) as pilot, Client(world.url) as client:
        text = await until(pilot, lambda text: "Queue open" in text)
        assert "read-only" in text.splitlines()[0]
        await pilot.press("P")
        await until(pilot, lambda text: "Nothing is changed: it was started with --read-only." in text)
        assert (await client.queue()).state == "open"


@pytest.mark.parametrize("size", [(40, 10), SMALL, LARGE, (300, 80)])
async def test_it_fits_any_size(world: World, size: tuple[int, int]) -> None:
    async with running(options(world.url), size) as pilot:
        before = chosen(await shown(pilot))
        await pilot.resize_terminal(100, 30)
        text = await until(pilot, lambda text: max(map(len, text.splitlines())) <= 100)
        assert chosen(text) == before


async def test_a_gateway_that_is_not_there_is_said_and_waited_for(world: World) -> None:
    async with running(options("http://127.0.0.1:9"), LARGE) as pilot:
        text = await until(pilot, lambda text: "nothing answers there" in text and "lost" in text.splitlines()[0])
        assert "penstock serve" in text


async def test_why_nothing_is_shown_is_said_in_full_in_few_columns() -> None:
    async with running(options("http://127.0.0.1:9")) as pilot:
        await until(pilot, lambda text: "is `penstock serve` running?" in " ".join(text.split()))
