"""The content of a message: a link of a release's audit chain, in JSON. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from penstock.gateway.model.release import Entry, Release
from penstock.gateway.model.webhook import EVENTS, Event, Message, ReleaseChanged, Tested

LONGEST: Final = 200
"""Characters of a text among the figures: receivers want small bodies."""
_RENAMED: Final = {"rollback": "roll_back"}
"""Actions of people that have another name among the rules."""


def event_of(entry: Entry) -> Event | None:
    """Return the event of an entry; None where no webhook can subscribe to it."""
    action = _RENAMED.get(entry.action, entry.action)
    return next((event for event in EVENTS if event == action), None)


def id_of(entry: Entry) -> str:
    """Return the message's id, which is the same each time that a link is sent."""
    return f"msg_{entry.hash[:32]}"


def body(release: Release, entry: Entry) -> bytes:
    """Return the body of the message about a link of the chain."""
    data = ReleaseChanged(
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


def trial(webhook: str, now_ns: int) -> bytes:
    """Return the body of a test message."""
    return _written("webhook.test", now_ns, Tested(webhook=webhook))


def _figures(entry: Entry) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in entry.evidence.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:LONGEST]
    return found


def _written(kind: str, at_ns: int, data: ReleaseChanged | Tested) -> bytes:
    at = datetime.fromtimestamp(at_ns // 1000 / 1e6, UTC).isoformat(timespec="microseconds")
    return Message(type=kind, timestamp=at.replace("+00:00", "Z"), data=data).model_dump_json().encode()
