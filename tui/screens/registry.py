"""All screens by name: for `:`, for the keys, for `penstock tui NAME` and for `--plain`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.console.views.registry import NOUNS, listable
from penstock.console.views.resources import RESOURCES
from penstock.gateway.model.base import ID_PATTERN
from penstock.tui.screens.compare import MOST, CompareRolloutsView, CompareRunsView, CompareVersionsView, CompareView
from penstock.tui.screens.gateway import LogView, UpstreamsView, WorkersView
from penstock.tui.screens.overview import OverviewView
from penstock.tui.screens.releases import ReleasesView, ResourcesView
from penstock.tui.screens.rollout import RolloutView
from penstock.tui.screens.rollouts import GroupsView, RolloutsView
from penstock.tui.screens.runs import RunsView
from penstock.tui.screens.tools import ToolsView
from penstock.tui.view import ScreenView, noun_screen


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

    def make(words: Sequence[str]) -> ScreenView[Any, Any]:
        return view(" ".join(words))

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
    "runs": _plain(RunsView),
    "workers": _plain(WorkersView),
    "upstreams": _plain(UpstreamsView),
    "log": _plain(LogView),
    "groups": _plain(GroupsView),
}
"""The screens with code of their own."""
STANDING: Final = [(name,) for name, named in OWN.items() if named.wants in ("", "[FILTER]")]
"""The screens that `--plain` prints when none is named, in order."""
SCREENS: Final[dict[str, ScreenEntry]] = OWN | {
    name: _noun(name) for name in NOUNS if name not in OWN and listable(name)
}


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
