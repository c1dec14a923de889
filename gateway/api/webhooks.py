"""The control API of webhooks: their state, their deliveries, and a test."""

from __future__ import annotations

import asyncio
from itertools import islice

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer, id_of, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.model.base import Noun
from penstock.gateway.model.webhook import Delivery, DeliveryList, WebhookList, WebhookTest, WebhookTestResult


class DeliveriesQuery(Noun):
    """Parameters of the deliveries of a webhook."""

    limit: int = Field(default=100, ge=1, le=10_000)
    """How many at most."""


async def get_webhooks(request: web.Request) -> web.Response:
    """The webhooks of the configuration: what waits for each, since when it takes nothing, and why."""
    return answer(WebhookList(webhooks=await asyncio.to_thread(request.app[CONTROL].webhooks.views)))


async def get_deliveries(request: web.Request) -> web.Response:
    """What a webhook was told or is to be told, newest first, and what became of it."""
    control, name, asked = request.app[CONTROL], id_of(request, "webhook"), query_of(request, DeliveriesQuery)
    _check(control, name)

    def read() -> list[Delivery]:
        mine = (one for one in control.webhooks.reader.newest() if one.webhook == name)
        return list(islice(mine, asked.limit))

    return answer(DeliveryList(deliveries=await asyncio.to_thread(read)))


async def send_test(control: Control, ids: Ids, asked: WebhookTest) -> WebhookTestResult:
    """Send a webhook a signed message of the type `webhook.test`, once, and say what it answers. A webhook that has
    answered 410 is told of releases again when it takes this."""
    _check(control, ids["webhook"])
    return await control.webhooks.test(ids["webhook"])


def _check(control: Control, name: str) -> None:
    if name not in control.webhooks.names:
        message = f"there is no webhook {name!r}; `[[webhook]]` in penstock.toml names one"
        raise ApiError(404, message, "webhook", name, control.webhooks.names)


_WEBHOOK = "/api/webhooks/{webhook}"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/webhooks", "webhooks", "Who is told of releases", WebhookList, get_webhooks),
    ApiRoute(
        "GET", f"{_WEBHOOK}/deliveries", "deliveries", "What it was told",
        DeliveryList, get_deliveries, query=DeliveriesQuery,
    ),
    ApiRoute("POST", f"{_WEBHOOK}/test", "test_webhook", "Send a test", WebhookTestResult, send_test, body=WebhookTest),
)  # fmt: skip
"""This part of the API."""
