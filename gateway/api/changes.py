"""The change feed over HTTP: server-sent events that resume exactly, or a finite page.

Every event carries the feed's cursor as its id. A follower that comes back with `Last-Event-ID` (browsers do so by
themselves) misses nothing and gets nothing twice. A slow follower slows only itself: the next changes are read from the
tape when the last ones are on their way. Followers end when the application shuts down.

Cursors belong to one tape; the header `Penstock-Tape` of an answer identifies it. A follower that sends it back is
refused if the gateway has another tape by now.

A follower may choose its changes (`store.view`). Then no other change wakes it, and unwanted ones are skipped
by the first bytes of their records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, cast, get_args

from aiohttp import web
from pydantic import Field

from penstock.gateway.api import compression, guard
from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, query_of
from penstock.gateway.api.openapi import EVENTS
from penstock.gateway.model.answers import TAPE_HEADER, Change, ChangeKind, ChangePage, Digest
from penstock.gateway.model.base import Noun
from penstock.gateway.model.rollout import RolloutStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.tape.store.feed import FeedSubscription
from penstock.gateway.tape.store.view import ALL_CHANGES, ChangeFilter

BATCH = 256
"""Most changes that are read from the tape at a time."""


class FeedPiece(NamedTuple):
    """A piece of a feed."""

    event: bytes
    """The bytes to write; empty if there is no event."""
    cursor: int
    """Cursor to go on from."""
    pause_s: float = 0.0
    """Seconds until the next piece."""


KIND: Final = f"({'|'.join(get_args(ChangeKind))})"
STATUS: Final = f"({'|'.join(RolloutStatus)})"
NAME: Final = r"[A-Za-z0-9._-]{1,128}\*?"
TAPE: Final[Any] = Field(default=None, pattern="^[0-9a-f]{32}$")
PieceSource = Callable[[Control, int], Awaitable[FeedPiece]]
"""Returns the piece after a cursor."""


class ChangesQuery(Noun):
    """Parameters of the change feed."""

    since: int = Field(default=0, ge=0)
    """Give what comes after this cursor; 0 is everything. A `Last-Event-ID` header goes before it."""
    tape: str | None = TAPE
    """The tape that the cursor is of, as `Penstock-Tape` of an earlier answer says; any other is refused."""
    follow: bool = True
    """Keep the stream open and send what comes. `false` answers with one finite JSON page."""
    limit: int | None = Field(default=None, ge=1, le=10_000)
    """Entries of a page (1000 unless given); only with `follow=false`."""
    kind: str | None = Field(default=None, pattern=f"^{KIND}(,{KIND})*$")
    """Only changes of these kinds, with commas between them."""
    name: str | None = Field(default=None, max_length=8192, pattern=f"^{NAME}(,{NAME})*$")
    """Only what belongs to these rollouts, resources, releases or runs, with commas between them; `NAME*` is all whose
    names begin so."""
    status: str | None = Field(default=None, pattern=f"^{STATUS}(,{STATUS})*$")
    """Of rollouts only those that stand at one of these, with commas between them."""

    def change_filter(self) -> ChangeFilter:
        kinds, names, status = (_words(text) for text in (self.kind, self.name, self.status))
        return ChangeFilter(cast("list[ChangeKind]", kinds), names, map(RolloutStatus, status))


def _words(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


async def get_changes(request: web.Request) -> web.StreamResponse:
    """The change feed as server-sent events: `id` is the cursor to go on from, `event` the kind of what changed, `data`
    a Change as JSON. Comments keep the connection alive. With `follow=false` it is one page of JSON instead."""
    control, asked = request.app[CONTROL], query_of(request, ChangesQuery)
    since = since_of(request, control, asked.since, asked.tape)
    if not asked.follow:
        changes, cursor = control.tape.changes(since, asked.limit or 1000, asked.change_filter())
        page = answer(ChangePage(changes=changes, next=cursor))
        page.headers[TAPE_HEADER] = control.tape.identity()
        return page
    if asked.limit is not None:
        raise ApiError(400, "limit goes with follow=false only", "limit", str(asked.limit))
    wanted = asked.change_filter()
    return await follow(request, control, since, partial(_next, wanted), wanted)


def since_of(request: web.Request, control: Control, asked: int | None, tape: str | None) -> int:
    """The cursor that a follower resumes from; the last one if it has named none. `tape`: the cursor's tape."""
    own, end = control.tape.identity(), control.tape.cursor()
    if tape is not None and tape != own:
        raise ApiError(400, "this gateway has another tape now: begin anew, without a cursor", "tape", tape, (own,))
    last = request.headers.get("Last-Event-ID")
    field, value = ("since", str(end if asked is None else asked)) if last is None else ("Last-Event-ID", last)
    if not value.isascii() or not value.isdigit() or int(value) > end:
        raise ApiError(
            400, f"{field} must be a cursor of this feed, which ends at {end}", field, value, (f"0 to {end}",)
        )
    return int(value)


