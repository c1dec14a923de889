"""The overview screen: a few lines for each part of the gateway, health first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from penstock.console.views import queue, rollouts
from penstock.console.views.releases import bar, decision_thresholds, percent, stage_name
from penstock.console.views.runs import sparkline
from penstock.console.views.table import GAP, age, clean, compact, duration, joined, number, plain, size
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.model import times
from penstock.gateway.model.answers import Breakdown, BreakdownRow, Digest, Stats
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.release import ReleaseView
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import Curve, RunHead
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import ServerView
from penstock.gateway.reading.policy.questions import Question
from penstock.tui.screens.chart import COLOURS, bars
from penstock.tui.view import DigestHistory, Pane, ScreenView, begin_text, limited_to

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

EVERY_S: Final = 5.0
"""Interval of looks without a change; s."""
SCANNED: Final = 5_000
"""The newest spans that the figures are of where there is no index."""
FIGURES_S: Final = 10.0
"""Least time between two questions for the figures of a range of time; s."""
RESTS: Final = 100
"""They are not asked for again for this many times the time that their answer took: they may need a scan."""
Grain = Literal["minute", "hour", "day"]
GRAINS: Final[dict[Grain, tuple[timedelta, str, str]]] = {
    "minute": (timedelta(minutes=1), "%Y-%m-%d %H:%M", "%H:%M"),
    "hour": (timedelta(hours=1), "%Y-%m-%d %H:00", "%d. %H:00"),
    "day": (timedelta(days=1), "%Y-%m-%d", "%d %b"),
}
"""The steps of time of a chart: their length, their name in a breakdown, and their label."""
FINEST: Final = 180
"""The most steps of a chart, after which it has coarser ones."""
LEAST_CHART, CHART_WIDTH = 7, 38
"""The fewest lines of a chart with its title, and the fewest columns."""
MOST_PLACES: Final = 2_000
"""The most steps of a chart, whatever the clocks say."""
ROOMY: Final = 80
"""The columns behind the names of the blocks from which there is room for longer bars."""
HEADS: Final = 10
"""The columns that the names of the blocks take."""
NAME: Final = 20
"""The most characters of a model's name."""
MOST: Final = 4
"""The most lines of a list; fewer where charts would have no room below."""
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
    figures: Figures | None
    """None until they have come."""


class Figures(NamedTuple):
    """The sums of calls in a range of time."""

    models: Breakdown
    course: Breakdown
    """The same by steps of time."""
    grain: Grain
    since: str
    """The range; empty for all."""


