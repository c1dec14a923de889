"""`penstock tui`: agents, tools, releases and training, live in a terminal; or once, as text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.gateway.client.console import FLAT, LOCAL, PORT, CommandError, Url, note
from penstock.gateway.model.codes import install_hint

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.tui.session_recording import SessionRecorder
    from penstock.tui.settings import GatewayContext, TuiSettings
    from penstock.tui.view import ScreenView

Screen = Annotated[str, Parameter(help="A screen and what it wants: rollouts status:failed, releases, rollout r1 ...")]
Flag = Annotated[bool, Parameter(negative="")]
WIDTH = 80
"""Columns of `--plain` without a terminal."""
FIRST = ("overview",)
"""The first screen."""
DEMO = "demo"
"""Name of the demo recording on the line on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Options to write what the gateway answers to a file, or to show such a file in place of a gateway."""

    record: Path | None = None
    """Write what the gateway answers to this file, for --play."""
    play: Path | None = None
    """Show what was recorded in this file; no gateway is needed."""
    demo: Flag = False
    """Play the recording that comes with Penstock."""

    @property
    def playing(self) -> bool:
        """True if no gateway is asked."""
        return self.demo or self.play is not None

    def check(self) -> None:
        """Raise `CommandError` for options that exclude each other."""
        if self.record is not None and self.playing:
            raise CommandError("--record does not go with --play or --demo: what is played is a recording already", 2)
        if self.play is not None and self.demo:
            raise CommandError("--demo plays a recording of its own: leave out --play, or --demo", 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserOptions:
    """The TUI as a page."""

    web: Flag = False
    """Serve it to a browser on this machine, by a link that works once; it changes nothing."""
    port: Annotated[int | None, Parameter(validator=PORT)] = None
    """With --web, the port; a free one if not given."""
    writes: Flag = False
    """With --web, let the page change things."""

    def check(self, plain: bool, record: Path | None) -> None:
        """Raise `CommandError` for options that exclude each other."""
        if not self.web and (self.port is not None or self.writes):
            raise CommandError(f"--{'port' if self.port is not None else 'writes'} goes with --web", 2)
        if self.web and (plain or record is not None):
            raise CommandError(f"--web does not go with --{'plain' if plain else 'record'}", 2)


LIVE, TERMINAL = RecordingOptions(), BrowserOptions()


def tui(
    *screen: Screen,
    gateway: Url = LOCAL,
    context: str | None = None,
    read_only: Flag = False,
    plain: Flag = False,
    recorded: Annotated[RecordingOptions, FLAT] = LIVE,
    browser: Annotated[BrowserOptions, FLAT] = TERMINAL,
) -> None:
    """See agents, tools, releases and training live, and act on them.

    Parameters
    ----------
    context
        A gateway by its name in the settings file; then --gateway is not needed.
    read_only
        Change nothing: the keys for it say so.
    plain
        Print the screen once as text; all screens with a key when none is named.
    """
    if find_spec("textual") is None:
        raise CommandError(f"the TUI needs textual: {install_hint('tui')}")
    from penstock.tui import settings
    from penstock.tui.session_recording import RecordingError

    recorded.check()
    browser.check(plain, recorded.record)
    if browser.web:
        _view(screen or FIRST)
        if not recorded.playing:
            _live_source(settings.load(), gateway, context, None)
        _serve(_tab_command(screen, gateway, context, recorded, read_only or not browser.writes), browser.port or 0)
        return
    try:
        source = (
            _recorded_source(recorded.play, plain)
            if recorded.playing
            else _live_source(settings.load(), gateway, context, recorded.record)
        )
    except RecordingError as e:
        raise CommandError(str(e), 2) from None
    try:
        _show(source, screen, read_only, plain)
    finally:
        source.close()


def _tab_command(
    screen: tuple[str, ...], gateway: str, context: str | None, recorded: RecordingOptions, read_only: bool
) -> list[str]:
    """The command of a browser tab's process. Keys of gateways stay in the environment, not in the command."""
    named = ["--context", context] if context is not None else []
    played = ["--play", str(recorded.play)] if recorded.play is not None else ["--demo"] if recorded.demo else []
    only = ["--read-only"] if read_only else []
    return [sys.executable, "-P", "-m", "penstock", "tui", "--gateway", gateway, *named, *played, *only, "--", *screen]


def _serve(command: list[str], port: int) -> None:
    import asyncio

    from penstock.tui.web import serve

    def ready(link: str) -> None:
        print(f"Open this link in a browser on this machine; it works once:\n{link}", flush=True)
        note("Ctrl-C ends it.")

    asyncio.run(serve(command, port, ready))


