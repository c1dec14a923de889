"""`penstock index`: the columns beside the tape with which filters find rows without a scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


def status(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """Say whether filters use the index, and else why.

    Without it they scan the tape. It says besides how far the index has read, and how large it is.
    """
    from penstock.console.views import index

    async def ask(client: Client) -> None:
        view = await client.index()
        show([view], json, lambda: index.index(view))

    with_client(gateway, ask)


def rebuild(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """Make the index anew from the tape.

    The old one is deleted; until the new one has caught up filters scan the tape.
    """
    from penstock.console.views import index

    async def ask(client: Client) -> None:
        view = await client.rebuild_index()
        show([view], json, lambda: index.index(view))

    with_client(gateway, ask)
