"""Messages to webhooks, and their deliveries.

A *delivery* is the message about one change of a release to one webhook. It is on the tape from the change on, until
long after it was delivered or given up.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from penstock.gateway.model.base import Id, Noun
from penstock.gateway.model.release import ReleaseStage
from penstock.gateway.model.resource import ResourceKind

ReleaseEvent = Literal[
    "start", "check", "replay", "shadow", "canary", "advance", "wait", "approve", "promote", "roll_back", "hold",
    "resume", "abort",
]  # fmt: skip
"""A change of a release, by its name in the audit chain; a rollback is a `roll_back`, whoever requests it."""
RELEASE_EVENTS: tuple[ReleaseEvent, ...] = get_args(ReleaseEvent)
DeliveryStatus = Literal["waiting", "delivered", "given_up"]
"""The state of a delivery."""


class ReleaseChangeData(Noun):
    """The `data` of a message: one entry of a release's audit chain, and what release that is."""

    release: Id
    """The release."""
    resource: Id
    """What it changes."""
    kind: ResourceKind
    """What that is."""
    stable: Id
    """The version it started from."""
    candidate: Id
    """The version it tries."""
    companions: dict[Id, Id]
    """Versions of other resources that it tries together with the candidate."""
    before: ReleaseStage | None
    """Stage before; None for the first entry."""
    after: ReleaseStage
    """Stage after."""
    canary: str | None
    """Name of the stage of the canary that it is in after it; None while it is in none."""
    split: float
    """Share of new rollouts that get the candidate after it."""
    who: str
    """Who did it, as was claimed; `gateway` for what was decided by the rules."""
    key: str
    """Name of the key that it was asked for with; empty for the rules, and where the gateway has no keys."""
    why: str
    """In a sentence."""
    figures: dict[str, float | str]
    """Figures behind it, by the names that the audit chain has: e-values, means and numbers by arm."""
    number: int
    """Number of the entry in the chain, from 1."""
    hash: str
    """Hash of the entry; hex. `penstock release history --json` shows the same."""


class WebhookTestData(Noun):
    """The `data` of a test."""

    webhook: str
    """Name of the webhook."""


class WebhookMessage(Noun):
    """The body of a request to a webhook, as Standard Webhooks has it."""

    type: str
    """What has happened, such as `release.roll_back`; `webhook.test` for a test."""
    timestamp: str
    """When that was: RFC 3339, UTC."""
    data: ReleaseChangeData | WebhookTestData
    """More of it."""


class Delivery(Noun):
    """One change of a release that one webhook is told of."""

    number: int
    """From 1, ascending over all webhooks."""
    webhook: str
    """Name of the webhook."""
    id: str
    """Its `webhook-id`: the same each time that it is sent."""
    event: ReleaseEvent
    """What was done to the release."""
    release: Id
    """The release."""
    entry: int
    """Number of the entry in the release's audit chain."""
    made_ns: int
    """When that was done; ns since the epoch."""
    status: DeliveryStatus = "waiting"
    """How far it has come."""
    attempts: int = 0
    """How often it was sent."""
    tried_ns: int | None = None
    """When it was sent last."""
    failing_ns: int | None = None
    """When it was sent in vain for the first time."""
    next_ns: int | None = None
    """When it is sent again, at the earliest; None where it was not sent yet, and when it is over."""
    answer: int | None = None
    """HTTP status of the last answer; None where there was none."""
    error: str = ""
    """Why it was not taken the last time; empty when it was."""


class DeliveryList(Noun):
    """The deliveries of a webhook, newest first."""

    deliveries: list[Delivery]
    """One each."""


class WebhookView(Noun):
    """A webhook of the configuration, and how it goes there."""

    name: str
    """Its name."""
    url: str
    """Where it listens, without what may be secret: scheme, host and port."""
    events: list[ReleaseEvent]
    """Which changes of releases it is told of."""
    waiting: int = 0
    """Deliveries that it has not taken yet."""
    oldest_ns: int | None = None
    """When the oldest of these was made."""
    failing_ns: int | None = None
    """Since when something is sent to it in vain, or was until it was given up; None where it takes what it is told."""
    error: str = ""
    """Why."""
    next_ns: int | None = None
    """When it is tried again."""
    last: Delivery | None = None
    """The last that it has taken."""
    given_up: int = 0
    """Deliveries that were given up, of those that the tape still has."""


class WebhookList(Noun):
    """Webhooks of the configuration, in its order."""

    webhooks: list[WebhookView] = Field(default_factory=list[WebhookView])
    """One each."""


class WebhookTest(Noun):
    """The request that sends a test message to a webhook; it has no fields."""


class WebhookTestResult(Noun):
    """The answer of a webhook to a test message."""

    webhook: str
    """Name of the webhook."""
    id: str
    """Its `webhook-id`."""
    answer: int | None
    """HTTP status of the answer; None where there was none."""
    error: str
    """Why it was not taken; empty when it was."""
    seconds: float
    """From sending it to the answer."""
