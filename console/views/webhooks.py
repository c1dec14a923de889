"""Webhooks and their deliveries for readers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from penstock.console.views.noun import POSITIONAL, Limit, LimitedSelection, NounRows, NounSelection, NounView, all_rows
from penstock.console.views.table import Column, figure
from penstock.console.views.text import age, ago, duration, plain
from penstock.gateway.model.webhook import Delivery, WebhookTestResult, WebhookView

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

_STATES = {"waiting": "yellow", "delivered": "green", "given_up": "red"}


class DeliverySelection(LimitedSelection):
    """The options of the list of deliveries."""

    webhook: Annotated[str, POSITIONAL]
    """Name of a webhook of penstock.toml."""
    limit: Limit = 50
    """How many at most."""


async def _deliveries(client: Client, selection: DeliverySelection) -> NounRows[Delivery]:
    rows = await client.deliveries(selection.webhook, min(selection.limit, 10_000))
    return NounRows(rows, "It was told nothing yet.")


def tried(one: WebhookTestResult) -> Text:
    """The answer to a test, in a sentence."""
    answer = "no answer" if one.answer is None else f"answer {one.answer}"
    return plain(f"{one.webhook}: {answer} after {duration(int(one.seconds * 1e9))}, id {one.id}")


def _what(delivery: Delivery) -> str:
    return f"{delivery.event.replace('_', ' ')} of {delivery.release}"


def _ago(ns: int | None, now_ns: int) -> str:
    return "" if ns is None else ago(ns, now_ns)


def _until(ns: int | None, now_ns: int) -> str:
    """The time until then; `now` if it is due, empty for None."""
    if ns is None:
        return ""
    return "now" if ns - now_ns < 10**9 else f"in {age(now_ns, ns)}"


WEBHOOKS = NounView[NounSelection, WebhookView](
    "webhooks",
    WebhookView,
    all_rows(lambda client: client.webhooks(), "No webhook is configured: `[[webhook]]` in penstock.toml names one."),
    key=lambda one: one.name,
    columns={
        Column("webhook"): lambda one, _: plain(one.name),
        Column("state"): lambda one, _: Text("ok", "green") if one.failing_ns is None else Text("failing", "red"),
        figure("waiting"): lambda one, _: f"{one.waiting:,}",
        Column("last taken"): lambda one, now_ns: "" if one.last is None else _ago(one.last.tried_ns, now_ns),
        Column("what", 1): lambda one, _: "" if one.last is None else plain(_what(one.last)),
        Column("failing"): lambda one, now_ns: _ago(one.failing_ns, now_ns),
        Column("next try", 2): lambda one, now_ns: _until(one.next_ns, now_ns),
        figure("given up", 3): lambda one, _: f"{one.given_up:,}",
        Column("why", narrows="fold", least=16): lambda one, _: plain(one.error),
        Column("where", 0): lambda one, _: plain(one.url),
    },
    concerns=frozenset({"releases"}),
)
DELIVERIES = NounView[DeliverySelection, Delivery](
    "deliveries",
    Delivery,
    _deliveries,
    selection=DeliverySelection,
    key=lambda one: str(one.number),
    columns={
        figure("#", 3): lambda one, _: str(one.number),
        Column("when", 2): lambda one, now_ns: ago(one.made_ns, now_ns),
        Column("release"): lambda one, _: plain(one.release),
        Column("event"): lambda one, _: one.event.replace("_", " "),
        figure("entry", 1): lambda one, _: str(one.entry),
        Column("state"): lambda one, _: Text(one.status.replace("_", " "), style=_STATES[one.status]),
        figure("tries"): lambda one, _: f"{one.attempts:,}",
        Column("last try", 4): lambda one, now_ns: _ago(one.tried_ns, now_ns),
        Column("next try", 5): lambda one, now_ns: _until(one.next_ns, now_ns),
        figure("answer", 6): lambda one, _: "" if one.answer is None else str(one.answer),
        Column("why", narrows="fold", least=16): lambda one, _: plain(one.error),
    },
)
