"""The screen of the log: changes of the tape as they come, and decisions of people."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.text import Text

from penstock.console.views import rollouts
from penstock.console.views.administration import AUDIT
from penstock.console.views.table import Column, clean, joined
from penstock.gateway.model.answers import AuditEntry, Change
from penstock.tui.view import Pane, ScreenView, TableModel, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

NEWEST: Final = 500
"""The most changes that are kept."""
PEOPLE: Final = 50
CHANGES = (Column("change", narrows="cut", least=40),)
NONE = "Nothing has happened on this tape yet."


@dataclass(frozen=True, slots=True)
class LogData:
    """The newest changes by cursor, newest first."""

    changes: dict[str, Change]
    entries: Sequence[AuditEntry]
    """The audit log, newest first."""


class LogView(ScreenView[LogData, None]):
    name = "log"
    title = "Log"
    help = "every change on the tape as it happens, and who changed what"
    concerns = frozenset({"rollouts", "releases", "resources", "runs"})
    every_s = 10.0

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._since: int | None = None

    def forget(self) -> None:
        self._changes, self._since = {}, None

    async def load(self, client: Client) -> LogData:
        """Ask for the changes since the last look, and for the audit log."""

        async def people() -> list[AuditEntry]:
            return [entry async for entry in client.audit_log(PEOPLE)]

        if self._since is None:
            self._since = max(0, (await client.stats(spans=0)).cursor - NEWEST)
        page, entries = await asyncio.gather(client.change_page(self._since, NEWEST), people())
        new = {str(change.cursor): change for change in reversed(page.changes)}
        # A full page means that the tape is further ahead: the next look begins with the newest changes.
        self._since = None if len(page.changes) == NEWEST else page.next
        kept = list({**new, **self._changes}.items())[:NEWEST]
        self._changes = dict(kept)
        return LogData(self._changes, entries)

    def head(self, data: LogData, now_ns: int) -> Text:
        return Text(f"the newest {len(data.changes):,} changes, newest first")

    def table(self, data: LogData, now_ns: int) -> TableModel:
        return TableModel(CHANGES, list(data.changes), lambda id: [rollouts.change(data.changes[id])], NONE)

    def panes(self, data: LogData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        none = Text("Nobody has changed anything yet.")
        people = pane("People", AUDIT.table(data.entries, now_ns) if data.entries else none)
        change = data.changes.get(id or "")
        return [people] if change is None else [pane("Change", _whole(change)), people]

    def command(self, id: str | None) -> str:
        return "penstock changes" if id is None else f"penstock changes --since {int(id) - 1}"


def _whole(change: Change) -> Text:
    """One line on the change, then all of it as JSON."""
    told = json.dumps(change.model_dump(mode="json", exclude_none=True), indent=2, ensure_ascii=False)
    return Text("\n").join([joined(rollouts.change(change)), Text(clean(told))])
