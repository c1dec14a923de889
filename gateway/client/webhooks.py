"""The part of the typed client for webhooks."""

from __future__ import annotations

from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.model.webhook import (
    Delivery,
    DeliveryList,
    WebhookList,
    WebhookTest,
    WebhookTestResult,
    WebhookView,
)


class WebhookClient(ApiConnection):
    """Reads webhooks and their deliveries, and sends tests."""

    async def webhooks(self) -> list[WebhookView]:
        """The webhooks in the gateway's configuration."""
        return (await self.get("/api/webhooks", WebhookList)).webhooks

    async def deliveries(self, webhook: str, limit: int = 100) -> list[Delivery]:
        """The deliveries to a webhook, made and due, newest first."""
        return (await self.get(f"{_path(webhook)}/deliveries", DeliveryList, {"limit": limit})).deliveries

    async def test_webhook(self, webhook: str) -> WebhookTestResult:
        """Sends a test to a webhook, and returns its answer."""
        return await self.post(f"{_path(webhook)}/test", WebhookTestResult, WebhookTest())


def _path(webhook: str) -> str:
    return f"/api/webhooks/{quote(webhook, safe='')}"
