"""The recorded demo: every screen is as it was, small and large, and the pictures of the docs are made of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from fakes.goldens import check_text
from fakes.process import ROOT
from fakes.screens import LARGE, SMALL, app_of, screen_text, until
from rich.cells import cell_len
from textual.pilot import Pilot

from penstock.console.main import app
from penstock.console.views.pages import drawing, run_charts
from penstock.console.views.runs import result
from penstock.gateway.model.answers import RolloutPage
from penstock.tui.app import AppOptions, PenstockApp
from penstock.tui.screens.registry import STANDING, make_view
from penstock.tui.screens.runs import POINTS
from penstock.tui.session_recording import ReplayClient, ReplayClock, SessionRecording, load
from penstock.tui.settings import GatewayContext

SCREENS = [
    *STANDING, ("rollout", "refund-1002.2"), ("compare", "group", "refund-1002"),
    ("compare", "rollouts", "refund-1002.1", "refund-1002.2"), ("compare", "versions", "desk", "v1", "v2"),
    ("compare", "runs", "grpo-1", "grpo-2"),
]  # fmt: skip
PICTURES = {
    "tui-overview": (("overview",), (), (110, 32)),
    "tui-rollout": (("rollout", "refund-1002.2"), ("j", "j"), (110, 32)),
    "tui-release": (("releases",), (), (120, 36)),
    "tui-run": (("runs",), (), (120, 36)),
}
"""Name: the screen, keys that are pressed there, and its size."""
PLOTTED = ("evaluation/reward", "reward", "loss", "kl")
"""Metrics of the picture of `penstock runs plot`."""


@cache
def recording() -> SessionRecording:
    return load(ROOT / "tui" / "demo.jsonl.gz")


@asynccontextmanager
async def played(words: Sequence[str], size: tuple[int, int]) -> AsyncGenerator[Pilot[None]]:
    """A screen of the demo, once it has all that it asks for."""
    clock = ReplayClock(recording(), at_end=True)
    contexts = {"demo": GatewayContext(gateway="http://127.0.0.1:4747", read_only=True)}
    options = AppOptions(
        contexts,
        "demo",
        words,
        connect=lambda _: ReplayClient(recording(), clock),
        now_ns=clock.now_ns,
        note=lambda: "played",
    )
    app = PenstockApp(options)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda text: "live" in text.splitlines()[0] and "asking" not in text)
        yield pilot


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
    if shown.data is None or shown.view.needs_fill(shown.data, app.main.rows.in_sight()):
        return False
    return shown.chosen is None or shown.details_of == shown.chosen


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "160x48"])
@pytest.mark.parametrize("words", SCREENS, ids="-".join)
async def test_a_screen_looks_as_it_did(words: tuple[str, ...], size: tuple[int, int]) -> None:
    async with played(words, size) as pilot:
        text = await settled(pilot)
    lines = text.splitlines()
    assert len(lines) <= size[1]
    assert max(map(cell_len, lines)) <= size[0]
    assert "does not hold" not in text, "the recording lacks what this screen asks for"
    check_text(f"tui/{'-'.join(words)}-{size[0]}.txt", text)


@pytest.mark.parametrize("words", SCREENS, ids="-".join)
async def test_the_command_line_understands_what_a_screen_says_prints_the_same(words: tuple[str, ...]) -> None:
    clock = ReplayClock(recording(), at_end=True)
    async with ReplayClient(recording(), clock) as client:
        view = make_view(words)
        table = view.table(await view.load(client), clock.now_ns())
    commands = [view.command(id) for id in (None, *(table.ids if table is not None else ()))]
    for command in {one for said in commands for one in said.split("; ")}:
        program, *own = shlex.split(command)
        assert program == "penstock"
        app.parse_args(own, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("name", PICTURES)
async def test_the_pictures_of_the_docs_are_the_screens(name: str) -> None:
    words, keys, size = PICTURES[name]
    async with played(words, size) as pilot:
        await settled(pilot)
        await pilot.press(*keys)
        text = await settled(pilot)
        made = app_of(pilot).export_screenshot(title=f"penstock tui {' '.join(words)}")
    assert sum(map(bool, text.split("\n"))) > size[1] / 2, "more than half of it is empty"
    check_text(ROOT / "docs" / f"{name}.svg", made)


@pytest.mark.parametrize(
    ("size", "seen"), [((40, 10), "desk-7b"), (SMALL, "Calls a minute"), ((200, 50), "Cost a min")]
)
async def test_the_overview_fits_its_screen(size: tuple[int, int], seen: str) -> None:
    async with played(["overview"], size) as pilot:
        text = await settled(pilot)
        assert seen in text
        assert "key 2: shipping_state" in text
        assert (app_of(pilot).main.sheet.max_scroll_y == 0) == (size[1] > 10)


async def test_the_top_line_has_the_name_of_the_screen_and_the_connection_before_notes() -> None:
    async with played(["workers"], (48, 10)) as pilot:
        top = (await settled(pilot)).splitlines()[0]
    assert top.split() == ["demo", "Workers", "and", "queue", "live", "played"]


async def test_the_pictures_of_runs_are_their_plot() -> None:
    async with ReplayClient(recording(), ReplayClock(recording(), at_end=True)) as client:
        runs = {name: await client.curves(name, max_points=POINTS) for name in ("grpo-1", "grpo-2")}
        said = result(await client.run("grpo-1"), runs["grpo-1"])
    shown = {name: [curve for curve in curves if curve.metric in PLOTTED] for name, curves in runs.items()}
    check_text(ROOT / "docs" / "run-plot.svg", drawing(run_charts(shown), f"grpo-1: {said}"))


async def test_a_list_that_is_opened_again_has_the_rows_that_have_come_meanwhile() -> None:
    clock = ReplayClock(recording(), at_end=True)
    async with ReplayClient(recording(), clock) as client:
        first = [row.id for row in (await client.rollout_page("", 60, None)).rollouts]
        answers = recording().answers["GET /api/rollouts brief=true limit=60"]
        early = {row.id for row in RolloutPage.model_validate_json(answers[0].body, extra="ignore").rollouts}
        assert first[0] not in early, "it came while it was recorded"
        assert (await client.rollout_page("since:7d", 60, None)).rollouts[0].id == first[0]
        lately = [row.id for row in (await client.rollout_page("since:20s", 60, None)).rollouts]
        assert lately == first[: len(lately)]
        assert 0 < len(lately) < len(first) / 2


@pytest.mark.slow
def test_the_demo_prints_every_screen_eighty_columns_wide_without_a_gateway(tmp_path: Path) -> None:
    alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    # A file that does not say where its gateway is, because none is asked.
    (tmp_path / "penstock.toml").write_text("port = 0\n")
    command = [sys.executable, "-m", "penstock", "tui", "--demo", "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone, cwd=tmp_path, check=True)
    assert done.stderr == ""
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ") and "(penstock" in line] == [
        "Overview", "Rollouts", "Tools", "Releases", "Resources", "Workers", "Runs", "Upstreams", "Log", "Groups",
    ]  # fmt: skip
    check_text("tui/plain.txt", done.stdout)
