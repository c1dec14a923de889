"""`penstock upstreams`: shows upstreams, and the calls that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


def upstreams(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """List upstreams: which serve, rest or fail their checks, and which calls wait."""
    from penstock.console.views import upstreams

    async def ask(client: Client) -> None:
        rows = await client.upstreams()
        show(rows, json, lambda: upstreams.upstreams(rows), "No upstream is configured: `[[upstream]]` names one.")

    with_client(gateway, ask)
