"""`penstock budgets`: shows the use of budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


def budgets(name: str | None = None, /, *, limit: int = 100, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show what is used of budgets, the fullest first.

    Parameters
    ----------
    name
        Only of this budget.
    limit
        How many rows at most.
    """
    import time

    from penstock.console.views import budgets

    async def ask(client: Client) -> None:
        found = await client.budgets(name, limit)
        if name is not None and name not in found.configured:
            raise CommandError(budgets.empty_reason(found, name))
        show(found.budgets, json, lambda: budgets.budgets(found, time.time_ns()), budgets.empty_reason(found, name))

    with_client(gateway, ask)
