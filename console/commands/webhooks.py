"""`penstock webhook test`: sends a test to a webhook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Name = Annotated[str, Parameter(help="Name of a webhook of penstock.toml.")]


def send_test(webhook: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Send a webhook a signed test, once, and say what it answers."""
    from penstock.console.views import webhooks

    async def ask(client: Client) -> None:
        tried = await client.test_webhook(webhook)
        show([tried], json, lambda: webhooks.tried(tried))
        if tried.error:
            raise CommandError(f"webhook {webhook} does not take it: {tried.error}")

    with_client(gateway, ask)
