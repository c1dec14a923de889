"""The real program in a real terminal: sizes, signals, colours, and the ways out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.process import ROOT
from fakes.pty_program import PtyProgram, pty_program
from fakes.tui_world import World

from penstock.tui.session_recording import load

pytestmark = pytest.mark.slow

LEAVES = b"\x1b[?1049l"
"""What gives the terminal its own screen back."""


@asynccontextmanager
async def tui(
    world: World, *arguments: str, size: tuple[int, int] = (80, 24), **env: str
) -> AsyncGenerator[PtyProgram]:
    """`penstock tui` with this gateway."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PENSTOCK_GATEWAY": world.url} | env
    async with pty_program([sys.executable, "-m", "penstock", "tui", *arguments], found, size) as program:
        yield program


@pytest.mark.smoke
async def test_it_draws_takes_keys_and_leaves_the_terminal_as_it_was(world: World) -> None:
    async with tui(world, "rollouts") as program:
        text = await program.until(lambda text: "▶" in text and "live" in text)
        assert world.rollouts[0] in text
        assert program.is_raw
        program.write("jj")
        await program.until(lambda text: f"▶ {world.rollouts[2]}" in text)
        program.write("q")
        assert await program.ended() == 0
        assert LEAVES in program.raw
        assert not program.is_raw


async def test_it_draws_anew_when_the_window_changes(world: World) -> None:
    async with tui(world, "rollouts") as program:
        await program.until(lambda text: "▶" in text)
        program.resize(150, 40)
        text = await program.until(lambda text: "attempts" in text and "[Spans]" in text)
        assert len(max(text.splitlines(), key=len)) > 80
        program.resize(50, 12)
        await program.until(lambda text: "▶" in text and "[Spans]" not in text)


