"""The state of each webhook, from its deliveries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.gateway.model.settings import Webhook
from penstock.gateway.model.webhook import Delivery, WebhookView


def views(hooks: Iterable[Webhook], deliveries: Iterable[Delivery]) -> list[WebhookView]:
    """Return a view of each webhook, in the order given."""
    mine = {hook.name: (hook, list[Delivery]()) for hook in hooks}
    for delivery in deliveries:
        if delivery.webhook in mine:
            mine[delivery.webhook][1].append(delivery)
    return [_view(hook, found) for hook, found in mine.values()]


def _view(hook: Webhook, deliveries: Sequence[Delivery]) -> WebhookView:
    waiting = [one for one in deliveries if one.status == "waiting"]
    tried = sorted((one for one in deliveries if one.tried_ns is not None), key=lambda one: one.tried_ns or 0)
    taken = [one for one in tried if one.status == "delivered"]
    failing = [one for one in waiting if one.error]
    if not failing and tried and tried[-1].status == "given_up":
        failing = tried[-1:]
    return WebhookView(
        name=hook.name,
        url=hook.redacted_url,
        events=hook.events,
        waiting=len(waiting),
        oldest_ns=min((one.made_ns for one in waiting), default=None),
        failing_ns=min((one.failing_ns for one in failing if one.failing_ns is not None), default=None),
        error=max(failing, key=lambda one: one.tried_ns or 0).error if failing else "",
        next_ns=min((one.next_ns for one in failing if one.next_ns is not None), default=None),
        last=taken[-1] if taken else None,
        given_up=sum(one.status == "given_up" for one in deliveries),
    )
