"""The content of a message: a link of a release's audit chain, in JSON. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.model.webhook import (
    RELEASE_EVENTS,
    ReleaseChangeData,
    ReleaseEvent,
    WebhookMessage,
    WebhookTestData,
)

LONGEST: Final = 200
"""Characters of a text among the figures: receivers want small bodies."""
_RENAMED: Final = {"rollback": "roll_back"}
"""Actions of people that have another name among the rules."""


def event_of(entry: AuditTrailEntry) -> ReleaseEvent | None:
    """Return the event of an entry; None where no webhook can subscribe to it."""
    action = _RENAMED.get(entry.action, entry.action)
    return next((event for event in RELEASE_EVENTS if event == action), None)


def id_of(entry: AuditTrailEntry) -> str:
    """Return the message's id, which is the same each time that a link is sent."""
    return f"msg_{entry.hash[:32]}"


def body(release: Release, entry: AuditTrailEntry) -> bytes:
    """Return the body of the message about a link of the chain."""
    data = ReleaseChangeData(
        release=release.id,
        resource=release.resource,
        kind=release.kind,
        stable=release.stable,
        candidate=release.candidate,
        companions=release.companions,
        before=entry.before,
        after=entry.after,
        canary=release.policy.ramp[entry.step].name if entry.after == "canary" else None,
        split=entry.split,
        who=entry.who,
        key=entry.key,
        why=entry.why,
        figures=_figures(entry),
        number=entry.number,
        hash=entry.hash,
    )
    return _written(f"release.{event_of(entry)}", entry.at_ns, data)


def test_message(webhook: str, now_ns: int) -> bytes:
    """Return the body of a test message."""
    return _written("webhook.test", now_ns, WebhookTestData(webhook=webhook))


def _figures(entry: AuditTrailEntry) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in entry.evidence.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:LONGEST]
    return found


def _written(kind: str, at_ns: int, data: ReleaseChangeData | WebhookTestData) -> bytes:
    at = datetime.fromtimestamp(at_ns // 1000 / 1e6, UTC).isoformat(timespec="microseconds")
    return WebhookMessage(type=kind, timestamp=at.replace("+00:00", "Z"), data=data).model_dump_json().encode()
