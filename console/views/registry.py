"""The nouns that can be listed. Commands, screens of the TUI and some tools for coding agents are made from this table
(those of rollouts and spans, which they read differently, are in `mcp_server`).

A new noun is a `NounView` in a module of this package and a row here; a command of one word is named in
`commands.command_table` too. Importing this module loads no view, so that `penstock --help` is quick.
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
    shows: str = ""
    """The words of the command that shows one row, in front of its id; empty without one."""


NOUNS: Final[dict[str, NounEntry]] = {
    "rollouts": NounEntry("rollouts", "rollouts:ROLLOUTS", "List rollouts, newest first.", shows="show"),
    "upstreams": NounEntry(
        "upstreams",
        "administration:UPSTREAMS",
        "List upstreams: which serve, rest or fail their checks, and which calls wait.",
    ),
    "sessions": NounEntry(
        "sessions",
        "sessions:SESSIONS",
        "List the sessions that calls belong to: of MCP servers, of hosted agents, of coding agents.",
        "The session with the newest call comes first. The id of an MCP session is a hash, because the real one gives "
        "access.",
    ),
    "budgets": NounEntry("budgets", "administration:BUDGETS", "Show what is used of budgets, the fullest first."),
    "audit": NounEntry("audit", "administration:AUDIT", "List who changed what, and why, newest first."),
    "unread": NounEntry("unread", "breakdown:UNREAD", "List what answers hold that was not read."),
    "queue": NounEntry("queue", "queue:QUEUE", "Show how much work there is."),
    "workers": NounEntry("workers", "queue:WORKERS", "List those who run rollouts."),
    "prices": NounEntry("prices list", "administration:PRICES", "Show the prices that costs are computed with."),
    "waiting": NounEntry("policy waiting", "tools:WAITING", "List tool calls that wait for a person."),
    "resources": NounEntry(
        "resource list", "resources:RESOURCES", "List what releases can change.", shows="resource show"
    ),
    "releases": NounEntry("release list", "releases:RELEASES", "List releases, newest first.", shows="release status"),
    "webhooks": NounEntry(
        "webhook list",
        "administration:WEBHOOKS",
        "List webhooks: what waits for each, since when it takes nothing, and why.",
        shows="webhook deliveries",
    ),
    "deliveries": NounEntry(
        "webhook deliveries",
        "administration:DELIVERIES",
        "List what a webhook was told, or is to be told, newest first, and what became of it.",
    ),
    "runs": NounEntry("runs list", "runs:RUNS", "List training runs, newest first.", shows="runs show"),
    "index": NounEntry(
        "index status",
        "administration:INDEX",
        "Say whether filters use the index, and else why.",
        "Without it they scan the tape. It says besides how far the index has read, and how large it is.",
    ),
    "retention": NounEntry(
        "retention status",
        "administration:RETENTION",
        "Show how long rollouts stay, how large the tape is, and what is still to be deleted.",
    ),
    "forgotten": NounEntry(
        "retention forgotten",
        "administration:FORGOTTEN",
        "List rollouts that were forgotten, by name: when, and why.",
    ),
    "holds": NounEntry(
        "hold", "administration:HOLDS", "List rollouts that are kept, whatever the rules of retention say."
    ),
}


def noun_view(name: str) -> NounView[Any, Any]:
    """The view of the noun of this name."""
    module, _, attribute = NOUNS[name].view.partition(":")
    return getattr(import_module(f"penstock.console.views.{module}"), attribute)
