"""A training run as one page of HTML, in the style of a release's (`console.views.release_page`). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from penstock.console.views.candidates import chart as candidates_chart
from penstock.console.views.candidates import needed_e_value, ordered
from penstock.console.views.release_page import STYLE, document, figure, table
from penstock.console.views.svg import HEIGHT, LEFT, STYLES, WIDTH, Chart, LineSeries, svg, text
from penstock.console.views.table import duration, moment, number
from penstock.gateway.model.run import CandidateTree, Curve, Run, RunEvent

# The charts of training runs: one for each metric, with a line for each run. Pure.

HEAD = 44
"""Height of the space above a chart for its title and its lines' names, in a drawing by itself."""

E_VALUE = "/e_value"
"""Suffix of the names of metrics that are e-values: their charts are logarithmic."""

Runs = Mapping[str, Sequence[Curve]]
"""Curves by run; the first run is the one on show, the others are for comparison."""


def charts(runs: Runs, tree: CandidateTree | None = None) -> Iterator[Chart]:
    """The candidates of a run that searches; then a chart for each metric that any of the runs has points of, in the
    order of the first run."""
    if tree is not None and (first := candidates_chart(tree)) is not None:
        yield first
    bound = needed_e_value(tree)
    found = {name: {curve.metric: curve for curve in curves if curve.count} for name, curves in runs.items()}
    for metric in dict.fromkeys(metric for curves in found.values() for metric in curves):
        chart = _chart(metric, {name: curves[metric] for name, curves in found.items() if metric in curves})
        yield replace(chart, log=True, limits=_limits(bound)) if metric.endswith(E_VALUE) else chart


def _limits(bound: float | None) -> list[tuple[str, float]]:
    return [] if bound is None else [(f"better at {bound:g}", bound)]


def _chart(metric: str, curves: Mapping[str, Curve]) -> Chart:
    lines = [LineSeries(name, _means(curve), style) for style, (name, curve) in enumerate(curves.items(), 1)]
    first = next(iter(curves.values()))
    band = [] if first.exact else list(_band(first))
    said = " ".join(_said(name, curve) for name, curve in curves.items())
    # Lines are drawn across values that are not finite, so the title gives their number.
    nulls = sum(curve.nulls for curve in curves.values())
    title = f"{metric} ({nulls:,} not finite)" if nulls else metric
    return Chart(title, said, lines, "step", band=band, tick_y="{:.4g}".format)


def _middle(curve: Curve) -> Iterator[float]:
    return ((low + high) / 2 for low, high in zip(curve.first_step, curve.last_step, strict=True))


def _means(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(_middle(curve), curve.mean, strict=True) if y is not None]


def _band(curve: Curve) -> Iterator[tuple[float, float, float]]:
    for x, low, high in zip(_middle(curve), curve.low, curve.high, strict=True):
        if low is not None and high is not None:
            yield x, low, high


def _said(name: str, curve: Curve) -> str:
    """A curve in words: its points, range and last value."""
    finite = [value for value in (*curve.low, *curve.high) if value is not None]
    extent = f", from {number(min(finite))} to {number(max(finite))}" if finite else ""
    nulls = f", {curve.nulls:,} of them no finite number" if curve.nulls else ""
    now = "no finite number" if curve.last is None else number(curve.last)
    means = "" if curve.exact else " Drawn are means of buckets; the band is what they lie between."
    return f"{name}: {curve.count:,} points{nulls}{extent}; the last is {now} at step {curve.last_step[-1]:,}.{means}"


def drawing(found: Sequence[Chart]) -> str:
    """Charts below each other as one SVG file."""
    each = HEAD + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {each * max(1, len(found))}">',
        f"<style>{STYLE} svg svg {{ width: {WIDTH}px; height: {HEIGHT}px; }} text {{ font-family: sans-serif; }} "
        ".title { font-size: 14px; fill: var(--text); }</style>",
        '<rect width="100%" height="100%" style="fill: var(--back)"/>',
    ]
    for place, chart in enumerate(found):
        top = each * place
        parts.append(f'<text class="title" x="{LEFT}" y="{top + 18}">{text(chart.title)}</text>{_key(chart, top + 36)}')
        placed = f'<svg y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(svg(chart, f"chart{place}").replace("<svg", placed, 1))
    return "\n".join([*parts, "</svg>", ""])


def _key(chart: Chart, y: int) -> str:
    """The legend: a sample and the name of each line."""
    places = count(LEFT, WIDTH // (len(chart.lines) + 1))
    return "".join(
        f'<path class="line s{line.style % STYLES}" d="M{x} {y - 4}h30"/>'
        f'<text class="tick" x="{x + 36}" y="{y}">{text(line.name)}</text>'
        for x, line in zip(places, chart.lines, strict=False)
    )


def page(run: Run, curves: Runs, events: Sequence[RunEvent], now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch; `events` newest first."""
    body = [*_head(run, now_ns)]
    body += (figure(chart, f"chart{number}") for number, chart in enumerate(charts(curves, run.tree)))
    body += _candidates(run)
    body += _events(events)
    body.append(f"<h2>Configuration</h2><pre>{text(json.dumps(run.config, indent=1, ensure_ascii=False))}</pre>")
    return document(f"{run.id}: {run.status}", body)


def _head(run: Run, now_ns: int) -> Iterator[str]:
    yield f"<header><h1>{text(run.id)}: {text(run.status)}</h1><p>{text(f'{run.kind} {run.name}'.strip())}. "
    yield f"{text(run.message or '')}</p>"
    planned = "" if run.steps is None else f" of {run.steps:,}"
    rows = [
        ("step", "none yet" if run.step is None else f"{run.step:,}{planned}"),
        ("started", f"{moment(run.created_ns)[:19]} UTC"),
        ("took" if run.ended_ns else "runs for", duration((run.ended_ns or now_ns) - run.created_ns)),
        ("resumed", f"{run.resumed:,} times"),
        ("made", ", ".join(f"{made.name}@{made.version}" for made in run.made) or "nothing yet"),
    ]
    yield table("The run", ("", ""), rows)
    yield f'<p class="dim">As of {moment(now_ns)[:19]} UTC.</p></header>'


def _candidates(run: Run) -> Iterator[str]:
    if run.tree is not None:
        rows = [
            (
                f"{'· ' * depth}{one.id}",
                number(one.mean),
                f"{one.rollouts:,}",
                one.state,
                number(one.e_value),
                one.claim,
            )
            for depth, one in ordered(run.tree.candidates)
        ]
        heads = ("candidate", "mean", "rollouts", "state", "e-value", "claim")
        missing = f"; {run.tree.left_out:,} more are left out" if run.tree.left_out else ""
        yield "<h2>Candidates</h2>" + table(f"Each below the one that it was made from{missing}", heads, rows)


def _events(events: Sequence[RunEvent]) -> Iterator[str]:
    if events:
        rows = [
            (moment(event.time_ns or 0)[:19], "" if event.step is None else f"{event.step:,}", event.level, event.text)
            for event in events
        ]
        yield "<h2>Events</h2>" + table("The newest first", ("when (UTC)", "step", "level", "what"), rows)
