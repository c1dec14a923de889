"""The program in the terminal: connects to a gateway, follows it, and carries out commands of keys.

    session     one connection: the feed, the looks (`loader`), who we are; a new one when the context changes
    Main        draws and takes keys (`main_screen`)
    change      asks the person, then does what a `ViewAction` says, if this key and this person may

All waiting happens in the session's tasks. No key waits.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Final, cast

from rich.traceback import Traceback
from textual.app import App, SuspendNotSupported
from textual.command import CommandPalette, DiscoveryHit, Hits, Provider
from textual.command import Hit as CommandHit
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.console import CONFIG_FILE, LOCAL, CommandError
from penstock.gateway.model import times
from penstock.gateway.model.answers import Digest, FilterField
from penstock.gateway.model.base import ActionRequest
from penstock.tui.keys import VIEW_KEYS, KeyBinding, KeyMap, name
from penstock.tui.loader import GatewayLink, RefreshKind, ViewLoader, is_remote
from penstock.tui.main_screen import RANGES, MainScreen
from penstock.tui.screens import registry
from penstock.tui.settings import GatewayContext, SavedView, SavedViews
from penstock.tui.view import DigestHistory, ScreenView, ViewAction, column_word, with_columns
from penstock.tui.widgets import Confirm, Help

# Textual's driver of a terminal, changed so that the program ends when the window is closed.
#
# The kernel then sends SIGHUP and SIGCONT, every write fails, and every read reports the end of the file. Textual's
# own driver (8.2) takes the SIGCONT for a return from the background: it starts a second thread of each kind, and the
# writing thread ends at its first error, so that its queue is never emptied. After thirty more writes the program
# waits forever, without a terminal. Here a SIGCONT without a terminal is ignored, and failed writes are dropped.


class TerminalDriver(LinuxDriver):
    """The driver of `penstock tui` in a terminal."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)  # pyright: ignore[reportUnknownMemberType]  # Textual leaves it untyped
        self._file = cast("IO[str]", TerminalOutput(self._file))

    def _sigcont_application(self, *_: object) -> None:
        if os.isatty(self.fileno):
            super()._sigcont_application()  # pyright: ignore[reportUnknownMemberType]  # Textual leaves it untyped


class TerminalOutput:
    """The output file of a terminal; drops writes once the window is closed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError:  # the window is closed: SIGHUP ends the program
            return

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            return

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


FEED_S: Final = {False: 0.5, True: 2.0}
"""Interval of the feed's digests, by whether the gateway is far away; s."""
AGAIN_S: Final = 1.0
"""Time between two tries to follow the feed; s."""
PARENT_S: Final = 1.0
"""Interval at which a page's process checks that its server is alive; s."""
FIRST_THEME: Final = "textual-dark"
LEAVES: Final = frozenset({"palette", "quit"})
"""Keys that the palette does not list, because they end it."""


