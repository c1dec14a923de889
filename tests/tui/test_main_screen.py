"""The one screen: rows, filters, what a person changes, and a gateway that goes and comes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.process import Gateway
from fakes.screens import LARGE, SMALL, app_of, options, running, screen_text, until
from fakes.tui_world import World
from textual.pilot import Pilot

from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Digest
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.app import PenstockApp
from penstock.tui.keys import HINTS, KeyMap
from penstock.tui.screens.registry import make_view
from penstock.tui.settings import GatewayContext, SavedView, SavedViews, host
from penstock.tui.widgets import hints


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
        await pilot.press("r")
        assert "P pause" not in text.splitlines()[-1]
        await pilot.press("question_mark")
        assert "Change (asks first)" not in await until(pilot, lambda text: "one row up" in text)
    async with running(options(world.url, "workers")) as pilot:
        await until(pilot, lambda text: "P pause" in text.splitlines()[-1])


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


async def test_a_fresh_gateway_says_how_an_agent_calls_it(gateway: Gateway) -> None:
    lines = f"OPENAI_BASE_URL={gateway.url}/v1", f"ANTHROPIC_BASE_URL={gateway.url}"
    for view in ("overview", "rollouts"):
        async with running(options(gateway.url, view)) as pilot:
            await until(pilot, lambda text: all(line in text for line in lines))


async def test_a_small_terminal_says_why_it_shows_nothing_and_what_a_key_would_do(gateway: Gateway) -> None:
    async with running(options(gateway.url, "releases"), (40, 10)) as pilot:
        text = await until(pilot, lambda text: "starts one." in text)
        assert "promote" not in text.splitlines()[-1]
        await pilot.press("K")
        await until(pilot, lambda text: "? lists the keys." in text)


async def test_the_line_of_screens_names_them_and_is_clicked(world: World) -> None:
    async with running(options(world.url)) as pilot:
        line = (await shown(pilot)).splitlines()[1]
        assert line.split()[:4] == ["0", "overview", "1", "rollouts"]
        assert line.endswith("7 8 9"), "those without room keep their keys"
        await pilot.click("#screens", offset=(line.index("workers"), 0))
        await until(pilot, lambda text: "Workers and queue" in text)


async def test_a_screen_is_found_again_as_it_was_left(world: World) -> None:
    async with running(options(world.url)) as pilot:
        await shown(pilot)
        await pilot.press("slash", *"status:failed", "enter")
        await until(pilot, lambda text: "found  status:failed" in text)
        await pilot.press("j")
        row = chosen(screen_text(app_of(pilot)))
        data = app_of(pilot).main.shown.data
        await pilot.press("5")
        await until(pilot, lambda text: "Queue open" in text)
        await pilot.press("1")
        assert chosen(await until(pilot, lambda text: "found  status:failed" in text)) == row
        assert app_of(pilot).main.shown.data is data
        await pilot.press("1")
        await until(pilot, lambda text: "on the tape" in text)


async def test_a_range_of_time_is_the_gateways_filter(world: World) -> None:
    async with running(options(world.url)) as pilot:
        before = await shown(pilot)
        await pilot.press("w")
        text = await until(pilot, lambda text: bool(re.search(r"^\d+ found", text, re.MULTILINE)))
        assert "the last 15 min" in text.splitlines()[0]
        assert app_of(pilot).main.shown.view.command(None) == "penstock rollouts since:15m"
        await pilot.press("0")
        await until(pilot, lambda text: "the last 15 min" in text.splitlines()[0] and "Health" in text)
        await pilot.press("1", "colon", *"since 1ms", "enter")
        await until(pilot, lambda text: "No rollout matches since:1ms" in " ".join(text.split()))
        await pilot.press("colon", *"since soon", "enter")
        await until(pilot, lambda text: "since: 'soon' is not a time" in text)
        await pilot.press("colon", *"since all", "enter")
        assert chosen(await until(pilot, lambda text: "on the tape" in text and "▶" in text)) == chosen(before)


async def test_a_text_is_searched_for_and_its_place_opened(world: World) -> None:
    async with running(options(world.url), LARGE) as pilot:
        await shown(pilot)
        await pilot.press("ctrl+f", *"SEEN", "enter")
        text = await until(pilot, lambda text: "9 found" in text and "[Places]" in text)
        call = chosen(text)
        assert "attribute: seen" in text
        await pilot.press("enter")
        text = await until(pilot, lambda text: "[Content]" in text and "asking" not in text)
        assert f"Rollout {call.partition('/')[0]}" in text.splitlines()[0]
        assert re.search(r"^▶   #1 event note  seen", text, re.MULTILINE)
        await pilot.press("escape", "slash", *"-kind:event", "enter")
        await until(pilot, lambda text: "No call says it." in text)


async def test_a_view_is_saved_listed_recalled_and_deleted(world: World, tmp_path: Path) -> None:
    saved = SavedViews(tmp_path / "new" / "views.json")
    async with running(replace(options(world.url, "rollouts", "status:failed"), saved=saved)) as pilot:
        await until(pilot, lambda text: "found" in text and "▶" in text)
        await pilot.press("colon", *"columns reward rollout", "enter")
        await until(pilot, lambda text: "reward  rollout" in text)
        await pilot.press("s", "colon", *"since 1h", "enter", "V", *"bad ones", "enter")
        await until(pilot, lambda text: "F1 recalls it" in text)
        wanted = SavedView(
            words=["rollouts", "status:failed"], columns=["reward", "rollout"], sort="rollout", since="1h"
        )
        assert saved.load() == {"bad ones": wanted}
        await pilot.press("colon", *"columns nonsense", "enter")
        await until(pilot, lambda text: "there is no column 'nonsense'; there are rollout, group" in text)
        await pilot.press("colon", *"since all", "enter", "5", "f1")
        text = await until(pilot, lambda text: "reward  rollout↓" in text)
        assert "found  status:failed  sorted by rollout" in text
        assert "the last 1 h" in text.splitlines()[0]
        await pilot.press("v")
        await until(pilot, lambda text: "1 saved view" in text and "▶ bad ones" in text)
        await pilot.press("X")
        await until(pilot, lambda text: "No view is saved yet" in text)
        await pilot.press("f2")
        await until(pilot, lambda text: "There is no saved view 2" in text)
    (tmp_path / "new" / "views.json").write_text("{")
    with pytest.raises(ValueError, match=r"views\.json cannot be read: Invalid JSON"):
        saved.load()


async def test_the_palette_finds_screens_and_keys_by_their_words(world: World) -> None:
    async with running(options(world.url)) as pilot:
        await shown(pilot)
        await pilot.press("ctrl+p", *"upstr")
        await until(pilot, lambda text: "what the gateway calls" in text)
        await pilot.press("enter")
        await until(pilot, lambda text: "Upstreams" in text.splitlines()[0])
        await pilot.press("ctrl+p", *"next range")
        await until(pilot, lambda text: "key w" in text)
        await pilot.press("enter")
        await until(pilot, lambda text: "This screen has no range of time." in text)


async def test_a_list_of_something_is_reached_by_its_name_and_from_the_list_above(world: World) -> None:
    async with running(options(world.url, "webhooks")) as pilot:
        await until(pilot, lambda text: "No webhook is configured" in " ".join(text.split()))
        view = app_of(pilot).main.shown.view
        opened = view.opens(None, "pager")
        assert opened is not None
        assert opened.command(None) == "penstock webhook deliveries pager"
        await pilot.press("colon", *"deliveries", "enter")
        await until(pilot, lambda text: "deliveries wants the webhook behind it" in text)
        await pilot.press("colon", *"deliveries pager", "enter")
        text = await until(pilot, lambda text: "pager" in text and "asking" not in text)
        assert "Deliveries pager" in text.splitlines()[0]


async def test_the_overview_asks_for_errors_and_figures_only_when_something_has_happened(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = Client.read

    async def noted(client: Client, method: str, path: str, *rest: Any) -> bytes:
        asked.append(path.removeprefix("/api/"))
        return await read(client, method, path, *rest)

    monkeypatch.setattr(Client, "read", noted)
    async with Client(world.url) as client:
        view = make_view(["overview"])
        view.pane = ""
        assert (await view.load(client)).figures is None
        assert (asked.count("spans"), asked.count("breakdown")) == (1, 0), "all else is shown first"
        assert (await view.load(client)).figures is not None
        figures = asked.count("breakdown")
        await view.load(client)
        assert (asked.count("spans"), asked.count("breakdown")) == (1, figures)
        view.observe(Digest(cursor=1, errors=1))
        await view.load(client)
        assert asked.count("spans") == 2
