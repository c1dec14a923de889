"""`penstock prices`: what models cost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.gateway.cli.terminal import show
from penstock.gateway.client.console import LOCAL, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Builtin = Annotated[bool, Parameter(negative="")]


def prices(*, builtin: Builtin = False, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show the prices of models that costs are computed with.

    Parameters
    ----------
    builtin
        Print the file of prices that comes with Penstock, to be edited and named in penstock.toml.
    """
    from penstock.gateway.display import prices
    from penstock.gateway.model.prices import BUILTIN

    async def ask(client: Client) -> None:
        found = await client.prices()
        show(found.prices, json, lambda: prices.prices(found))

    if builtin:
        sys.stdout.write(BUILTIN.read_text())
        return
    with_client(gateway, ask)
