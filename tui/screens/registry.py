"""All screens by name: for `:`, for the keys, for `penstock tui NAME` and for `--plain`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.text import Text

from penstock.console.views.registry import NOUNS
from penstock.console.views.resources import RESOURCES
from penstock.console.views.table import Column, plain
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.toml import pluralized
from penstock.tui.keys import VIEW_KEYS
from penstock.tui.screens.compare import MOST, CompareRolloutsView, CompareRunsView, CompareVersionsView, CompareView
from penstock.tui.screens.gateway import LogView, UpstreamsView, WorkersView
from penstock.tui.screens.overview import OverviewView
from penstock.tui.screens.releases import ReleasesView, ResourcesView
from penstock.tui.screens.rollout import RolloutView
from penstock.tui.screens.rollouts import GroupsView, RolloutsView, SearchView
from penstock.tui.screens.runs import RunsView
from penstock.tui.screens.tools import ToolsView
from penstock.tui.settings import SavedView, SavedViews
from penstock.tui.view import Arrangement, ScreenView, TableModel, noun_screen, positional_words

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

VIEWS = (
    Column("view", narrows="cut", least=16), Column("key"), Column("screen", narrows="cut", least=20),
    Column("time"), Column("columns", 1, narrows="cut", least=20), Column("sorted by", 2),
)  # fmt: skip


class ScreenEntry(NamedTuple):
    """A screen that can be gone to by name."""

    make: Callable[[Sequence[str]], ScreenView[Any, Any]]
    """Makes the screen from the arguments after its name. Raises `ValueError` with a sentence for wrong ones."""
    view: type[ScreenView[Any, Any]]
    wants: str
    """The form of its arguments; empty when it takes none."""
    help: str


def _plain(view: type[ScreenView[Any, Any]]) -> ScreenEntry:
    """A screen that takes no arguments."""

    def make(words: Sequence[str]) -> ScreenView[Any, Any]:
        if words:
            raise ValueError(f"{view.name} takes nothing behind it, not {words[0]!r}")
        return view()

    return ScreenEntry(make, view, "", view.help)


def _noun(name: str) -> ScreenEntry:
    """The screen of a noun, which takes a filter if the noun has one."""
    view = noun_screen(name)
    wanted = positional_words(view.noun)

    def make(words: Sequence[str]) -> ScreenView[Any, Any]:
        return view(" ".join(words))

    def make_of(words: Sequence[str]) -> ScreenView[Any, Any]:
        if len(words) != len(wanted):
            raise ValueError(f"{name} wants the {' and the '.join(wanted)} behind it, not {' '.join(words)!r}")
        return view(of=words)

    if wanted:
        return ScreenEntry(make_of, view, " ".join(wanted).upper(), view.help)

    return (
        ScreenEntry(make, view, "[FILTER]", view.help) if "filter" in view.noun.selection.model_fields else _plain(view)
    )


def _rollout(words: Sequence[str]) -> ScreenView[Any, Any]:
    if len(words) != 1 or not re.fullmatch(ID_PATTERN, words[0]):
        raise ValueError(f"rollout wants the id of one rollout behind it, not {' '.join(words)!r}")
    return RolloutView(words[0])


def _compare(words: Sequence[str]) -> ScreenView[Any, Any]:
    match words:
        case "group", group:
            return CompareRolloutsView(group=group)
        case "versions", name, old, new:
            return CompareVersionsView(name, (old, new))
        case "runs", old, new:
            return CompareRunsView((old, new))
        case "rollouts", *ids if 2 <= len(ids) <= MOST:
            return CompareRolloutsView(ids)
        case _:
            raise ValueError(f"compare wants {COMPARES}, not {' '.join(words)!r}")


def _search(words: Sequence[str]) -> ScreenView[Any, Any]:
    """Words in front of `--` are the text, those behind it a filter."""
    at = words.index("--") if "--" in words else len(words)
    text = " ".join(words[:at])
    if not text:
        raise ValueError("search wants the text behind it that calls say")
    return SearchView(text, " ".join(words[at + 1 :]))


def saved_view(saved: SavedView) -> ScreenView[Any, Any]:
    """The screen of a saved view, arranged as it was. Raises `ValueError` if there is no such screen any more."""
    view = make_view(saved.words)
    view.arrangement = Arrangement(saved.columns, saved.sort, saved.reverse, saved.since)
    return view


class SavedViewsView(ScreenView[Mapping[str, SavedView], None]):
    """The saved views of the person at the keyboard; nothing is asked of the gateway."""

    name = "views"
    title = "Saved views"
    help = "screens that you have saved with a filter, columns, an order and a range of time; Enter recalls one"
    every_s = 60.0

    def __init__(self, saved: SavedViews | None = None) -> None:
        self._saved = saved or SavedViews.of_person()

    async def load(self, client: Client) -> Mapping[str, SavedView]:
        try:
            return self._saved.load()
        except ValueError as e:
            raise ClientError(str(e), 400) from None

    def head(self, data: Mapping[str, SavedView], now_ns: int) -> Text:
        return Text(pluralized(len(data), "saved view"), "dim")

    def table(self, data: Mapping[str, SavedView], now_ns: int) -> TableModel:
        keys = {name: f"F{number}" for number, name in enumerate(data, 1) if number < 10}

        def cells(name: str) -> Sequence[Text | str]:
            one = data[name]
            order = f"{one.sort or 'time'}{', reversed' if one.reverse else ''}" if one.sort or one.reverse else ""
            columns = plain(" ".join(one.columns) or "all")
            return [plain(name), keys.get(name, ""), plain(" ".join(one.words)), one.since or "all", columns, order]

        return TableModel(VIEWS, list(data), cells, "No view is saved yet: V saves the screen that is shown.")

    def command(self, id: str | None) -> str:
        return "penstock tui views"

    def opens(self, data: Mapping[str, SavedView], id: str) -> ScreenView[Any, Any]:
        return saved_view(data[id])


def _rollouts(words: Sequence[str]) -> ScreenView[Any, Any]:
    return RolloutsView(" ".join(words))


COMPARES: Final = f"rollouts ID ID [ID ...] (up to {MOST}), group NAME, versions RESOURCE OLD NEW, or runs ID ID"
OWN: Final[dict[str, ScreenEntry]] = {
    "overview": _plain(OverviewView),
    "rollouts": ScreenEntry(_rollouts, RolloutsView, "[FILTER]", RolloutsView.help),
    "tools": _plain(ToolsView),
    "rollout": ScreenEntry(_rollout, RolloutView, "ID", RolloutView.help),
    "compare": ScreenEntry(_compare, CompareView, COMPARES, CompareView.help),
    "releases": _plain(ReleasesView),
    "resources": _plain(ResourcesView),
    "workers": _plain(WorkersView),
    "runs": _plain(RunsView),
    "upstreams": _plain(UpstreamsView),
    "log": _plain(LogView),
    "groups": _plain(GroupsView),
    "search": ScreenEntry(_search, SearchView, "TEXT", SearchView.help),
    "views": _plain(SavedViewsView),
}
"""The screens with code of their own."""
STANDING: Final = [(name,) for name in OWN if name in VIEW_KEYS]
"""The screens that `--plain` prints when none is named, in order."""
SCREENS: Final[dict[str, ScreenEntry]] = OWN | {name: _noun(name) for name in NOUNS if name not in OWN}


def make_view(words: Sequence[str]) -> ScreenView[Any, Any]:
    """The screen that the first word names, with the others as its arguments. Raises `ValueError` with a sentence."""
    name, *rest = words
    if name not in SCREENS:
        near = [known for known in SCREENS if known.startswith(name[:2])] or list(SCREENS)
        raise ValueError(f"there is no screen {name!r}; there are {', '.join(near)}")
    return SCREENS[name].make(rest)


def comparison_words(view: str, data: Any, marked: Sequence[str], chosen: str | None) -> list[str]:
    """The words of the screen that compares the marked rows of a screen. Raises `ValueError` with a sentence."""
    if view == "rollouts" and not marked and chosen is not None:
        row = data.rows.get(chosen)
        if row is None or row.group is None:
            raise ValueError("mark two rollouts with Space first; this one has no group to be compared with")
        return ["compare", "group", row.group]
    if view == "groups" and chosen is not None:
        return ["compare", "group", chosen]
    if view == "resources" and (one := RESOURCES.find(data, chosen)) is not None:
        versions = one.versions
        if len(versions) < 2:
            raise ValueError(f"{one.name} has one version; there is nothing to compare it with")
        stable = one.stable.version
        newest = versions[-1].version
        return ["compare", "versions", one.name, stable if stable != newest else versions[-2].version, newest]
    if view == "runs" and len(marked) == 2:
        return ["compare", "runs", *marked]
    if view == "rollouts" and 2 <= len(marked) <= MOST:
        return ["compare", "rollouts", *marked]
    most = f"two to {MOST} rows" if view == "rollouts" else "two rows"
    raise ValueError(f"mark {most} with Space first; {len(marked)} are marked")
