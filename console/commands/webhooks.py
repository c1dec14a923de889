"""`penstock webhook`: lists webhooks and their deliveries, and sends a test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Limit, Url, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Name = Annotated[str, Parameter(help="Name of a webhook of penstock.toml.")]


def list_webhooks(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """List webhooks: what waits for each, since when it takes nothing, and why."""
    from penstock.console.views import webhooks

    async def ask(client: Client) -> None:
        rows = await client.webhooks()
        none = "No webhook is configured: `[[webhook]]` in penstock.toml names one."
        show(rows, json, lambda: webhooks.webhooks(rows, time.time_ns()), none)

    with_client(gateway, ask)


def deliveries(webhook: Name, /, *, limit: Limit = 50, json: Json = False, gateway: Url = LOCAL) -> None:
    """List what a webhook was told, or is to be told, newest first, and what became of it."""
    from penstock.console.views import webhooks

    async def ask(client: Client) -> None:
        rows = await client.deliveries(webhook, min(limit, 10_000))
        show(rows, json, lambda: webhooks.deliveries(rows, time.time_ns()), "It was told nothing yet.")

    with_client(gateway, ask)


def send_test(webhook: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Send a webhook a signed test, once, and say what it answers."""
    from penstock.console.views import webhooks

    async def ask(client: Client) -> None:
        tried = await client.test_webhook(webhook)
        show([tried], json, lambda: webhooks.tried(tried))
        if tried.error:
            raise CommandError(f"webhook {webhook} does not take it: {tried.error}")

    with_client(gateway, ask)
