"""`penstock index rebuild` makes the index anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


def rebuild(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """Make the index anew from the tape.

    The old one is deleted; until the new one has caught up filters scan the tape.
    """
    from penstock.console.views import index

    async def ask(client: Client) -> None:
        view = await client.rebuild_index()
        show([view], json, lambda: index.index(view))

    with_client(gateway, ask)
