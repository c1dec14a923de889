"""The audit log for readers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.console.views.noun import Limit, LimitedSelection, NounRows, NounView, limited
from penstock.console.views.table import Column, figure
from penstock.console.views.text import ago, asked_by, plain
from penstock.gateway.model.audit import AuditEntry

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


class AuditSelection(LimitedSelection):
    """The options of the audit log."""

    limit: Limit = 50
    """How many at most."""


async def _fetch(client: Client, selection: AuditSelection) -> NounRows[AuditEntry]:
    return await limited(selection.limit, client.audit_log, "Nobody has changed anything yet.")


AUDIT = NounView[AuditSelection, AuditEntry](
    "audit",
    AuditEntry,
    _fetch,
    selection=AuditSelection,
    key=lambda one: str(one.number),
    columns={
        figure("#", 3): lambda one, _: str(one.number),
        Column("when", 2): lambda one, now_ns: ago(one.at_ns, now_ns),
        Column("who"): lambda one, _: plain(asked_by(one.who, one.key)),
        Column("what"): lambda one, _: one.action.replace("_", " "),
        Column("of what", narrows="fold", least=16): lambda one, _: plain(one.target),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)