async def follow(
    request: web.Request, control: Control, since: int, piece: PieceSource, wanted: ChangeFilter = ALL_CHANGES
) -> web.StreamResponse:
    """Send a feed piece by piece, until the follower goes away. `wanted`: the changes that wake it."""
    gzip = compression.accepts_gzip(request.headers)
    headers = {"Content-Type": EVENTS, "X-Accel-Buffering": "no", TAPE_HEADER: control.tape.identity()}
    headers |= compression.HEADERS if gzip else {}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    async with _following(control):
        try:
            with control.feed.subscribe(wanted) as watch:
                await _send(compression.GzipFeed(response) if gzip else response, control, since, piece, watch)
        except ConnectionError:
            pass  # the follower went away
        except Exception:
            guard.log.exception("the change feed failed at %d", since)  # the head is sent, so the stream can only end
    return response


@asynccontextmanager
async def _following(control: Control) -> AsyncGenerator[None]:
    task = asyncio.current_task()
    assert task is not None
    control.followers.add(task)
    try:
        yield
    finally:
        control.followers.discard(task)


async def _next(wanted: ChangeFilter, control: Control, cursor: int) -> FeedPiece:
    changes, after = control.tape.changes(cursor, BATCH, wanted)
    return FeedPiece(b"".join(map(_event, changes)), after)


async def _send(
    response: compression.FeedWriter, control: Control, cursor: int, piece: PieceSource, watch: FeedSubscription
) -> None:
    await response.write(b": penstock changes\n\n")
    while True:
        event, after, pause_s = await piece(control, cursor)
        if event:
            await response.write(event)
        if after > cursor:
            cursor = after
            await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(control.keep_alive_s):
                cursor = await watch.wait(cursor)
        except TimeoutError:
            cursor = watch.passed
            await response.write(b": keep-alive\n\n")


def _event(change: Change) -> bytes:
    return f"id: {change.cursor}\nevent: {change.kind}\ndata: {change.model_dump_json(exclude_none=True)}\n\n".encode()


async def end_followers(app: web.Application) -> None:
    """Signal handler: end streams that never end by themselves, because the gateway stops."""
    for task in list(app[CONTROL].followers):
        task.cancel()


# The change feed in digests: at most one event per interval, with the names of changed things.
#
# A user interface shows a few dozen rows and fetches again those that changed. It needs no whole records, and over a
# slow line it can afford none: 500 changes a second are half a megabyte in the change feed, and a few hundred bytes
# here.

MOST_NAMED = 200
"""Most rollouts that a digest names."""
MOST_READ = 5_000
"""Most changes that are read for one digest."""


class DigestQuery(Noun):
    """The query parameters of `/api/digest`."""

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
    return await follow(request, control, since, partial(_digests_next, asked.every_s))


async def _digests_next(every_s: float, control: Control, cursor: int) -> FeedPiece:
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
