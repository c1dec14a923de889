"""The nouns that can be listed. Commands, screens of the TUI and tools for coding agents are made from this table.

A new noun is a `NounView` in a module of this package and a row here; a command of one word is named in
`commands.sections` too. Importing this module loads no view, so that `penstock --help` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from penstock.console.views.noun import NounView


class NounEntry(NamedTuple):
    """A row of the table."""

    command: str
    """The words behind `penstock` that list it."""
    view: str
    """The module of this package, and the name in it, of its `NounView`."""
    help: str
    """A sentence: what the command, the screen and the tool show."""
    more: str = ""
    """Further sentences for the help of the command and the description of the tool."""


NOUNS: Final[dict[str, NounEntry]] = {
    "upstreams": NounEntry(
        "upstreams",
        "upstreams:UPSTREAMS",
        "List upstreams: which serve, rest or fail their checks, and which calls wait.",
    ),
}


def noun_view(name: str) -> NounView[Any, Any]:
    """The view of the noun of this name."""
    module, _, attribute = NOUNS[name].view.partition(":")
    return getattr(import_module(f"penstock.console.views.{module}"), attribute)


def listable(name: str) -> bool:
    """True if a noun can be listed without a word that says of what."""
    return not any(field.is_required() for field in noun_view(name).selection.model_fields.values())
