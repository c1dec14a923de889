"""The screen of training runs: curves, samples left out and the reasons, events, and the configuration."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import runs as shown
from penstock.console.views.noun import NounRows
from penstock.console.views.runs import candidates_tree
from penstock.console.views.table import Column, Listing, clean, figure, joined, number, plain
from penstock.gateway.model.run import Curve, Run, RunEvent, RunHead
from penstock.tui.screens.chart import TerminalCurve, chart, smooth_points
from penstock.tui.view import NounScreen, Pane, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

NEWEST: Final = 200
"""The most runs that are listed."""
POINTS: Final = 200
"""The most buckets of a curve."""
EVENTS: Final = 50
CHARTED: Final = 8
"""The most metrics that are drawn; the table has all."""
HEIGHT: Final = 7
FIRST: Final = ("reward", "held_out", "accuracy", "loss", "kl", "entropy", "length", "tokens")
"""Words in the names of metrics, in the order in which these are drawn."""
SAMPLES: Final = ("dropped/", "left_out/", "calls/", "groups/", "samples", "rollouts", "updates", "staleness")
"""Prefixes of the metrics about the samples that were learnt from or left out."""
LEFT: Final = ("dropped/", "left_out/", "calls/")
"""Prefixes of the metrics that count samples left out."""
LEFT_OUT = (Column("metric"), figure("last"), figure("in all"), Column("trend", 1))


@dataclass(frozen=True, slots=True)
class RunDetails:
    """A run with its curves and events."""

    run: Run
    curves: Sequence[Curve]
    events: Sequence[RunEvent]
    """Events, newest first."""
    before: Run | None
    """The previous run of its kind; None when there is none, or it is not needed."""


class RunsView(NounScreen[RunHead, RunDetails]):
    noun = shown.RUNS
    help = "training: curves, what was left out, events, configuration; c compares two"

    def __init__(self) -> None:
        super().__init__()
        self.selection = shown.RunSelection(limit=NEWEST)

    async def load_details(self, client: Client, data: NounRows[RunHead], id: str) -> RunDetails:
        """Ask for the run with its curves; for the previous run only when the pane Config is in sight."""

        async def events() -> list[RunEvent]:
            return [event async for event in client.run_events(id, EVENTS)]

        async def before() -> Run | None:
            other = _before(data, id) if self.pane in (None, "Config") else None
            return None if other is None else await client.run(other)

        run, curves, said, earlier = await asyncio.gather(
            client.run(id), client.curves(id, max_points=POINTS), events(), before()
        )
        return RunDetails(run, curves, said, earlier)

    def head(self, data: NounRows[RunHead], now_ns: int) -> Text:
        running = sum(run.status == "running" for run in data.rows)
        more = f"the newest {NEWEST:,}" if data.more else ""
        return joined(f"{running:,} running of {len(data.rows):,}", more)

    def panes(self, data: NounRows[RunHead], id: str | None, closer: RunDetails | None, now_ns: int) -> Sequence[Pane]:
        if closer is None:
            return ()
        searches = [] if closer.run.tree is None else [pane("Candidates", candidates_tree(closer.run.tree))]
        return [
            *searches,
            Pane("Curves", lambda width, height: curves(closer.curves, width, height)),
            pane("Metrics", shown.watched(closer.run, closer.curves, [], now_ns)),
            pane("Samples", samples(closer.run, closer.curves)),
            pane("Events", _events(closer.events)),
            pane("Config", _config(closer)),
        ]


def _before(data: NounRows[RunHead], id: str) -> str | None:
    """The id of the previous run of the same kind; None when there is none."""
    rows = iter(data.rows)
    one = next((run for run in rows if run.id == id), None)
    return next((run.id for run in rows if one is not None and run.kind == one.kind), None)


# -- curves ------------------------------------------------------------------------------------------------------------


def terminal_curve(curve: Curve, name: str = "") -> TerminalCurve:
    """A metric as a curve, with a smoothed one if it has many points."""
    points = [(float(step), value) for step, value in zip(curve.first_step, curve.mean, strict=True)]
    return TerminalCurve(name or curve.metric, points, smooth_points(points) if len(points) > 20 else ())


def drawing_order(found: Sequence[Curve]) -> list[Curve]:
    """The metrics in the order in which they are drawn, without those that count samples left out."""
    left = [curve for curve in found if curve.count and not curve.metric.startswith(LEFT)]

    def rank(curve: Curve) -> int:
        return next((at for at, word in enumerate(FIRST) if word in curve.metric), len(FIRST))

    return sorted(left, key=rank)


def curves(found: Sequence[Curve], width: int, height: int | None = None) -> RenderableType:
    """The main metrics as charts, two beside each other on a wide screen; the others are in the table. They fill the
    lines there are; where these are few one scrolls."""
    chosen = drawing_order(found)
    if not chosen:
        return Text("It has not reported a point yet.")
    pieces: list[RenderableType] = []
    wide = width >= 120
    each = width // 2 - 2 if wide else width
    below = -(-min(len(chosen), CHARTED) // (2 if wide else 1))
    high = max(HEIGHT, (height or 0) // below - 2)
    blocks = [_block(curve, each, high) for curve in chosen[:CHARTED]]
    if wide:
        pieces += [_beside(blocks[at : at + 2], each) for at in range(0, len(blocks), 2)]
    else:
        pieces += blocks
    if len(chosen) > CHARTED:
        names = ", ".join(clean(curve.metric) for curve in chosen[CHARTED:])
        pieces.append(Text(f"Not drawn: {names}. The pane Metrics has them.", style="dim"))
    return Group(*pieces)


def _block(curve: Curve, width: int, height: int) -> Text:
    missing = f"{curve.nulls:,} not finite" if curve.nulls else ""
    last = f"last {number(curve.last)}" if curve.last is not None else "last: not finite"
    title = joined(Text(clean(curve.metric), style="bold"), last, Text(missing, style="red"))
    return Text("\n").join([title, chart([terminal_curve(curve)], width, height), Text()])


def _beside(blocks: Sequence[Text], width: int) -> Text:
    """Blocks of lines beside each other."""
    columns = [block.split("\n", allow_blank=True) for block in blocks]
    made: list[Text] = []
    for at in range(max(map(len, columns))):
        row = Text(no_wrap=True)
        for lines in columns:
            cell = lines[at].copy() if at < len(lines) else Text()
            cell.truncate(width, pad=True)
            row.append_text(cell).append("  ")
        row.rstrip()
        made.append(row)
    return Text("\n").join(made)


# -- samples -----------------------------------------------------------------------------------------------------------


def samples(run: RunHead, found: Sequence[Curve]) -> RenderableType:
    """The samples that the run learnt from, and those that it left out by reason."""
    told = [curve for curve in found if curve.metric.startswith(SAMPLES) and curve.count]
    if not told:
        return Text("It reports neither its samples nor what it left out.")
    made = Listing(*LEFT_OUT)
    for curve in told:
        made.add_row(
            plain(curve.metric), number(curve.last) or "none", number(_sum(curve)), shown.sparkline(curve.mean)
        )
    return Group(*_nothing(run, told), made)


def _sum(curve: Curve) -> float:
    """The sum over all points, because buckets hold means."""
    return sum(mean * count for mean, count in zip(curve.mean, curve.finite, strict=True) if mean is not None)


def _nothing(run: RunHead, told: Sequence[Curve]) -> Iterator[Text]:
    """A warning if the run has learnt nothing."""
    updates = next((curve for curve in told if curve.metric == "updates"), None)
    if updates is not None and not _sum(updates):
        most = max((curve for curve in told if curve.metric.startswith("dropped/")), key=_sum, default=None)
        why = f": most were left out as {clean(most.metric)}" if most is not None and _sum(most) else ""
        yield Text(f"{clean(run.id)} has not updated the weights once{why}.", style="bold red")


# -- events and configuration ------------------------------------------------------------------------------------------


def _events(found: Sequence[RunEvent]) -> RenderableType:
    if not found:
        return Text("Nothing has happened that it told of.")
    return Group(*map(shown.event, found))


def _config(closer: RunDetails) -> RenderableType:
    own, before = closer.run, closer.before
    pieces: list[RenderableType] = []
    if before is not None:
        lines = list(
            difflib.unified_diff(json_lines(before.config), json_lines(own.config), before.id, own.id, lineterm="", n=0)
        )
        pieces.append(Text(f"Since {clean(before.id)}, the run of its kind before it:", style="bold"))
        colours = {"+": "green", "-": "red", "@": "cyan"}
        pieces += [plain(one, colours.get(one[:1], "")) for one in lines] or [Text("Nothing is configured otherwise.")]
        pieces.append(Text())
    pieces += map(plain, json_lines(own.config)) if own.config is not None else [Text("It told no configuration.")]
    return Group(*pieces)


def json_lines(value: Any) -> list[str]:
    """A configuration as lines that can be compared."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True).splitlines()