class _DataSource:
    """The gateway, or the recording, that answers questions."""

    def __init__(
        self,
        settings: TuiSettings,
        contexts: Mapping[str, GatewayContext],
        name: str,
        connect: Callable[[GatewayContext], Client],
        now_ns: Callable[[], int] = time.time_ns,
        note: Callable[[], str] = str,
    ) -> None:
        self.settings, self.contexts, self.name = settings, contexts, name
        self.connect, self.now_ns, self.note = connect, now_ns, note
        self.recorder: SessionRecorder | None = None

    def close(self) -> None:
        """End the recording, and print its problem if it is incomplete."""
        if self.recorder is not None:
            self.recorder.close()
            if self.recorder.problem is not None:
                note(self.recorder.problem)


def _live_source(found: TuiSettings, gateway: str, context: str | None, record: Path | None) -> _DataSource:
    """A source that is a running gateway."""
    from penstock.gateway.client.client import Client, ClientError
    from penstock.tui import settings
    from penstock.tui.loader import is_remote
    from penstock.tui.session_recording import RecordingClient, SessionRecorder

    contexts = settings.contexts(found, gateway)
    name = context or found.context or settings.host(gateway)
    if name not in contexts:
        raise CommandError(f"--context: there is no {name!r}; there are {', '.join(contexts)}", 2)
    try:
        Client(contexts[name].gateway, contexts[name].secret())
    except ClientError as e:
        raise CommandError(str(e), 2) from None
    recorder = None if record is None else SessionRecorder(record, time.time_ns())

    def connect(context: GatewayContext) -> Client:
        url, key, far = context.gateway, context.secret(), is_remote(context.gateway)
        return Client(url, key, far) if recorder is None else RecordingClient(recorder, url, key, far)

    source = _DataSource(found, contexts, name, connect, note=str if recorder is None else lambda: recorder.note)
    source.recorder = recorder
    return source


def _recorded_source(play: Path | None, plain: bool) -> _DataSource:
    """A source that is a recording."""
    from penstock.tui import session_recording, settings

    path = play or Path(__file__).with_name("demo.jsonl.gz")
    found = session_recording.load(path)
    clock = session_recording.ReplayClock(found, at_end=plain)
    name = path.name if play is not None else DEMO
    contexts = {name: settings.GatewayContext(gateway=LOCAL, read_only=True)}
    return _DataSource(
        settings.load(),
        contexts,
        name,
        connect=lambda _: session_recording.ReplayClient(found, clock),
        now_ns=clock.now_ns,
        note=lambda: "played to its end",
    )


def _show(source: _DataSource, screen: tuple[str, ...], read_only: bool, plain: bool) -> None:
    if plain:
        _print(source, screen)
        return
    _check_terminal()
    from textual.theme import BUILTIN_THEMES

    from penstock.tui.app import AppOptions, PenstockApp
    from penstock.tui.keys import KeyMap

    _view(screen or FIRST)
    try:
        keys = KeyMap(source.settings.keys)
    except ValueError as e:
        raise CommandError(f"[keys]: {e}", 2) from None
    theme = source.settings.theme
    if theme is not None and theme not in BUILTIN_THEMES:
        raise CommandError(f"theme: there is no {theme!r}; there are {', '.join(sorted(BUILTIN_THEMES))}", 2)
    options = AppOptions(
        contexts=source.contexts,
        context=source.name,
        view=screen or FIRST,
        read_only=read_only,
        theme=theme,
        keys=keys,
        connect=source.connect,
        now_ns=source.now_ns,
        note=source.note,
    )
    app = PenstockApp(options)
    app.run()
    if app.return_code:
        sys.exit(app.return_code)


def _print(source: _DataSource, screen: tuple[str, ...]) -> None:
    """Print one screen, or all that have a key."""
    import asyncio

    from rich.console import Console

    from penstock.gateway.client.client import ClientError
    from penstock.tui.screens.registry import STANDING
    from penstock.tui.view import render_plain

    width = Console().width if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    console = Console(width=width, highlight=False, emoji=False, markup=False)

    async def ask() -> None:
        async with source.connect(source.contexts[source.name]) as client:
            for number, words in enumerate([screen] if screen else STANDING):
                for piece in await render_plain(_view(tuple(words)), client, source.now_ns(), width):
                    console.print(piece, crop=False)
                if not screen and number < len(STANDING) - 1:
                    console.print()

    try:
        asyncio.run(ask())
    except ClientError as e:
        raise CommandError(str(e)) from None


def _view(words: tuple[str, ...]) -> ScreenView[Any, Any]:
    from penstock.tui.screens import registry

    try:
        return registry.make_view(words)
    except ValueError as e:
        raise CommandError(str(e), 2) from None


def _check_terminal() -> None:
    """Raise `CommandError` when there is no usable terminal; a browser's tab has one of its own."""
    if "TEXTUAL_DRIVER" in os.environ:
        return
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise CommandError("this terminal (TERM) cannot be drawn on; `penstock tui --plain` prints the same as text", 2)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("the TUI needs a terminal; `penstock tui --plain` prints the same as text", 2)
