"""The audit log for a terminal. Pure, as `console.views.rollouts` is."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import ago, asked_by, plain
from penstock.gateway.model.audit import AuditEntry

ENTRIES = (
    figure("#", 3), Column("when", 2), Column("who"), Column("what"), Column("of what", narrows="fold", least=16),
    Column("why", 1, narrows="fold", least=16),
)  # fmt: skip


def entries(rows: Iterable[AuditEntry], now_ns: int) -> Listing:
    """A line for each change."""
    made = Listing(*ENTRIES)
    for one in rows:
        what = one.action.replace("_", " ")
        asked = ago(one.at_ns, now_ns), plain(asked_by(one.who, one.key))
        made.add_row(str(one.number), *asked, what, plain(one.target), plain(one.why))
    return made