def connect_client(context: GatewayContext) -> Client:
    """A client of a gateway; answers come compressed from far away. Raises `ClientError` for an invalid URL, and
    `CommandError` when the variable of its key is not set.
    """
    return Client(context.gateway, context.secret(), compressed=is_remote(context.gateway))


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Options of the program: its gateways, its first screen, its keys."""

    contexts: Mapping[str, GatewayContext]
    context: str
    """The context to begin with."""
    view: Sequence[str] = ("overview",)
    """The first screen: its name and arguments."""
    read_only: bool = False
    theme: str | None = None
    keys: KeyMap = field(default_factory=lambda: KeyMap({}))
    connect: Callable[[GatewayContext], Client] = connect_client
    now_ns: Callable[[], int] = time.time_ns
    note: Callable[[], str] = str
    """A note for the line on top, such as that a recording is played; empty for none."""
    saved: SavedViews = field(default_factory=SavedViews.of_person)


class PenstockCommands(Provider):
    """The lines of the palette: screens, saved views, and the keys of the shown screen."""

    def _lines(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """(what is looked for, its help, what it does)."""
        app = cast("PenstockApp", self.app)
        for screen, named in registry.SCREENS.items():
            if not named.wants or named.wants.startswith("["):
                key = f"{VIEW_KEYS[screen]}  " if screen in VIEW_KEYS else ""
                yield f"{key}{named.view.title}", named.help, partial(app.go, [screen])
        for saved in app.saved_views():
            yield f"Saved view: {saved}", "recall it", partial(app.show_saved, saved)
        view = app.main.shown.view.name
        for row in app.keys.for_view(view):
            shown = row.group not in ("move", "change") or (row.group == "change" and app.may_not_change() is None)
            if shown and not row.id.startswith("go.") and row.id not in LEAVES:
                # Once the palette has gone, because the key may open something else.
                yield (
                    f"{row.does[:1].upper()}{row.does[1:]}",
                    f"key {name(row.keys[0])}",
                    partial(app.press, row.keys[0]),
                )

    async def discover(self) -> Hits:
        for title, help, run in self._lines():
            yield DiscoveryHit(title, run, help=help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, help, run in self._lines():
            if (score := matcher.match(f"{title} {help}")) > 0:
                yield CommandHit(score, matcher.highlight(title), run, help=help)


class PenstockApp(App[None], inherit_bindings=False):
    """The Textual application of `penstock tui`."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "Penstock"

    def __init__(self, options: AppOptions, driver_class: type[Driver] | None = None) -> None:
        super().__init__(driver_class=driver_class)
        self.options, self.keys, self.now_ns = options, options.keys, options.now_ns
        self.context = options.context
        self.link = GatewayLink(since_ns=options.now_ns())
        self.fields: Sequence[FilterField] = ()
        self.role: str | None = None
        self.client: Client | None = None
        self.address = ""
        self.traffic = DigestHistory(lambda: self.now_ns() / 1e9)
        self.loader: ViewLoader
        self._changing = asyncio.Lock()
        self.theme = options.theme or FIRST_THEME
        self.main = MainScreen(self)

    def get_driver_class(self) -> type[Driver]:
        """Our driver in a terminal; in a browser and in tests Textual's own."""
        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    # Connecting -------------------------------------------------------------------------------------------------------

    async def on_mount(self) -> None:
        """Show the first screen while connecting."""
        if not self.is_headless:
            # End as `q` does: the terminal is restored, and a recording is complete.
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self._end_by, number)
        if "TEXTUAL_DRIVER" in os.environ:
            # The process of a browser's tab: it must end by itself when the server of its page was killed.
            server = os.getppid()
            self.set_interval(PARENT_S, lambda: None if os.getppid() == server else self.exit())
        await self.push_screen(self.main)
        self.connect_to(self.context)

    def _end_by(self, number: signal.Signals) -> None:
        self.exit(return_code=128 + number)

    def connect_to(self, name: str) -> None:
        """Begin a new session with the context of this name."""
        self.context, self.role, self.fields = name, None, ()
        self.link = GatewayLink(since_ns=self.now_ns())
        gateway = self.options.contexts[name].gateway.rstrip("/")
        self.address = "" if gateway.startswith("unix:") else gateway
        self.run_worker(self._session(self.options.contexts[name]), group="session", exclusive=True)

    async def _session(self, context: GatewayContext) -> None:
        far = is_remote(context.gateway)
        async with self.options.connect(context) as client:
            self.client = client
            self.loader = ViewLoader(client, self.link, far, self._told)
            stack = self.main.stack
            view = stack[-1].view if stack else registry.make_view(self.options.view)
            # The views may hold data of another gateway.
            view.forget()
            self.main.kept.clear()
            self.main.open(view, over=False)
            self.main.before = None
            self.main.marked.clear()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.loader.run())
                group.create_task(self._follow(client, far))

    async def _follow(self, client: Client, far: bool) -> None:
        """Pass the feed's digests on to the views, and connect again when the feed ends."""
        while True:
            try:
                await self._learn(client)
                async for digest in client.digests(every_s=FEED_S[far], lost=self._lost):
                    self._changed(digest)
            except ClientError as e:
                if e.temporary:
                    self._lost(e)
                else:
                    # It may pass: the key is being changed, or the gateway has come back with another tape.
                    self.main.say(str(e))
                    if e.status == 400:  # its feed ends before our cursor: another tape
                        self._begin_anew()
            await asyncio.sleep(AGAIN_S)

    def _begin_anew(self) -> None:
        """Forget all data: it is not of the tape that the gateway has now."""
        for shown in filter(None, (*self.main.stack, *self.main.kept.values(), self.main.before)):
            shown.forget()
        self.main.draw_soon()
        self.loader.reload()

    async def _learn(self, client: Client) -> None:
        """Ask once for our role and for the fields of filters."""
        caller, fields = await asyncio.gather(client.whoami(), client.filter_fields())
        self.role, self.fields = caller.role, fields.rollouts
        self._told("link")

    def _lost(self, error: ClientError) -> None:
        self.link.record_failure(str(error), time.time_ns())
        self.loader.reload()

    def _changed(self, digest: Digest) -> None:
        self.link.record_answer(time.time_ns())
        self.traffic.add(digest)
        # Every view that is kept is notified, so that none is out of date when one goes back to it.
        views = {id(one.view): one.view for one in (*self.main.kept.values(), *self.main.stack)}
        due = {place: view.observe(digest) for place, view in views.items()}
        if self.main.stack and due[id(self.main.shown.view)]:
            self.loader.reload()
        self.loader.set_visible(self.main.rows.in_sight())

    def _told(self, what: RefreshKind) -> None:
        self.main.handle_refresh(what)

    # Going to other views ---------------------------------------------------------------------------------------------

    def go(self, words: Sequence[str]) -> None:
        """Carry out a command of `:`, such as to go to a screen, a context or a theme, or to quit."""
        command, *rest = words
        try:
            match command, rest:
                case (("quit" | "q" | "exit"), []):
                    self.quit()
                case "ctx", [context]:
                    self._switch(context)
                case "theme", [theme]:
                    self._set_theme(theme)
                case "since", [since]:
                    self._limit(since)
                case "columns", names:
                    self._choose_columns(names)
                case "view", [_, *_]:
                    self.show_saved(" ".join(rest))
                case "views", []:
                    self.main.open(registry.SavedViewsView(self.options.saved))
                case _, [] if command in self.main.kept and [one.view.name for one in self.main.stack] != [command]:
                    # As one left it: its rows, its filter, and the chosen row.
                    self.main.before = self.main.shown
                    self.main.go([self.main.kept[command]])
                case _ if [one.view.name for one in self.main.stack] == list(words) and not self.main.shown.view.terms:
                    self.main.say(f"{self.main.shown.view.title} is shown already; r asks again.")
                case _:
                    self.main.open(registry.make_view(words), over=len(words) > 1)
        except ValueError as e:
            self.main.say(str(e))

    def commands(self) -> dict[str, Sequence[str]]:
        """Completions of `:`: the commands, each with its possible arguments."""
        shown = self.main.shown
        ids = [] if shown.data is None or shown.view.name != "rollouts" else list(shown.data.order[:500])
        found: dict[str, Sequence[str]] = {
            name: ids if name in ("rollout", "compare") else () for name in registry.SCREENS
        }
        table = None if shown.data is None else shown.view.table(shown.data, self.now_ns())
        return {
            **found, "since": [*RANGES[1:], "all"], "columns": [*map(column_word, table.columns)] if table else [],
            "views": (), "view": list(self.saved_views()), "ctx": list(self.options.contexts),
            "theme": sorted(self.available_themes), "quit": (),
        }  # fmt: skip

    def _switch(self, context: str) -> None:
        if context not in self.options.contexts:
            raise ValueError(f"there is no context {context!r}; there are {', '.join(self.options.contexts)}")
        try:
            self.options.connect(self.options.contexts[context])
        except (ClientError, CommandError) as e:
            raise ValueError(str(e)) from None
        self.connect_to(context)

    def _set_theme(self, theme: str) -> None:
        if theme not in self.available_themes:
            raise ValueError(f"there is no theme {theme!r}; : theme and Tab complete them")
        self.theme = theme
        self.main.say(f"Theme {theme}.")

    def press(self, key: str) -> None:
        """Do what a key does, as soon as the screen is back."""
        self.call_later(self.main.handler.press, key)

    def open_palette(self) -> None:
        """Show textual's palette of commands with ours."""
        self.push_screen(CommandPalette(providers=[PenstockCommands], placeholder="Search for a screen or a command …"))

    # Ranges of time, columns and saved views --------------------------------------------------------------------------

    def _limit(self, since: str) -> None:
        if since != "all":
            times.seconds("since", since)
        self.main.limit("" if since == "all" else since)

    def _choose_columns(self, names: Sequence[str]) -> None:
        """Show these columns alone; all without names."""
        shown = self.main.shown
        table = None if shown.data is None else shown.view.table(shown.data, self.now_ns())
        if table is None:
            raise ValueError("this screen has no columns to choose from")
        with_columns(table, names)
        shown.columns = tuple(names)
        self.main.draw()
        self.main.say(f"{len(names)} columns; V saves them as a view." if names else "All columns.")

    def saved_views(self) -> dict[str, SavedView]:
        """The saved views by name; none, and a message, when they cannot be read."""
        try:
            return self.options.saved.load()
        except ValueError as e:
            self.main.say(str(e))
            return {}

    def save_view(self, name: str) -> None:
        """Keep the shown view under a name."""
        shown, view = self.main.shown, self.main.shown.view
        try:
            registry.make_view(view.words)
            saved = SavedView(
                words=[*view.words], columns=[*shown.columns], sort=shown.sort, reverse=shown.reverse, since=view.since
            )
            self.options.saved.save(name, saved)
        except ValueError as e:
            self.main.say(f"It was not saved: {e}")
            return
        number = list(self.saved_views()).index(name) + 1
        self.main.say(f"Saved as {name}; v lists saved views" + (f", F{number} recalls it." if number < 10 else "."))

    def recall(self, number: int) -> None:
        """Show the saved view of this number."""
        names = list(self.saved_views())
        if number <= len(names):
            self.show_saved(names[number - 1])
        else:
            self.main.say(f"There is no saved view {number}: V saves the screen that is shown, v lists them.")

    def show_saved(self, name: str) -> None:
        """Show the saved view of this name."""
        found = self.saved_views()
        if name not in found:
            self.main.say(f"There is no saved view {name!r}; there are {', '.join(found) or 'none: V saves one'}.")
            return
        try:
            self.main.open(registry.saved_view(found[name]), over=False)
        except ValueError as e:
            self.main.say(f"The saved view {name} cannot be shown: {e}")

    def delete_view(self) -> None:
        """Delete the chosen saved view."""
        name = self.main.shown.chosen
        if name is None:
            self.main.say("There is no saved view to delete.")
            return
        try:
            self.options.saved.save(name, None)
        except ValueError as e:
            self.main.say(str(e))
            return
        self.main.say(f"Deleted the saved view {name}.")
        self.loader.reload()

    def next_theme(self) -> None:
        """Switch to the next theme by name."""
        names = sorted(self.available_themes)
        self._set_theme(names[(names.index(self.theme) + 1) % len(names)])

    def try_filter(self, view: ScreenView[Any, Any]) -> None:
        """Show a filtered view if the gateway accepts its filter; else show the error and keep the view before."""

        async def ask() -> None:
            try:
                if self.client is not None:
                    view.since = self.main.since if view.ranged else ""
                    await view.load(self.client)
            except ClientError as e:
                self.main.say(str(e))
                return
            self.main.prompt.close()
            self.main.open(view, over=False)

        self.run_worker(ask(), group="filter", exclusive=True)

    def compare(self) -> None:
        """Show the marked rows side by side."""
        shown = self.main.shown
        marked = self.main.marked.get(shown.view.name, [])
        if shown.data is None:
            self.main.say("There is nothing here yet that could be compared.")
            return
        try:
            words = registry.comparison_words(shown.view.name, shown.data, marked, shown.chosen)
        except ValueError as e:
            self.main.say(str(e))
            return
        self.main.open(registry.make_view(words))

    def show_help(self, title: str, keys: Sequence[KeyBinding]) -> None:
        """List keys until one is pressed."""
        self.push_screen(Help(title, keys))

    def quit(self) -> None:
        self.exit()

    def _fatal_error(self) -> None:
        """Print a traceback as Textual does, but without the values of variables: the gateway's key is among them."""
        self.panic(Traceback(width=None, show_locals=False))

    # Changing ---------------------------------------------------------------------------------------------------------

    def status_notes(self) -> list[str]:
        """Notes for the line on top, such as `read-only`."""
        reason = self.may_not_change()
        return [*filter(None, [self.options.note()]), *(["read-only"] if reason else [])]

    def may_not_change(self) -> str | None:
        """The reason why nothing can be changed; None when changes are allowed."""
        if self.options.read_only:
            return "it was started with --read-only"
        if self.options.contexts[self.context].read_only:
            return f"read_only is set for the context {self.context}"
        if self.role == "read":
            return "your key may only read"
        return None

    def change(self, key: KeyBinding) -> None:
        """Ask the person, and carry out the key's action."""
        shown = self.main.shown
        action = next((one for one in shown.view.actions if one.id == key.id), None)
        refused = self.may_not_change()
        if action is None or shown.data is None:
            self.main.say("There is nothing here yet that could be changed." if action else "This cannot be done here.")
        elif refused is not None:
            self.main.say(f"Nothing is changed: {refused}.")
        elif (why_not := action.unavailable(shown.data, shown.chosen)) is not None:
            self.main.say(f"Nothing is changed: {why_not}.")
        else:
            self.run_worker(self._change(action, shown.data, shown.chosen), group="change")

    async def _change(self, action: ViewAction[Any], data: Any, id: str | None) -> None:
        said = await self.push_screen_wait(Confirm(action.question(data, id), action.reason))
        if said is None or self.client is None:
            self.main.say("Nothing was changed.")
            return
        async with self._changing:
            await self._do(action, data, id, said)

    async def _do(self, action: ViewAction[Any], data: Any, id: str | None, said: ActionRequest) -> None:
        assert self.client is not None
        try:
            done = await action.act(self.client, data, id, said)
        except ClientError as e:
            self.main.say(f"It was not done: {e}")
        else:
            self.main.say(done)
        self.loader.reload()

    # Copies, and programs outside -------------------------------------------------------------------------------------

    def copy(self, text: str) -> None:
        """Copy to the clipboard of the terminal, by OSC 52, and show the text, for terminals without one."""
        self.copy_to_clipboard(text)
        self.main.say(f"Copied: {text}")

    def copy_command(self, command: str) -> None:
        """Copy a command; name the gateway in it unless `penstock` asks that gateway by default, in any folder."""
        gateway = self.options.contexts[self.context].gateway.rstrip("/")
        usual = "" if os.path.exists(CONFIG_FILE) else LOCAL
        if gateway != os.environ.get("PENSTOCK_GATEWAY", usual).rstrip("/"):
            named = f" --gateway {shlex.quote(gateway)}"
            command = "; ".join(
                f"penstock {one}{named}" for one in command.removeprefix("penstock ").split("; penstock ")
            )
        self.copy(command)

    def open_outside(self, variable: str) -> None:
        """Show the pane in the program that a variable names."""
        pane = self.main.pane
        command = os.environ.get(variable) or ("less" if variable == "PAGER" else "")
        if pane is None or not command:
            self.main.say(f"The variable {variable} is not set." if pane else "There is no pane to open.")
            return
        try:
            with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=".txt") as file:
                file.write(pane.whole() if pane.whole is not None else self._as_text(pane.draw))
                file.flush()
                with self.suspend():
                    said = _run_program(command, file.name)
        except SuspendNotSupported:
            said = "Programs are opened from a terminal, not from a browser."
        except OSError as e:
            said = f"The pane cannot be written to a file for {command}: {e.strerror}."
        if said:
            self.main.say(said)

    def _as_text(self, draw: Callable[[int, int | None], Any]) -> bytes:
        with self.console.capture() as captured:
            self.console.print(draw(self.size.width, None), width=self.size.width)
        return captured.get().encode(errors="replace")


def _unheard(number: int, frame: object) -> None:
    """Leave the signal to the program that was opened."""


def _run_program(command: str, path: str) -> str:
    """Run a program on a file; return a message when it failed, else an empty text."""
    # Ctrl-C is for the program alone, but the terminal signals us too. A handler, because the program would inherit
    # SIG_IGN.
    before = {number: signal.signal(number, _unheard) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        ended = subprocess.run([*shlex.split(command), path], check=False)
    except ValueError as e:
        return f"{command} is no command line: {e}."
    except OSError as e:
        return f"{command} cannot be started: {e.strerror}."
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return f"{command} ended with {ended.returncode}." if ended.returncode else ""
