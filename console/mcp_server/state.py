"""Tools that show the state: figures, the queue, releases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import GenericAlias
from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from penstock.console.mcp_server.tool import (
    MOST_TEXT,
    AnyTool,
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolDefinition,
    ToolError,
    ToolResult,
    cut,
    moment,
    plain,
)
from penstock.console.views import queue as queue_display
from penstock.console.views import releases as display
from penstock.console.views import rollouts as rollout_display
from penstock.console.views.noun import NounError, NounSelection
from penstock.console.views.registry import NOUNS, noun_view
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import ModelStats, RewardStats
from penstock.gateway.model.base import Id
from penstock.gateway.model.release import AuditTrailEntry, Release, ReleaseView
from penstock.gateway.model.rollout import Totals

MODELS, WORKERS, ENTRIES = 30, 50, 10
"""Most models, workers and decisions that are shown."""
WHY = 500
"""Most characters of a reason."""


class ShowStatsArguments(ToolArguments):
    spans: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """How many of the newest spans to sum over. All if not given, where the gateway has an index, else 10,000."""


class StatsAnswer(ToolAnswer):
    """Sums over all spans, or over the newest."""

    counted_spans: int
    complete: bool
    """Whether these are all spans of the tape."""
    since: str | None
    """When the earliest of them began."""
    totals: Totals
    by_model: dict[str, ModelStats]
    """The busiest models first; latencies in ns."""
    by_status: dict[str, int]
    """Calls by how they ended."""
    rewards: RewardStats
    tape: dict[str, int]
    """Figures of the whole tape."""
    gaps: int
    """Calls that could not be recorded since the gateway started."""


async def show_stats(context: ToolContext, asked: ShowStatsArguments) -> ToolResult:
    """Read the gateway's sums over spans; of its models only the `MODELS` with the most calls."""
    found = await context.client.stats(asked.spans)
    few = dict(list(found.by_model.items())[:MODELS])
    answer = StatsAnswer(
        counted_spans=found.counted_spans,
        complete=found.complete,
        since=moment(found.since_ns),
        totals=found.totals,
        by_model=few,
        by_status=found.by_status,
        rewards=found.rewards,
        tape=found.tape,
        gaps=found.gaps,
    )
    left = len(found.by_model) - len(few)
    more = f"\n{left:,} models with fewer calls are not shown." if left else ""
    return ToolResult(answer, plain(rollout_display.stats(found.model_copy(update={"by_model": few}))) + more)


class ShowQueueArguments(ToolArguments):
    """The tool `show_queue` takes no arguments."""


class WorkerRow(ToolAnswer):
    """A worker that the gateway has heard of lately."""

    id: str
    last_seen: str | None
    attempts: list[str]
    """What it is working on: ROLLOUT/ATTEMPT."""
    finished: int
    """Attempts that it has finished."""


class QueueAnswer(ToolAnswer):
    """The state of the queue, and the workers that take rollouts from it."""

    state: str
    """open, paused or draining."""
    waiting: dict[str, int]
    """Rollouts in the queue, by mode."""
    claimed: int
    """Attempts in workers' hands."""
    oldest: str | None
    """When the rollout that has waited longest was made."""
    workers: list[WorkerRow]


async def show_queue(context: ToolContext, _: ShowQueueArguments) -> ToolResult:
    """The queue and its workers."""
    status, workers = await asyncio.gather(context.client.queue(), context.client.workers())
    shown, now = workers[:WORKERS], time.time_ns()
    answer = QueueAnswer(
        state=status.state,
        waiting={str(mode): count for mode, count in status.waiting.items()},
        claimed=status.claimed,
        oldest=moment(status.oldest_ns),
        workers=[
            WorkerRow(id=one.id, last_seen=moment(one.last_seen_ns), attempts=one.attempts[:20], finished=one.finished)
            for one in shown
        ],
    )
    lines = [plain(queue_display.queue(status, now))]
    lines += [plain(queue_display.WORKERS.table(shown, now))] if shown else ["No worker was heard of lately."]
    lines += [f"{len(workers) - len(shown):,} more workers are not shown."] if len(workers) > len(shown) else []
    return ToolResult(answer, "\n".join(lines))