async def test_it_goes_to_the_background_and_comes_back(world: World) -> None:
    async with tui(world, "rollouts") as program:
        await program.until(lambda text: "▶" in text)
        program.write("\x1a")
        await program.until_raw(LEAVES)
        await asyncio.to_thread(os.waitid, os.P_PID, program.process.pid, os.WSTOPPED | os.WNOWAIT)
        program.raw.clear()
        program.signal(signal.SIGCONT)
        await program.until_raw(b"\x1b[?1049h")
        program.write("j")
        await program.until(lambda text: f"▶ {world.rollouts[1]}" in text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_as_a_key_does(world: World, number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl.gz"
    async with tui(world, "rollouts", "--record", str(path)) as program:
        await program.until(lambda text: "▶" in text)
        if number == signal.SIGINT:
            program.write("\x03")
            assert await program.ended() == 0
        else:
            program.signal(number)
            assert await program.ended() == 128 + number
        assert LEAVES in program.raw
    assert load(path).answers


async def test_a_window_that_is_closed_ends_it_and_leaves_the_recording_whole(world: World, tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl.gz"
    async with tui(world, "rollouts", "--record", str(path)) as program:
        await program.until(lambda text: "▶" in text)
        program.hang_up()
        await program.ended()
    assert load(path).answers


async def test_a_kill_leaves_the_recording_as_far_as_it_was(world: World, tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl.gz"
    async with tui(world, "rollouts", "--record", str(path)) as program:
        await program.until(lambda text: "▶" in text)
        program.signal(signal.SIGKILL)
        await program.ended()
    assert load(path).answers


async def test_it_is_read_without_colours(world: World) -> None:
    async with tui(world, "rollouts", NO_COLOR="1") as program:
        await program.until(lambda text: "▶" in text)
        program.write("q")
        await program.ended()
        colours = {code for code in codes(bytes(program.raw)) if code.startswith(("38", "48")) and not grey(code)}
        assert not colours


def codes(written: bytes) -> set[str]:
    """The colour sequences in what was written."""
    return {piece.partition("m")[0] for piece in written.decode(errors="replace").split("\x1b[") if "m" in piece[:40]}


def grey(code: str) -> bool:
    """Whether every colour in a sequence is a shade of grey."""
    parts = code.split(";")
    triples = [
        parts[at + 2 : at + 5]
        for at, part in enumerate(parts)
        if part in ("38", "48") and parts[at + 1 : at + 2] == ["2"]
    ]
    return all(len(set(triple)) == 1 for triple in triples)


@pytest.mark.parametrize("term", ["dumb", ""])
async def test_a_terminal_that_cannot_be_drawn_on_is_told_of_plain(world: World, term: str) -> None:
    async with tui(world, TERM=term) as program:
        assert await program.ended() == 2
        await program.until(lambda text: "`penstock tui --plain` prints the same as text" in " ".join(text.split()))


@pytest.mark.parametrize(
    ("pager", "said"),
    [("/no/such/pager", "/no/such/pager cannot be started: No such file"), ('"less', "is no command")],
)
async def test_a_pager_that_cannot_be_started_is_said(world: World, pager: str, said: str) -> None:
    async with tui(world, "rollouts", size=(120, 40), PAGER=pager) as program:
        await program.until(lambda text: "[Spans]" in text and "asking" not in text)
        program.write("o")
        await program.until(lambda text: said in text)
        program.write("j")
        await program.until(lambda text: f"▶ {world.rollouts[1]}" in text)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('theme = "no-such-theme"', "theme: there is no 'no-such-theme'; there are"),
        ('context = "a"\n[contexts.a]\ngateway = "example.org"', "'example.org' is not the URL of a gateway"),
        (
            'context = "a"\n[contexts.a]\ngateway = "http://127.0.0.1:9"\nkey = "PENSTOCK_NO_SUCH_KEY"',
            "the variable PENSTOCK_NO_SUCH_KEY, which has the key of http://127.0.0.1:9, is not set",
        ),
        ('[keys]\nno-such-key = ["x"]', "[keys]: 'no-such-key' is the id of no key"),
    ],
)
async def test_settings_that_cannot_be_followed_are_said_before_it_starts(
    world: World, written: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tui.toml"
    path.write_text(written)
    async with tui(world, PENSTOCK_TUI=str(path), size=(200, 24)) as program:
        assert await program.ended() == 2
        await program.until(lambda text: f"penstock: {said}" in text)
        assert "Traceback" not in program.text


@asynccontextmanager
async def paged(world: World, tmp_path: Path, pager: str, said: str) -> AsyncGenerator[PtyProgram]:
    """A TUI that has opened its pane in this pager, as soon as that has said this."""
    file = tmp_path / "pager"
    file.write_text(pager)
    file.chmod(0o755)
    async with tui(world, "rollouts", size=(120, 40), PAGER=str(file)) as program:
        await program.until(lambda text: "[Spans]" in text and "asking" not in text)
        program.write("o")
        await program.until(lambda text: said in text)
        yield program


async def test_the_pane_is_opened_in_a_pager(world: World, tmp_path: Path) -> None:
    async with paged(world, tmp_path, '#!/bin/sh\necho "paged: $(wc -l < "$1")"; read line\n', "paged:") as program:
        program.write("\n")
        await program.until(lambda text: "[Spans]" in text)


PAGES = f"""#!{sys.executable}
import signal, sys
signal.signal(signal.SIGINT, lambda *_: print("told", flush=True))
print("paged", flush=True)
sys.stdin.readline()
"""


async def test_a_key_that_interrupts_the_pager_is_for_the_pager(world: World, tmp_path: Path) -> None:
    """`less` gives up a search at Ctrl-C."""
    async with paged(world, tmp_path, PAGES, "paged") as program:
        program.write("\x03")
        await program.until(lambda text: "told" in text)
        program.write("\n")
        await program.until(lambda text: "[Spans]" in text)
        program.write("j")
        await program.until(lambda text: f"▶ {world.rollouts[1]}" in text)
