"""The overview screen: a few lines for each part of the gateway, health first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from penstock.console.views import queue, rollouts
from penstock.console.views.releases import bar, decision_thresholds, percent, stage_name
from penstock.console.views.runs import sparkline
from penstock.console.views.table import age, clean, compact, duration, joined, number, plain, size
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.model.answers import Digest, Stats
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.release import ReleaseView
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import Curve, RunHead
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import ServerView
from penstock.gateway.reading.policy.questions import Question
from penstock.tui.view import DigestHistory, Pane, ScreenView

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

COUNTED: Final = 2_000
"""The newest spans, over which figures are computed."""
MOST: Final = 4
"""The most lines of a list."""
WIDE: Final = 140
"""The least width at which blocks stand in two columns; characters."""
FLOWS: Final[dict[str, Callable[[Digest], int]]] = {
    "calls": lambda digest: digest.calls,
    "errors": lambda digest: digest.errors,
    "tokens": lambda digest: digest.input_tokens + digest.output_tokens,
}
Lines = Sequence[Text]


@dataclass(frozen=True, slots=True)
class OverviewData:
    """The data of the overview."""

    ready: str | None
    stats: Stats
    queue: QueueStatus
    workers: Sequence[Worker]
    releases: Sequence[ReleaseView]
    """Live releases."""
    runs: Sequence[tuple[RunHead, Curve | None]]
    """Running runs with the curve of their reward."""
    waiting: Sequence[Question]
    servers: Sequence[ServerView]
    upstreams: Sequence[UpstreamView]
    errors: Sequence[Span]


class OverviewView(ScreenView[OverviewData, None]):
    name = "overview"
    title = "Overview"
    help = "health, traffic, cost, queue, releases and runs at a glance"
    stacked = True
    concerns = frozenset({"rollouts", "releases", "runs", "resources"})
    every_s = 5.0

    async def load(self, client: Client) -> OverviewData:
        """Ask for everything at once, so that the delay is that of one answer, not of ten."""

        async def failed() -> list[Span]:
            return [span async for span in client.recent_spans("status:error", MOST)]

        async def live() -> list[ReleaseView]:
            return await map_concurrently(lambda one: client.release(one.id), (await client.releases(live=True))[:MOST])

        async def training() -> list[tuple[RunHead, Curve | None]]:
            running = [run async for run in client.runs(status="running", limit=MOST)]
            return list(zip(running, await map_concurrently(lambda run: _reward(client, run), running), strict=True))

        first, second = await asyncio.gather(
            asyncio.gather(client.readiness(), client.stats(COUNTED), client.queue(), client.workers(), live()),
            asyncio.gather(training(), client.waiting(), client.definitions(), client.upstreams(), failed()),
        )
        return OverviewData(*first, *second)

    def panes(self, data: OverviewData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        return [Pane("", lambda width: draw_blocks(data, self.traffic, now_ns, width))]

    def command(self, id: str | None) -> str:
        return "penstock stats"


async def _reward(client: Client, run: RunHead) -> Curve | None:
    names = [name for name in run.metrics if name.endswith("reward")][:1]
    return (await client.curves(run.id, names, max_points=24))[0] if names else None


def draw_blocks(data: OverviewData, traffic: DigestHistory | None, now_ns: int, width: int) -> RenderableType:
    """The blocks: below each other, or in two columns on a wide screen."""
    blocks: list[tuple[str, Lines]] = [
        ("Health", list(_health(data))),
        ("Traffic", list(_traffic(data, traffic))),
        ("Models", list(_models(data.stats))),
        ("Cost", list(_cost(data.stats))),
        ("Queue", list(_queue(data, now_ns))),
        ("Asks you", list(_asks(data))),
        ("Releases", list(_releases(data.releases))),
        ("Runs", list(_runs(data.runs))),
        ("Errors", list(_errors(data.errors, now_ns))),
    ]
    if width < WIDE:
        return _column(blocks)
    grid = Grid.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(_column(blocks[:5], apart=True), _column(blocks[5:], apart=True))
    return grid


def _column(blocks: Sequence[tuple[str, Lines]], apart: bool = False) -> RenderableType:
    made = Grid.grid(padding=(0, 1))
    made.add_column(width=8, no_wrap=True)
    made.add_column()
    for name, lines in blocks:
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        made.add_row(Text(name, style="bold"), Group(*lines, *([Text()] if apart else [])))
    return made


def _health(data: OverviewData) -> Iterator[Text]:
    tape = data.stats.tape
    ready = Text("ready", style="green") if data.ready is None else Text(clean(data.ready), style="bold red")
    used, whole = tape.get("used_bytes", 0), tape.get("map_bytes", 0)
    full = f"tape {size(used)} of {size(whole)}" if whole else ""
    yield joined(ready, *(pluralized(tape.get(f"{noun}s", 0), noun) for noun in ("rollout", "attempt")), full)
    if data.stats.gaps:
        yield Text(f"{pluralized(data.stats.gaps, 'call')} could not be recorded", style="bold red")
    for one in data.upstreams:
        if one.paused:
            since = duration(int((one.paused_s or 0) * 1e9))
            wait = f"{pluralized(one.waiting, 'call')} wait{'s' if one.waiting == 1 else ''}"
            yield Text(f"upstream {clean(one.name)} is paused for {since}; {wait}", style="yellow")
    yield from rollouts.servers(data.stats.servers)


def _traffic(data: OverviewData, traffic: DigestHistory | None) -> Iterator[Text]:
    if traffic is None:
        yield Text("is followed in a terminal; below are sums over the newest spans", style="dim")
        return

    for name, of in FLOWS.items():
        flow = traffic.rate_series(of)
        rates = f"{flow.now:>7,.1f} a second, at most {flow.peak:,.1f}"
        yield joined(f"{name:6}", sparkline(flow.rates), rates)


def _models(stats: Stats) -> Iterator[Text]:
    busy = sorted(stats.by_model.items(), key=lambda item: -item[1].calls)
    for name, m in busy[:MOST]:
        errors = Text(pluralized(m.errors, "error"), style="red" if m.errors else "")
        cost = f"cost {cost}" if (cost := rollouts.cost(m)) else ""
        times = f"median {duration(m.median_ns)}, p95 {duration(m.p95_ns)}" if m.median_ns is not None else ""
        yield joined(plain(name), pluralized(m.calls, "call"), errors, cost, times)
    if not busy:
        yield Text("no model was called yet: give an agent this gateway's address as its base URL")


def _cost(stats: Stats) -> Iterator[Text]:
    rewards = stats.rewards
    mean = (
        f"mean reward {number(round(rewards.mean, 3))} of {rewards.count:,}"
        if rewards.mean is not None
        else "no reward yet"
    )
    yield joined(rollouts.total_cost(stats.totals), f"{rollouts.sums(stats.totals)} tokens")
    yield joined(mean, f"all in the newest {pluralized(stats.counted_spans, 'span')}")


def _queue(data: OverviewData, now_ns: int) -> Iterator[Text]:
    yield queue.queue(data.queue, now_ns)
    busy = sum(bool(worker.attempts) for worker in data.workers)
    yield Text(
        f"{pluralized(len(data.workers), 'worker')}, {busy:,} at work"
        if data.workers
        else "no worker was heard of lately"
    )


def _asks(data: OverviewData) -> Iterator[Text]:
    found = [f"{one.tool} on {one.server} waits for a yes or no (2)" for one in data.waiting[:MOST]]
    found += [f"{one.server} changed what it says of its tools (2)" for one in data.servers if one.pending("tools")]
    for view in data.releases:
        release = view.release
        if release.waits == "approval" or release.stage == "held":
            found.append(f"release {release.id} is {'held' if release.stage == 'held' else 'waiting for approval'} (3)")
    yield from (Text(clean(one), style="bold yellow") for one in found)
    if not found:
        yield Text("nothing", style="dim")


def _releases(found: Sequence[ReleaseView]) -> Iterator[Text]:
    for view in found:
        release = view.release
        head = f"{clean(release.id)} {stage_name(release.stage)} {percent(release.split)}"
        if not release.assigned:
            yield Text(head)
            continue
        lead = max(decision_thresholds(release, view.figures), key=lambda one: one.value / one.limit)
        yield joined(
            head, clean(lead.name), bar(lead.value, lead.limit, 12), f"{lead.value:.3g} of {lead.limit:g}", lead.follows
        )
    if not found:
        yield Text("none is live", style="dim")


def _runs(found: Sequence[tuple[RunHead, Curve | None]]) -> Iterator[Text]:
    for run, curve in found:
        done = f"step {run.step or 0:,}" + (f" of {run.steps:,}" if run.steps else "")
        trend = "" if curve is None else f"{curve.metric} {sparkline(curve.mean)} {number(curve.last)}"
        yield joined(plain(run.id), done, trend, plain(run.message))
    if not found:
        yield Text("none is running", style="dim")


def _errors(found: Sequence[Span], now_ns: int) -> Iterator[Text]:
    for span in found:
        place = f"{span.rollout}/{span.attempt}#{span.sequence}"
        about = (span.model or span.name or compact(span.path), Text(clean(span.error or ""), style="red"))
        yield joined(f"{age(span.start_ns, now_ns)} ago", clean(place), *about)
    if not found:
        yield Text("none among the newest spans", style="dim")
