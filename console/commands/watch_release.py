"""`penstock release watch`: a release in progress, in a terminal, as lines, or as a page that is kept up to date.

Rollouts are counted a moment after the commit that lets them count, so the watcher waits for that moment
(`watch.SETTLE_S`). The change feed reports neither the progress of a stage before the canary nor a deadline that
passes: for these the watcher also looks without a change.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import RenderableType

from penstock.console.commands.terminal import console
from penstock.console.commands.verify import history
from penstock.console.commands.watch import poll_on_change, show
from penstock.console.views import releases
from penstock.console.views.release_page import History, page
from penstock.gateway.client.console import whole_file
from penstock.gateway.model.release import ReleaseView

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

PREPARING_S = 1.0
"""Seconds between two looks at a stage before the canary."""
LONGEST_S = 60.0
"""Maximum seconds between two looks."""
LAST = 3
"""Number of the chain's entries that are shown."""


class ReleaseSnapshot(NamedTuple):
    """The state of a release at a moment."""

    view: ReleaseView
    history: History
    awaited: tuple[int, int]
    """Assigned rollouts of each arm that are not counted yet."""


NOTHING = History([], [], [])


async def read_snapshot(client: Client, name: str, known: History = NOTHING, whole: bool = False) -> ReleaseSnapshot:
    """A release now. `whole`: with all assignments and outcomes, except that those in `known` are not read again; else
    only with those that are awaited."""
    view = await client.release(name)
    release, before = view.release, len(known.seen)
    found = await history(client, release, before if whole else release.counted)
    rest = [one.arm for one in found.assigned[len(found.seen) :]]
    if whole:
        assigned, seen = [*known.assigned[:before], *found.assigned], [*known.seen, *found.seen]
        found = History(found.audit, assigned, seen)
    return ReleaseSnapshot(view, found, (rest.count("stable"), rest.count("candidate")))


def snapshots(client: Client, name: str, whole: bool) -> AsyncGenerator[ReleaseSnapshot]:
    """A release whenever it may have changed, until it ends. Known assignments and outcomes are not read again."""
    known = NOTHING

    async def next_look() -> ReleaseSnapshot:
        nonlocal known
        found = await read_snapshot(client, name, known, whole)
        known = found.history if whole else NOTHING
        return found

    return poll_on_change(client, next_look, lambda found: _patience(found.view))


def _patience(view: ReleaseView) -> float | None:
    """Seconds until the next change that the feed does not report; None when the release has ended."""
    if not view.release.live:
        return None
    if view.doing is not None:
        return PREPARING_S
    if view.oldest_ns is None or view.release.stage != "canary":
        return LONGEST_S
    policy = view.release.policy
    due = view.oldest_ns / 1e9 + policy.outcome_deadline_s - time.time()
    longest = policy.early_deadline_s if view.waiting_early else LONGEST_S
    return min(max(due, PREPARING_S), max(longest, PREPARING_S), LONGEST_S)


async def watch(client: Client, name: str, html: Path | None, json: bool) -> None:
    """Shows a release until it ends, and keeps its page in the file `html` up to date."""
    screen = console()

    async def written() -> AsyncGenerator[ReleaseSnapshot]:
        async for found in snapshots(client, name, html is not None):
            if html is not None:
                with whole_file(html) as file:
                    file.write(page(found.view, found.history, time.time_ns()).encode())
            yield found

    def tell(found: ReleaseSnapshot, before: ReleaseSnapshot | None) -> None:
        """Prints each new entry once, for output that is no terminal."""
        for entry in found.history.audit[0 if before is None else len(before.history.audit) :]:
            screen.print(releases.entry(entry), soft_wrap=True)

    last = await show(written(), screen, _view if json else None, _picture, tell)
    if last is not None and not screen.is_terminal and not json:
        screen.print(_picture(last))


def _view(found: ReleaseSnapshot) -> ReleaseView:
    return found.view


def _picture(found: ReleaseSnapshot) -> RenderableType:
    view, history, awaited = found
    return releases.status(view, history.audit, awaited, time.time_ns(), LAST)