class OverviewView(ScreenView[OverviewData, None]):
    name = "overview"
    title = "Overview"
    help = "health, traffic, cost, queue, releases and runs at a glance"
    stacked = True
    concerns = frozenset({"rollouts", "releases", "runs", "resources"})
    ranged = True

    def __init__(self) -> None:
        self.every_s = EVERY_S
        self._figures: Figures | None = None
        self._due_s = 0.0
        """When the figures may be asked for again, by the monotonic clock."""
        self._looked = False
        self._stale = False
        """True if something has changed since the figures were asked for."""

        self._errors: list[Span] = []
        self._failed = True
        """True if there may be new errors. Where they are rare, a gateway without an index reads all spans for them."""

    def forget(self) -> None:
        self._figures, self._looked, self._failed = None, False, True

    def observe(self, digest: Digest) -> bool:
        self._stale = True
        self._failed = self._failed or digest.errors > 0
        return super().observe(digest)

    async def load(self, client: Client) -> OverviewData:
        """Ask for everything at once, so that the delay is that of one answer, not of ten."""

        async def failed() -> list[Span]:
            if self._failed:
                # An error that comes meanwhile is asked for by the next look.
                self._failed = False
                try:
                    self._errors = [span async for span in client.recent_spans("status:error", MOST)]
                except BaseException:
                    self._failed = True
                    raise
            return self._errors

        async def live() -> list[ReleaseView]:
            return await map_concurrently(lambda one: client.release(one.id), (await client.releases(live=True))[:MOST])

        async def training() -> list[tuple[RunHead, Curve | None]]:
            running = [run async for run in client.runs(status="running", limit=MOST)]
            return list(zip(running, await map_concurrently(lambda run: _reward(client, run), running), strict=True))

        first, second = await asyncio.gather(
            asyncio.gather(client.readiness(), client.stats(spans=0), client.queue(), client.workers(), live()),
            asyncio.gather(training(), client.waiting(), client.definitions(), client.upstreams(), failed()),
        )
        # In a terminal all else is shown first, and the figures with the next look, at once.
        later = self.pane is not None and not self._looked
        self._looked, self.every_s = True, 0.0 if later else EVERY_S
        return OverviewData(*first, *second, None if later else await self._summed(client))

    async def _summed(self, client: Client) -> Figures:
        """The figures; they are asked for seldom, because a gateway without an index scans for them."""
        began = time.monotonic()
        old = self._stale or bool(self.since)
        if self._figures is None or (began >= self._due_s and old):
            self._stale = False
            before, terms = self._figures, limited_to(self.since, "")
            models = await client.breakdown("model", terms, SCANNED)
            grain = fitting_grain(self.since) if before is None else before.grain
            course = await client.breakdown(grain, terms, SCANNED)
            if not self.since:
                # A young tape is shown in finer steps, and an older one in coarser ones.
                while grain != "minute" and len(course.rows) <= 3:
                    grain = "hour" if grain == "day" else "minute"
                    course = await client.breakdown(grain, terms, SCANNED)
                while grain != "day" and len(course.rows) > FINEST:
                    grain = "hour" if grain == "minute" else "day"
                    course = await client.breakdown(grain, terms, SCANNED)
            self._figures = Figures(models, course, grain, self.since)
            self._due_s = time.monotonic() + max(FIGURES_S, RESTS * (time.monotonic() - began))
        return self._figures

    def panes(self, data: OverviewData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        if not data.stats.tape.get("rollouts"):
            return [Pane("", lambda width, height: _begin(data, self.address, width))]
        return [Pane("", lambda width, height: draw_blocks(data, self.traffic, now_ns, width, height))]

    def command(self, id: str | None) -> str:
        return "penstock stats --by model" + (f" --since {self.since}" if self.since else "")


def fitting_grain(since: str) -> Grain:
    """The step of time of a range: the finest that makes no more than `FINEST` of it."""
    length = timedelta(seconds=(times.nanoseconds(since) or 0) / 1e9) if since else timedelta.max
    fitting: list[Grain] = [grain for grain, (step, *_) in GRAINS.items() if length <= FINEST * step]
    return fitting[0] if fitting else "day"


async def _reward(client: Client, run: RunHead) -> Curve | None:
    names = [name for name in run.metrics if name.endswith("reward")][:1]
    return (await client.curves(run.id, names, max_points=24))[0] if names else None


def _begin(data: OverviewData, address: str, width: int) -> RenderableType:
    """The screen of a gateway without a rollout: its health, and how an agent calls it."""
    return Group(_column([("Health", list(_health(data, width - HEADS)))]), Text(), Text(begin_text(address)))


def draw_blocks(
    data: OverviewData, traffic: DigestHistory | None, now_ns: int, width: int, height: int | None
) -> RenderableType:
    """The blocks, below each other, or in two columns on a wide screen; charts of calls over time in the lines that are
    left."""
    room = (width if width < WIDE else width // 2 - 2) - HEADS
    most = MOST
    while True:
        blocks: list[tuple[str, Lines]] = [
            ("Health", list(_health(data, room))),
            ("Decide", list(_asks(data))),
            ("Traffic", list(_traffic(traffic, room, most))),
            ("Models", list(_models(data.figures, room, most))),
            ("Queue", list(_queue(data, now_ns, room))),
            ("Releases", list(_releases(data.releases[:most], room))),
            ("Runs", list(_runs(data.runs[:most], room))),
            ("Errors", list(_errors(data.errors[:most], now_ns, room))),
        ]
        sides = [blocks] if width < WIDE else [blocks[:4], blocks[4:]]
        left = LEAST_CHART if height is None else height - max(_height(side, room) for side in sides) - 1
        if left >= LEAST_CHART or most == 1:
            break
        most -= 1
    shown = Grid.grid(expand=True, padding=(0, 2))
    for _ in sides:
        shown.add_column(ratio=1)
    shown.add_row(*map(_column, sides))
    if data.figures is None:
        return shown
    return Group(shown, Text(), *_charts(data.figures, now_ns, width, max(LEAST_CHART, left)))


def _height(blocks: Sequence[tuple[str, Lines]], room: int) -> int:
    return sum(-(-line.cell_len // room) if name == "Health" else 1 for name, lines in blocks for line in lines)


def _fitting(room: int, *pieces: str | Text) -> Text:
    """The first pieces on a line, as many as there is room for."""
    while len(pieces) > 1 and joined(*pieces).cell_len > room:
        pieces = pieces[:-1]
    return joined(*pieces)


def _column(blocks: Sequence[tuple[str, Lines]]) -> RenderableType:
    made = Grid.grid(padding=(0, 1))
    made.add_column(width=8, no_wrap=True)
    made.add_column()
    for name, lines in blocks:
        for line in lines:
            # Why the gateway is not ready is never cut off.
            line.no_wrap, line.overflow = name != "Health", "ellipsis"
        if lines:
            made.add_row(Text(name, style="bold"), Group(*lines))
    return made


def _charts(figures: Figures, now_ns: int, width: int, height: int) -> Iterator[RenderableType]:
    """Charts over the range of time: in two rows if there is room, else as many as fit beside each other."""
    places, rows = course(figures, now_ns)
    if not places:
        yield Text("No call was made in this time." if figures.since else "No call has been made yet.", style="dim")
        return
    label = GRAINS[figures.grain][2]
    every = f"{'an' if figures.grain == 'hour' else 'a'} {figures.grain}"
    found: list[tuple[str, list[list[float]], str]] = [
        (f"Calls {every}", [[row.calls for row in rows], [row.errors for row in rows]], "errors"),
        (f"Tokens {every}", [[_tokens(row) for row in rows], [row.output_tokens or 0 for row in rows]], "generated"),
        ("Median latency, s", [[(row.median_ns or 0) / 1e9 for row in rows]], ""),
        (f"Cost {every}, {figures.models.currency}", [[row.cost or 0 for row in rows]], ""),
    ]
    found = [one for one in found if any(map(any, one[1]))]
    least = -(-len(found) // 2) if height >= 2 * LEAST_CHART else len(found)
    beside = max(1, min(least, width // CHART_WIDTH))
    below = max(1, min(-(-len(found) // beside), height // LEAST_CHART))
    found = found[: beside * below]
    wide, high = (width - 2 * (beside - 1)) // beside, height // below
    for at in range(0, len(found), beside):
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_row(*(_chart(one, places, label, wide - 1, high) for one in found[at : at + beside]))
        yield grid


def _chart(
    one: tuple[str, list[list[float]], str], places: Sequence[datetime], label: str, width: int, height: int
) -> RenderableType:
    title, layers, second = one
    head = Text(title, style="bold", no_wrap=True)
    if second and any(layers[1]):
        head.append("  █ ", COLOURS[0]).append("all", "not bold").append("  █ ", COLOURS[1]).append(second, "not bold")
    return Group(head, bars(layers, width, height - 1, lambda place: places[place].strftime(label)))


def course(figures: Figures, now_ns: int) -> tuple[list[datetime], list[BreakdownRow]]:
    """All steps of the range until now, those without a call too; of all the tape, or of the newest spans alone, those
    since the first call. Times are UTC."""
    step, form, _ = GRAINS[figures.grain]
    known = {row.value: row for row in figures.course.rows}
    now = datetime.fromtimestamp(now_ns // 10**9, UTC)
    begin = min((datetime.strptime(value, form).replace(tzinfo=UTC) for value in known), default=now)
    # Of a part of the spans nothing is known from before its first call.
    if figures.since and known and figures.course.complete:
        begin = now - timedelta(seconds=(times.nanoseconds(figures.since) or 0) / 1e9)
    places: list[datetime] = []
    at = datetime.strptime(begin.strftime(form), form).replace(tzinfo=UTC)
    while known and at <= now and len(places) < MOST_PLACES:
        places.append(at)
        at += step
    return places, [known.get(place.strftime(form)) or BreakdownRow(value="") for place in places]


def _tokens(row: BreakdownRow) -> int:
    return (row.input_tokens or 0) + (row.output_tokens or 0)


def _health(data: OverviewData, room: int) -> Iterator[Text]:
    tape = data.stats.tape
    ready = Text("ready", style="green") if data.ready is None else Text(clean(data.ready), style="bold red")
    used, whole = tape.get("used_bytes", 0), tape.get("map_bytes", 0)
    full = f"tape {size(used)} of {size(whole)}" if whole else ""
    yield _fitting(room, ready, *(pluralized(tape.get(f"{noun}s", 0), noun) for noun in ("rollout", "attempt")), full)
    if data.stats.gaps:
        yield Text(f"{pluralized(data.stats.gaps, 'call')} could not be recorded", style="bold red")
    for one in data.upstreams:
        if one.paused:
            since = duration(int((one.paused_s or 0) * 1e9))
            wait = f"{pluralized(one.waiting, 'call')} wait{'s' if one.waiting == 1 else ''}"
            line = _fitting(room, f"upstream {clean(one.name)} is paused", wait, f"for {since}")
            line.stylize("yellow")
            yield line
    yield from rollouts.servers(data.stats.servers)


def _traffic(traffic: DigestHistory | None, room: int, most: int) -> Iterator[Text]:
    if traffic is None:
        return  # --plain follows nothing
    flows = {name: traffic.rate_series(of) for name, of in FLOWS.items()}
    if most < MOST:
        yield _fitting(room, *(f"{flow.now:,.1f} {name} a second" for name, flow in flows.items()))
        return
    for name, flow in flows.items():
        # From 0 up: quiet is low.
        line = (
            sparkline([0.0, *flow.rates])[1:] if flow.peak else "".join(" ▁"[rate is not None] for rate in flow.rates)
        )
        rates = f"{flow.now:>7,.1f} a second", f"at most {flow.peak:,.1f}"
        yield _fitting(room, f"{name:6}", *([line] if room >= 2 * len(line) else []), *rates)


def _models(figures: Figures | None, room: int, most: int) -> Iterator[Text]:
    """A line for each model that was called in the range, with as many columns as there is room for."""
    if figures is None:
        yield Text("asking ...", style="dim")
        return
    found = figures.models.rows
    if not found:
        yield Text("none was called in this time" if figures.since else "none was called yet", style="dim")
        return
    over = f"last {figures.since}" if figures.since else "all"
    if len(found) > most:
        over = f"{most} of {len(found):,}, {figures.since or 'all'}"
    rows = [(over, "calls", "errors", "tokens", "cost", "median", "p95")]
    for row in found[:most]:
        tokens, cost = rollouts.sums(row), rollouts.cost(row)
        times = duration(row.median_ns), duration(row.p95_ns)
        rows.append((clean(row.value)[:NAME], f"{row.calls:,}", f"{row.errors:,}", tokens, cost, *times))
    widths = [max(len(row[column]) for row in rows) + GAP for column in range(len(rows[0]))]
    while sum(widths) > room and len(widths) > 3:
        widths.pop()
    for at, row in enumerate(rows):
        line = Text(f"{row[0]:{widths[0] - GAP}}", style="" if at else "dim")
        for column, width in enumerate(widths[1:], 1):
            failed = at and column == 2 and found[at - 1].errors
            line.append(f"{row[column]:>{width}}", "red" if failed else "")
        yield line
    if not figures.models.complete:
        yield Text(f"of the newest {figures.models.looked_at or 0:,} spans", style="dim")


def _queue(data: OverviewData, now_ns: int, room: int) -> Iterator[Text]:
    busy = sum(bool(worker.attempts) for worker in data.workers)
    workers = f"{pluralized(len(data.workers), 'worker')}, {busy:,} at work" if data.workers else "no worker of late"
    line = joined(queue.queue(data.queue, now_ns), workers)
    yield from [line] if line.cell_len <= room else [queue.queue(data.queue, now_ns), Text(workers)]


def _asks(data: OverviewData) -> Iterator[Text]:
    found = [f"key 2: {one.tool} on {one.server} waits for a yes or no" for one in data.waiting[:MOST]]
    found += [f"key 2: {one.server} changed what it says of its tools" for one in data.servers if one.pending("tools")]
    for view in data.releases:
        release = view.release
        if release.waits == "approval" or release.stage == "held":
            state = "is held" if release.stage == "held" else "waits for approval"
            found.append(f"key 3: release {release.id} {state}")
    yield from (Text(clean(one), style="bold yellow") for one in found)
    if not found:
        yield Text("nothing waits for a decision", style="dim")


def _releases(found: Sequence[ReleaseView], room: int) -> Iterator[Text]:
    for view in found:
        release = view.release
        head = f"{clean(release.id)} {stage_name(release.stage)} {percent(release.split)}"
        if not release.assigned:
            yield Text(head)
            continue
        lead = max(decision_thresholds(release, view.figures), key=lambda one: one.value / one.limit)
        size = 12 if room >= ROOMY else 7
        yield _fitting(
            room,
            head,
            clean(lead.name),
            bar(lead.value, lead.limit, size),
            f"{lead.value:.3g} of {lead.limit:g}",
            lead.follows,
        )
    if not found:
        yield Text("none is live", style="dim")


def _runs(found: Sequence[tuple[RunHead, Curve | None]], room: int) -> Iterator[Text]:
    size = 24 if room >= ROOMY else 8
    for run, curve in found:
        done = f"step {run.step or 0:,}" + (f" of {run.steps:,}" if run.steps else "")
        trend = "" if curve is None else f"{curve.metric} {sparkline(curve.mean[-size:])} {number(curve.last)}"
        yield joined(plain(run.id), done, trend, plain(run.message))
    if not found:
        yield Text("none is running", style="dim")


def _errors(found: Sequence[Span], now_ns: int, room: int) -> Iterator[Text]:
    for span in found:
        place = f"{span.rollout}/{span.attempt}#{span.sequence}"
        about = Text(clean(span.error or ""), style="red"), clean(place), span.model or span.name or compact(span.path)
        yield _fitting(room, f"{age(span.start_ns, now_ns)} ago", *about)
    if not found:
        yield Text("none among the newest spans", style="dim")
