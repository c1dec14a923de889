"""All screens by name: for `:`, for the keys, for `penstock tui NAME` and for `--plain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.tui.screens.groups import GroupsView
from penstock.tui.screens.rollouts import RolloutsView
from penstock.tui.screens.workers import WorkersView
from penstock.tui.view import View


class Named(NamedTuple):
    """A screen that can be gone to."""

    make: Callable[[Sequence[str]], View[Any, Any]]
    """Makes it of the words behind its name. Raises `ValueError` with a sentence for wrong ones."""
    view: type[View[Any, Any]]
    wants: str
    """What these words are; empty when there are none."""
    help: str


def _plain(view: type[View[Any, Any]]) -> Named:
    """A screen that needs nothing."""

    def make(words: Sequence[str]) -> View[Any, Any]:
        if words:
            raise ValueError(f"{view.name} takes nothing behind it, not {words[0]!r}")
        return view()

    return Named(make, view, "", view.help)


def _rollouts(words: Sequence[str]) -> View[Any, Any]:
    return RolloutsView(" ".join(words))


SCREENS: Final[dict[str, Named]] = {
    "rollouts": Named(_rollouts, RolloutsView, "[FILTER]", RolloutsView.help),
    "workers": _plain(WorkersView),
    "groups": _plain(GroupsView),
}


STANDING: Final = [(name,) for name in SCREENS]
"""The screens that need no words, in their order."""


def made(words: Sequence[str]) -> View[Any, Any]:
    """The screen that is named by the first word. Raises `ValueError` with a sentence."""
    name, *rest = words
    if name not in SCREENS:
        near = [known for known in SCREENS if known.startswith(name[:2])] or list(SCREENS)
        raise ValueError(f"there is no screen {name!r}; there are {', '.join(near)}")
    return SCREENS[name].make(rest)


def compared(view: str, data: Any, marked: Sequence[str], chosen: str | None) -> list[str]:
    """The words of the screen that compares what is marked on a screen. Raises `ValueError` with a sentence."""
    raise ValueError("mark two rows with Space first")