class ListReleasesArguments(ToolArguments):
    resource: Id | None = None
    """Only releases of this resource."""
    live: bool = False
    """Only those that have not ended."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """How many at most, the newest."""


class ReleaseRow(ToolAnswer):
    """A release in a list."""

    id: str
    resource: str
    stable: str
    candidate: str
    stage: str
    live: bool
    split: float
    """Share of new rollouts that get the candidate now."""
    assigned: int
    reason: str
    """Why it is where it is."""


class ReleaseRows(ToolAnswer):
    """The newest releases that match, at most `limit`."""

    releases: list[ReleaseRow]
    left_out: int = 0
    """Older ones that are not shown."""


async def list_releases(context: ToolContext, asked: ListReleasesArguments) -> ToolResult:
    """Read the releases of the gateway; shows the newest `limit` of them."""
    found = await context.client.releases(asked.resource, asked.live)
    shown = found[: asked.limit]
    answer = ReleaseRows(releases=[_row(one) for one in shown], left_out=len(found) - len(shown))
    if not found:
        return ToolResult(
            answer, "There is no such release." if asked.resource or asked.live else "There are no releases yet."
        )
    more = f"\n{answer.left_out:,} older ones are not shown: a larger limit, or resource, shows them."
    return ToolResult(answer, plain(display.RELEASES.table(shown, time.time_ns())) + (more if answer.left_out else ""))


def _row(one: Release) -> ReleaseRow:
    return ReleaseRow(
        id=one.id,
        resource=one.resource,
        stable=one.stable,
        candidate=one.candidate,
        stage=one.stage,
        live=one.live,
        split=display.share(one.stage, one.split),
        assigned=one.assigned,
        reason=cut(one.reason, WHY),
    )


class ShowReleaseArguments(ToolArguments):
    release: Id
    """Its name, or that of its resource: then its newest."""


class ArmFigure(ToolAnswer):
    """A figure of both arms."""

    name: str
    stable: str
    candidate: str


class EvidenceFigure(ToolAnswer):
    """An e-value and the limit at which the gateway acts."""

    name: str
    value: float
    limit: float
    then: str
    """What happens at the limit."""
    reached: bool


class DecisionRow(ToolAnswer):
    """A link of the audit chain."""

    at: str | None
    action: str
    stage: str
    """The stage after it."""
    who: str
    """`gateway` is the rules."""
    why: str


class ReleaseAnswer(ToolAnswer):
    """A release with its evidence."""

    release: ReleaseRow
    waits_for: list[str]
    arms: list[ArmFigure]
    difference: str | None
    """Candidate less stable in goodness."""
    evidence: list[EvidenceFigure]
    decisions: list[DecisionRow]
    """The last ones, newest last."""


async def show_release(context: ToolContext, asked: ShowReleaseArguments) -> ToolResult:
    """Read one release with the newest `ENTRIES` entries of its audit chain."""
    name = await _named(context.client, asked.release)
    view, audit = await asyncio.gather(context.client.release(name), context.client.audit(name))
    text = plain(display.status(view, audit, None, time.time_ns(), ENTRIES))
    return ToolResult(_release(view, audit[-ENTRIES:]), text)


async def _named(client: Client, name: str) -> str:
    every = await client.releases()
    found = [one.id for one in every if one.id == name] or [one.id for one in every if name in one.resources]
    if not found:
        names = ", ".join(one.id for one in every[:20])
        there = f"the newest are {names}" if names else "there are none yet"
        raise ToolError(f"there is no release {name!r}, nor one of a resource of that name; {there}")
    return found[0]


def _release(view: ReleaseView, audit: list[AuditTrailEntry]) -> ReleaseAnswer:
    release = view.release
    arms = display.arms(release, view.figures) if release.assigned else ()
    return ReleaseAnswer(
        release=_row(release),
        waits_for=list(display.wait_conditions(view)),
        arms=[ArmFigure(name=row.name, stable=row.stable, candidate=row.candidate) for row in arms],
        difference=display.difference(view),
        evidence=[
            EvidenceFigure(name=one.name, value=one.value, limit=one.limit, then=one.follows, reached=one.crossed)
            for one in (display.decision_thresholds(release, view.figures) if release.assigned else ())
        ],
        decisions=[
            DecisionRow(at=moment(one.at_ns), action=one.action, stage=one.after, who=one.who, why=cut(one.why, WHY))
            for one in audit
        ],
    )


TOOLS = (
    ToolDefinition(
        "show_stats",
        "Show figures",
        "Show figures over the newest spans: calls, errors, tokens and latencies by model, rewards, and the size of "
        f"the tape. At most {MODELS} models.",
        ShowStatsArguments,
        StatsAnswer,
        show_stats,
    ),
    ToolDefinition(
        "show_queue",
        "Show the queue",
        "Show how much work waits, what is being worked on, and the workers (at most "
        f"{WORKERS}). Use it to see whether new rollouts are being run at all.",
        ShowQueueArguments,
        QueueAnswer,
        show_queue,
    ),
    ToolDefinition(
        "list_releases",
        "List releases",
        "List releases, newest first. A release is the experiment that moves rollouts from the stable version of a "
        "resource to a candidate, and back if it does harm. At most `limit`.",
        ListReleasesArguments,
        ReleaseRows,
        list_releases,
    ),
    ToolDefinition(
        "show_release",
        "Show a release",
        "Show a release: its stage, what it waits for, both arms side by side, its evidence against the limits at "
        f"which the gateway acts by itself, and its last {ENTRIES} decisions with their reasons. Starting, promoting "
        "and rolling back is for people: `penstock release`.",
        ShowReleaseArguments,
        ReleaseAnswer,
        show_release,
    ),
)


# Tools that list the nouns of `console.views.registry`, made from their views.


class NounRowsAnswer(ToolAnswer):
    """Rows of a noun. The type of each row is that of the noun."""

    rows: Sequence[Any]
    left_out: int = 0
    """Rows that are not shown, because the answer would be too long."""
    more: bool = False
    """True if there are more than `limit`."""


def noun_tool(name: str) -> AnyTool:
    """The tool that lists a noun."""
    view, entry = noun_view(name), NOUNS[name]
    rows_of: Any = GenericAlias(list, (view.row,))
    answer: type[NounRowsAnswer] = create_model(f"{name}_answer", __base__=NounRowsAnswer, rows=(rows_of, Field()))

    async def act(context: ToolContext, asked: NounSelection) -> ToolResult:
        try:
            found = await view.fetch(context.client, asked)
        except NounError as e:
            raise ToolError(str(e)) from None
        rows = _first(found.rows)
        left_out = len(found.rows) - len(rows)
        shown = plain(view.picture(replace(found, rows=rows), time.time_ns())) if rows else found.none
        more = f"{left_out:,} more are left out: ask for fewer." if left_out else ""
        more = more or ("There are more: a larger limit shows them." if found.more else "")
        text = "\n".join(filter(None, (shown, found.part if rows else "", more)))
        return ToolResult(answer.model_construct(rows=rows, left_out=left_out, more=found.more), text)

    title = entry.help.partition(":")[0].rstrip(".")
    return ToolDefinition(
        f"list_{name}", title, " ".join((entry.help, entry.more)).strip(), view.selection, answer, act
    )


def _first(rows: Sequence[BaseModel]) -> Sequence[BaseModel]:
    """The first rows, at least one, as far as an answer may hold them."""
    sizes = accumulate(len(row.model_dump_json(exclude_none=True)) for row in rows)
    return rows[: max(1, sum(size <= MOST_TEXT for size in sizes))]


NOUN_TOOLS = tuple(noun_tool(name) for name in NOUNS if noun_view(name).tool)
