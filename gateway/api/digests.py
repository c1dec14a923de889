"""The change feed in digests: at most one event per interval, with the names of changed things.

A user interface shows a few dozen rows and fetches again those that changed. It needs no whole records, and over a slow
line it can afford none: 500 changes a second are half a megabyte in the change feed, and a few hundred bytes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.changes import TAPE, FeedPiece, follow, since_of
from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import query_of
from penstock.gateway.model.base import Noun
from penstock.gateway.model.change import Change, Digest
from penstock.gateway.model.span import Span, SpanStatus

MOST_NAMED = 200
"""Most rollouts that a digest names."""
MOST_READ = 5_000
"""Most changes that are read for one digest."""


class DigestQuery(Noun):
    """Parameters of the digests."""

    since: int | None = Field(default=None, ge=0)
    """Tell what comes after this cursor; what is new from now on when not given."""
    tape: str | None = TAPE
    """The tape that the cursor is of, as `Penstock-Tape` of an earlier answer says; any other is refused."""
    every_s: float = Field(default=1.0, ge=0.1, le=60, allow_inf_nan=False)
    """At most one event in so many seconds."""


async def get_digests(request: web.Request) -> web.StreamResponse:
    """The change feed in digests, as server-sent events: the names of what has changed and sums over the calls that
    ended, at most one event every `every_s` seconds. `id` is the cursor to go on from."""
    control, asked = request.app[CONTROL], query_of(request, DigestQuery)
    since = since_of(request, control, asked.since, asked.tape)
    return await follow(request, control, since, partial(_next, asked.every_s))


async def _next(every_s: float, control: Control, cursor: int) -> FeedPiece:
    """The event for the changes after the cursor, and the pause until the next one."""
    changes, after = await asyncio.to_thread(control.tape.changes, cursor, MOST_READ)
    if not changes:
        return FeedPiece(b"", after)
    digest = digest_of(changes, after)
    event = f"id: {after}\nevent: digest\ndata: {digest.model_dump_json(exclude_defaults=True)}\n\n"
    return FeedPiece(event.encode(), after, every_s)


def digest_of(changes: Iterable[Change], cursor: int) -> Digest:
    """The digest of these changes."""
    rollouts, names = (
        dict[str, None](),
        {"resource": dict[str, None](), "release": dict[str, None](), "run": dict[str, None]()},
    )
    found = Digest(cursor=cursor)
    ended = dict[tuple[str, str, int], Span]()
    for change in changes:
        if (rollout := _rollout(change)) is not None:
            # The newest change last.
            rollouts.pop(rollout, None)
            rollouts[rollout] = None
        if change.name is not None and change.kind in names:
            names[change.kind][change.name] = None
        if change.span is not None and change.span.end_ns is not None:
            ended[change.span.rollout, change.span.attempt, change.span.sequence] = change.span
    found.rollouts, found.more = list(rollouts)[-MOST_NAMED:], max(0, len(rollouts) - MOST_NAMED)
    found.resources, found.releases, found.runs = (list(names[kind]) for kind in ("resource", "release", "run"))
    for span in ended.values():
        _count(found, span)
    return found


def _rollout(change: Change) -> str | None:
    if change.rollout is not None:
        return change.rollout.id
    if change.kind == "forgotten":
        return change.name
    inner = change.attempt or change.span
    return None if inner is None else inner.rollout


def _count(digest: Digest, span: Span) -> None:
    if span.kind == "tool":
        digest.tool_runs += 1
    if span.kind != "llm":
        return
    digest.calls += 1
    digest.cancelled += span.status == SpanStatus.CANCELLED
    digest.errors += span.status not in (SpanStatus.OK, SpanStatus.CANCELLED)
    if span.usage is not None:
        digest.input_tokens += span.usage.input_tokens or 0
        digest.output_tokens += span.usage.output_tokens or 0
