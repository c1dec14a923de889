"""The part of the typed client that speaks of webhooks."""

from __future__ import annotations

from urllib.parse import quote

from penstock.gateway.client.connection import Connection
from penstock.gateway.model.webhook import (
    Delivery,
    DeliveryList,
    WebhookList,
    WebhookTest,
    WebhookTried,
    WebhookView,
)


class WebhookClient(Connection):
    """What can be asked about webhooks."""

    async def webhooks(self) -> list[WebhookView]:
        """Those of the gateway's configuration."""
        return (await self.get("/api/webhooks", WebhookList)).webhooks

    async def deliveries(self, webhook: str, limit: int = 100) -> list[Delivery]:
        """What a webhook was told or is to be told, newest first."""
        return (await self.get(f"{_path(webhook)}/deliveries", DeliveryList, {"limit": limit})).deliveries

    async def test_webhook(self, webhook: str) -> WebhookTried:
        """Sends a webhook a test, and says what it answers."""
        return await self.post(f"{_path(webhook)}/test", WebhookTried, WebhookTest())


def _path(webhook: str) -> str:
    return f"/api/webhooks/{quote(webhook, safe='')}"
