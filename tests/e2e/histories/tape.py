"""What the tape says when everything is over, read through the control API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from e2e.histories.tool_calls import text_in

from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import AuditEntry, Change
from penstock.gateway.model.release import Pin
from penstock.gateway.model.rollout import Attempt
from penstock.gateway.model.span import Span

Name: TypeAlias = tuple[str, str]
PAGE = 5000


@dataclass(slots=True)
class Tape:
    """The tape, and what the provider has seen."""

    rollouts: dict[str, str] = field(default_factory=dict[str, str])
    """Where each stands."""
    attempts: dict[Name, Attempt] = field(default_factory=dict[Name, Attempt])
    spans: list[Span] = field(default_factory=list[Span])
    feed: dict[int, str] = field(default_factory=dict[int, str])
    """What stands at each cursor."""
    pins: dict[str, list[Pin]] = field(default_factory=dict[str, list[Pin]])
    """Of rollouts that saw more than one version."""
    stages: dict[str, str] = field(default_factory=dict[str, str])
    """How far each release has come."""
    released: dict[str, str] = field(default_factory=dict[str, str])
    """The resource of each release."""
    served: dict[str, str] = field(default_factory=dict[str, str])
    """The weights that answered each call that reached their server, by the call's own name."""
    audit: list[AuditEntry] = field(default_factory=list[AuditEntry])
    """Who changed what, in order."""
    seen: dict[str, str] = field(default_factory=dict[str, str])
    """System texts of the calls that reached the provider, and tools of those that reached the server of tools, by the
    call's own name."""
    answers: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """What tools have answered, by the call's own name."""


def subject(change: Change) -> str:
    """What a change is of."""
    if change.span is not None:
        return f"span {change.span.rollout}/{change.span.attempt}#{change.span.sequence}"
    if change.attempt is not None:
        return f"attempt {change.attempt.rollout}/{change.attempt.id}"
    if change.rollout is not None:
        return f"rollout {change.rollout.id}"
    return f"{change.kind} {change.name}"


def versions(spans: list[Span], resource: str) -> dict[str, set[str]]:
    """Versions of a resource that each rollout was served by."""
    found: dict[str, set[str]] = {}
    for span in spans:
        if span.kind == "llm" and span.versions and resource in span.versions:
            found.setdefault(span.rollout, set()).add(span.versions[resource])
    return found


async def read(client: Client, seen: dict[str, str], served: dict[str, str], resources: Sequence[str]) -> Tape:
    """All of it."""
    tape = Tape(seen=seen, served=served)
    async for rollout in client.rollouts():
        tape.rollouts[rollout.id] = rollout.status
        tape.attempts |= {(rollout.id, attempt.id): attempt for attempt in rollout.attempts}
    tape.spans = [span async for span in client.recent_spans()]
    for span in tape.spans:
        if span.kind == "tool" and span.body is not None:
            told = await client.response_body(span.rollout, span.attempt, span.sequence)
            tape.answers[str(span.parent_id)] = text_in(told, str(span.parent_id))
    cursor = 0
    while (page := await client.change_page(cursor, PAGE)).changes:
        tape.feed |= {change.cursor: subject(change) for change in page.changes}
        cursor = page.next
    mixed = {name for one in resources for name, found in versions(tape.spans, one).items() if len(found) > 1}
    tape.pins = {rollout: await client.pins(rollout) for rollout in mixed}
    tape.audit = [entry async for entry in client.audit_log()][::-1]
    releases = await client.releases()
    tape.stages = {release.id: release.stage for release in releases}
    tape.released = {release.id: release.resource for release in releases}
    return tape
