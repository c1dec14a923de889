"""`penstock tui`: agents, tools, releases and training, live in a terminal; or once, as text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.tui.recording import Recorder
    from penstock.tui.settings import Context, Settings
    from penstock.tui.view import View

Screen = Annotated[str, Parameter(help="A screen and what it wants: rollouts status:failed, releases, rollout r1 ...")]
Flag = Annotated[bool, Parameter(negative="")]
WIDTH = 80
"""Columns of `--plain` where there is no terminal."""
DEMO = "demo"
"""What the line on top calls a gateway that is a recording."""


def tui(
    *screen: Screen,
    gateway: Url = LOCAL,
    context: str | None = None,
    read_only: Flag = False,
    plain: Flag = False,
    record: Path | None = None,
    play: Path | None = None,
    demo: Flag = False,
) -> None:
    """See agents, tools, releases and training live, and act on them.

    Parameters
    ----------
    context
        A gateway by its name in the settings file; then --gateway is not needed.
    read_only
        Change nothing: the keys for it say so.
    plain
        Print the screen once as text; all screens when none is named.
    record
        Write what the gateway answers to this file, for --play.
    play
        Show what was recorded in this file; no gateway is needed.
    demo
        Play the recording that comes with Penstock.
    """
    from penstock.tui import settings
    from penstock.tui.recording import RecordingError

    if record is not None and (play is not None or demo):
        raise Failure("--record does not go with --play or --demo: what is played is a recording already", 2)
    if play is not None and demo:
        raise Failure("--demo plays a recording of its own: leave out --play, or --demo", 2)
    try:
        playing = demo or play is not None
        source = _played(play, plain) if playing else _live(settings.load(), gateway, context, record)
    except RecordingError as e:
        raise Failure(str(e), 2) from None
    try:
        _show(source, screen, read_only, plain)
    finally:
        source.close()


class _Source:
    """Where answers come from."""

    def __init__(
        self,
        settings: Settings,
        contexts: Mapping[str, Context],
        name: str,
        connect: Callable[[Context], Client],
        now_ns: Callable[[], int] = time.time_ns,
        note: str = "",
    ) -> None:
        self.settings, self.contexts, self.name = settings, contexts, name
        self.connect, self.now_ns, self.note = connect, now_ns, note
        self.recorder: Recorder | None = None

    def close(self) -> None:
        """Ends the recording."""
        if self.recorder is not None:
            self.recorder.close()


def _live(found: Settings, gateway: str, context: str | None, record: Path | None) -> _Source:
    """A gateway that runs."""
    from penstock.gateway.client.client import Client
    from penstock.tui import settings
    from penstock.tui.link import is_far
    from penstock.tui.recording import Recorder, RecordingClient

    contexts = settings.contexts(found, gateway)
    name = context or found.context or settings.host(gateway)
    if name not in contexts:
        raise Failure(f"--context: there is no {name!r}; there are {', '.join(contexts)}", 2)
    recorder = None if record is None else Recorder(record, time.time_ns())

    def connect(context: Context) -> Client:
        url, key, far = context.gateway, context.secret(), is_far(context.gateway)
        return Client(url, key, far) if recorder is None else RecordingClient(recorder, url, key, far)

    source = _Source(found, contexts, name, connect, note="" if record is None else f"recording to {record}")
    source.recorder = recorder
    return source


def _played(play: Path | None, plain: bool) -> _Source:
    """A gateway that is a recording."""
    from penstock.tui import recording, settings

    path = play or Path(__file__).with_name("demo.jsonl.gz")
    found = recording.load(path)
    clock = recording.Clock(found, at_end=plain)
    name = path.name if play is not None else DEMO
    contexts = {name: settings.Context(gateway=LOCAL, read_only=True)}
    note = "played; it stands still at its end"
    return _Source(settings.load(), contexts, name, lambda _: recording.PlayedClient(found, clock), clock.now_ns, note)


def _show(source: _Source, screen: tuple[str, ...], read_only: bool, plain: bool) -> None:
    if plain:
        _print(source, screen)
        return
    _fit_for_it()
    from penstock.tui.app import Options, PenstockApp
    from penstock.tui.keys import KeyMap

    _view(screen or ("rollouts",))
    try:
        keys = KeyMap(source.settings.keys)
    except ValueError as e:
        raise Failure(f"[keys]: {e}", 2) from None
    options = Options(
        contexts=source.contexts,
        context=source.name,
        view=screen or ("rollouts",),
        read_only=read_only,
        theme=source.settings.theme,
        keys=keys,
        connect=source.connect,
        now_ns=source.now_ns,
        note=source.note,
    )
    app = PenstockApp(options)
    app.run()
    if app.return_code:
        sys.exit(app.return_code)


def _print(source: _Source, screen: tuple[str, ...]) -> None:
    """One screen, or all that need nothing."""
    import asyncio

    from rich.console import Console

    from penstock.gateway.client.client import ClientError
    from penstock.tui.plain import printed
    from penstock.tui.screens.registry import STANDING

    width = Console().width if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    console = Console(width=width, highlight=False, emoji=False, markup=False)

    async def ask() -> None:
        async with source.connect(source.contexts[source.name]) as client:
            for number, words in enumerate([screen] if screen else STANDING):
                for piece in await printed(_view(tuple(words)), client, source.now_ns(), width):
                    console.print(piece, crop=False)
                if not screen and number < len(STANDING) - 1:
                    console.print()

    try:
        asyncio.run(ask())
    except ClientError as e:
        raise Failure(str(e)) from None


def _view(words: tuple[str, ...]) -> View[Any, Any]:
    from penstock.tui.screens import registry

    try:
        return registry.made(words)
    except ValueError as e:
        raise Failure(str(e), 2) from None


def _fit_for_it() -> None:
    """Raises `Failure` where no terminal can show it."""
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise Failure("this terminal (TERM) cannot be drawn on; `penstock tui --plain` prints the same as text", 2)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Failure("the TUI needs a terminal; `penstock tui --plain` prints the same as text", 2)
