"""A release and a training run, each as one page of HTML. Pure.

A page is self-contained: it has no script and loads nothing, and its own policy forbids both. It follows light and
dark, in the colours of Okabe and Ito. It can be read by people who do not see it (titles, descriptions, and a table for
each chart), and every foreign text is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from json import dumps
from typing import NamedTuple

from penstock.console.views.releases import (
    ARMS,
    EValueThreshold,
    StageStatus,
    arms,
    audience,
    canary_share,
    coverage_lines,
    decision_thresholds,
    difference,
    latest,
    left_out,
    path,
    ramp_thresholds,
    share,
    stage_name,
    units,
    version_changes,
    versions,
    wait_conditions,
)
from penstock.console.views.runs import candidates_chart, needed_e_value, ordered_candidates
from penstock.console.views.svg import HEIGHT, LEFT, STYLES, WIDTH, Chart, LineSeries, legend, svg, text
from penstock.console.views.table import asked_by, duration, moment, number
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry, Release, ReleaseView
from penstock.gateway.model.run import CandidateTree, Curve, Run, RunEvent
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.canary.decision import Canary, figures, interval, replay_steps
from penstock.gateway.releases.canary.outcomes import as_of

ROWS = 24
"""Maximum number of rows of a chart's table."""
STYLE = """
:root { color-scheme: light dark; --text: #1b1b1f; --dim: #5b5b66; --back: #fdfdfd; --rule: #d9d9e0; --band: #0072b21f;
  --c0: #5b5b66; --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #cc79a7; --c5: #e69f00; --limit: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e7e7ec; --dim: #a2a2ae; --back: #16161a; --rule: #34343c;
  --band: #56b4e92b; --c0: #b4b4c0; --c1: #56b4e9; --c2: #e69f00; --c3: #009e73; --c4: #cc79a7; --c5: #f0e442;
  --limit: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 60rem;
  margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } figure { margin: 1.5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); }
th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--rule); font-weight: normal; }
th:first-child { text-align: left; }
.dim, .tick { color: var(--dim); fill: var(--dim); } .tick { font-size: 11px; }
ol.way { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
.way [aria-current] { font-weight: bold; text-decoration: underline; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0; }
svg { width: 100%; height: auto; } svg.key { width: 34px; height: 10px; margin-right: .4rem; }
.grid { stroke: var(--rule); } .limit { stroke: var(--limit); stroke-dasharray: 2 3; } .band { fill: var(--band); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; } .s0 { stroke: var(--c0); }
.s1 { stroke: var(--c1); stroke-dasharray: 9 4; } .s2 { stroke: var(--c2); stroke-dasharray: 2 5; }
.s3 { stroke: var(--c3); stroke-dasharray: 12 4 2 4; } .s4 { stroke: var(--c4); stroke-dasharray: 5 5; }
.s5 { stroke: var(--c5); stroke-dasharray: 14 3 2 3 2 3; } ol.chain > li { margin: .6rem 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; } summary { cursor: pointer; color: var(--dim); }
"""


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A complete page in this style and more `style`; `body` is HTML, the title is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def figure(chart: Chart, name: str) -> str:
    """A chart as HTML, with its title, its legend and its numbers; `name` makes its ids unique on the page."""
    rows = sorted({x for line in chart.lines for x, _ in line.points})
    rows = [x for at, x in enumerate(rows) if at % max(1, -(-len(rows) // ROWS)) == 0 or at == len(rows) - 1]
    columns = [dict(line.points) for line in chart.lines]
    cells = [[chart.tick_x(x), *(f"{column[x]:.4g}" if x in column else "" for column in columns)] for x in rows]
    numbers = table(chart.title, [chart.x, *(line.name for line in chart.lines)], cells)
    return (
        f"<figure><figcaption><h2>{text(chart.title)}</h2><p>{text(chart.description)}</p>{legend(chart)}</figcaption>"
        f"{svg(chart, name)}<details><summary>{text(chart.title)} as a table</summary>{numbers}</details></figure>"
    )


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts as an HTML table; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in heads)
    lines = (
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    body = "".join(lines)
    return f"<table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# -- a release: its state, the evidence for its decisions, and their reasons ----


MARKS = {"done": "✓ ", "skipped": "– ", "failed": "✗ ", "now": "▶ ", "ahead": ""}


def release_page(view: ReleaseView, history: History, now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch."""
    release, points = view.release, evidence_series(view.release, history)
    if points:
        view = view.model_copy(update={"figures": points[-1].figures, "interval": points[-1].interval})
    body = [*_head(view, history, now_ns), *_arms(view, history)]
    for place, chart in enumerate(release_charts(view, history, points, now_ns)):
        body.append(figure(chart, f"chart{place}"))
    body += _evidence(view, points)
    body += _chain(history.audit, release)
    return document(f"{release.id}: {stage_name(release.stage)}", body)


def _head(view: ReleaseView, history: History, now_ns: int) -> Iterator[str]:
    release = view.release
    only = audience(release.only)
    yield f"<header><h1>{text(release.id)}: {text(stage_name(release.stage))}</h1>"
    yield (
        f"<p>{text(release.kind)} {text(release.resource)}: {text(version_changes(release))}"
        f"{' for ' + text(only) if only else ''}. {text(release.reason)}</p>"
    )
    stations = "".join(_station(step) for step in path(release, history.audit))
    yield f'<ol class="way" aria-label="Stages">{stations}</ol>'
    for line in (line for name, one in view.coverage.items() for line in coverage_lines(name, one, now_ns)):
        yield f"<p>Coverage: {text(line)}.</p>"
    if awaited := list(wait_conditions(view)):
        yield f"<p>Waits for {text('; '.join(awaited))}.</p>"
    yield f'<p class="dim">As of {moment(now_ns)[:19]} UTC; started {moment(release.created_ns)[:19]} UTC.</p></header>'


def _station(step: StageStatus) -> str:
    here = ' aria-current="step"' if step.mark == "now" else ""
    said = f" ({step.mark})" if step.mark in ("skipped", "failed") else ""
    return f"<li{here}>{MARKS[step.mark]}{text(step.name)}{said}</li>"


def _arms(view: ReleaseView, history: History) -> Iterator[str]:
    release = view.release
    rest = [one.arm for one in history.assigned[len(history.seen) :]]
    rows = list(arms(release, view.figures, (rest.count("stable"), rest.count("candidate"))))
    heads = ("", f"stable {versions(release, 'stable')}", f"candidate {versions(release, 'candidate')}")
    yield "<h2>Arms</h2>" + table("Figures by arm", heads, rows)
    if (shown := difference(view)) is not None:
        yield f"<p>Candidate less stable: {text(shown)}. It is for display; decisions are made from the e-values.</p>"
    for warning in view.warnings:
        yield f"<p><strong>Warning:</strong> {text(warning)}.</p>"
    if left := left_out(release, view.figures):
        why = "they have seen both versions, or were cancelled"
        said = pluralized(left, release.policy.observation_noun.removesuffix("s"))
        yield f"<p>Left out of all figures: {said}: {why}.</p>"
    if (shown := units(release)) is not None:
        yield f"<p>Units {text(shown)}.</p>"


def _evidence(view: ReleaseView, points: Sequence[EvidencePoint]) -> Iterator[str]:
    if points:
        rows = [
            (one.name, f"{one.value:.4g}", f"{one.limit:g}", "reached" if one.crossed else "", one.follows)
            for one in decision_thresholds(view.release, view.figures)
        ]
        yield "<h2>Limits</h2>" + table("e-values against their limits", ("", "e-value", "limit", "", "then"), rows)


def _chain(entries: Sequence[AuditTrailEntry], release: Release) -> Iterator[str]:
    yield '<h2>What was done, and why</h2><ol class="chain">'
    for before, entry in zip([None, *entries], entries, strict=False):
        yield _link(entry, release, "" if before is None else f", {duration(entry.at_ns - before.at_ns)} later")
    yield "</ol>"


def _link(entry: AuditTrailEntry, release: Release, since: str) -> str:
    who = "by the rules" if entry.who == GATEWAY else f"by {asked_by(entry.who, entry.key)}"
    where = f"<strong>{text(stage_name(entry.after))}</strong>"
    what = (
        f"{where} {text(canary_share(entry, release))}".rstrip()
        + f": {text(entry.action.replace('_', ' '))} {text(who)}"
    )
    at = moment(entry.at_ns)[:19]
    when = f'<time datetime="{at.replace(" ", "T")}Z">{at}</time><span class="dim">{text(since)}</span>'
    return f"<li>{what}, {when}. {text(entry.why)}{_found(entry)}</li>"


def _found(entry: AuditTrailEntry) -> str:
    if not entry.evidence:
        return ""
    figures = dumps(entry.evidence, indent=1, ensure_ascii=False)
    return f"<details><summary>Evidence</summary><pre>{text(figures)}</pre></details>"


# -- its evidence over time ----
#
# The same observations step the same `Canary` as in `gateway.releases.canary.verification`, and its figures are taken
# on the way. So the charts show the evidence that decisions were made from, and nothing is stored to draw them.


MOST = 300
"""Maximum number of points of a series: more cannot be told apart on a page."""


class History(NamedTuple):
    """The audit chain, assignments and outcomes of a release at a certain revision and count."""

    audit: Sequence[AuditTrailEntry]
    assigned: Sequence[Assignment]
    seen: Sequence[AssignmentEvidence]

    @classmethod
    def of(
        cls,
        release: Release,
        audit: Sequence[AuditTrailEntry],
        assigned: Sequence[Assignment],
        seen: Sequence[AssignmentEvidence],
        after: int = 0,
    ) -> History:
        """The part that belongs to this state of the release, if more has been read: each list only ever grows.
        `after`: number of the assignment behind which `assigned` and `seen` begin."""
        until, counted = max(0, release.assigned - after), max(0, release.counted - after)
        return cls(audit[: release.revision], as_of(release, assigned[:until]), seen[:counted])


class EvidencePoint(NamedTuple):
    """The evidence after some rollouts."""

    counted: int
    """Number of the assignment that was counted last."""
    figures: dict[str, float]
    """The figures that decisions read, by name."""
    interval: tuple[float, float] | None
    """Confidence sequence of candidate less stable."""


def evidence_series(release: Release, history: History, most: int = MOST) -> list[EvidencePoint]:
    """The evidence over time, evenly thinned to about `most` points; the last one is always included."""
    canary, points = Canary.of(release), list[EvidencePoint]()
    every = max(1, -(-len(history.seen) // most))
    looks = sum(one.early is not None for one in history.assigned)
    last = 0
    for at, early, _, person in replay_steps(canary, history.assigned, history.seen, history.audit):
        ended = (at, early) == (len(history.seen), looks)
        if not person and (ended or (at > last and at % every == 0)):
            evidence, last = canary.evidence, at
            points.append(EvidencePoint(at, figures(evidence), interval(evidence.latest.reward)))
    return points


def release_charts(
    view: ReleaseView, history: History, points: Sequence[EvidencePoint], now_ns: int
) -> Iterator[Chart]:
    """All charts that can be drawn so far."""
    yield _traffic(view, history, now_ns)
    if points:
        yield _rewards(view, points)
        yield _difference(view, points)
        yield _e_values(view, points)
        yield _guards(view, points)


def _traffic(view: ReleaseView, history: History, now_ns: int) -> Chart:
    splits = [(float(entry.at_ns), share(entry.after, entry.split) * 100) for entry in history.audit]
    end = now_ns if view.release.live else view.release.changed_ns
    if splits and end > splits[-1][0]:
        splits.append((float(end), splits[-1][1]))
    counts = view.release.policy.observation_noun
    now = f"{share(view.release.stage, view.release.split) * 100:g} % of new {counts} get {view.release.candidate} now"
    line = LineSeries(f"candidate {view.release.candidate}", splits, 1, stepped=True)
    within_a_day = not splits or splits[-1][0] - splits[0][0] < 86_400e9
    cut = slice(11, 19) if within_a_day else slice(5, 16)
    return Chart(
        "Traffic", f"Share of new {counts} on the candidate over time. {now}.", [line], "UTC", f"new {counts} on it",
        bounds=(0, 100), tick_x=lambda x: moment(int(x))[cut], tick_y="{:g} %".format,
    )  # fmt: skip


def _rewards(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    lines = [LineSeries(arm, _values(points, f"{arm}.reward"), style) for style, arm in enumerate(ARMS)]
    means = ", ".join(f"{line.name} {line.points[-1][1]:.3f}" for line in lines if line.points)
    return Chart(
        "Reward",
        f"Mean reward of each arm, from 0 to 1. Now: {means or 'none'}.",
        lines,
        f"counted {view.release.policy.observation_noun}",
        "mean reward",
    )


def _difference(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    band = [(float(at), *interval) for at, _, interval in points if interval is not None]
    line = LineSeries("candidate less stable, midpoint", [(x, (low + high) / 2) for x, low, high in band], 1)
    limits = [("no difference", 0.0)]
    if view.release.margin:
        limits.append(("margin", -view.release.margin))
    said = difference(view) or "not known yet"
    return Chart(
        "Difference", f"Candidate less stable with its 95 % confidence sequence. Now: {said}.", [line],
        f"counted {view.release.policy.observation_noun}", "difference of mean reward", band=band, limits=limits,
    )  # fmt: skip


def _e_values(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    found = [*ramp_thresholds(view.release, view.figures)[:2], *_later_harm(view)]
    lines = [
        LineSeries(one.name, _values(points, one.figure), style) for one, style in zip(found, (2, 1, 3), strict=False)
    ]
    limits = [(f"{one.name} {one.follows} at {one.limit:g}", one.limit) for one in found if one.follows != "nothing"]
    said = ", ".join(f"{one.name} {one.value:.3g} of {one.limit:g}" for one in found)
    return Chart(
        "Evidence",
        f"e-values of the reward. Now: {said}.",
        lines,
        f"counted {view.release.policy.observation_noun}",
        "e-value",
        limits=limits,
        log=True,
    )


def _later_harm(view: ReleaseView) -> Iterator[EValueThreshold]:
    where = latest(view.figures)[1]
    if where:
        harm = decision_thresholds(view.release, view.figures)[0]
        yield harm._replace(name=harm.name + where)


def _guards(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    """The guards and one line for the splits, that of the stage that strays most: more lines could not be told
    apart."""
    found = [
        one for one in decision_thresholds(view.release, view.figures) if one.name.startswith(("guard ", "split "))
    ]
    guards = [one for one in found if one.name.startswith("guard ")]
    lines = [LineSeries(one.name, _values(points, one.figure), style) for style, one in enumerate(guards)]
    lines.append(LineSeries("split, the stage that strays most", list(_strays(points)), len(guards)))
    limits = {one.limit: sorted({it.follows for it in found if it.limit == one.limit}) for one in found}
    said = ", ".join(f"{one.name} {one.value:.3g} of {one.limit:g}" for one in found)
    counts = view.release.policy.observation_noun
    return Chart(
        "Guardrails", f"e-values of the guards and of the split. Now: {said}.", lines, f"counted {counts}", "e-value",
        limits=[(f"{' or '.join(follows)} at {limit:g}", limit) for limit, follows in limits.items()], log=True,
    )  # fmt: skip


def _strays(points: Iterable[EvidencePoint]) -> Iterator[tuple[float, float]]:
    for point in points:
        splits = [value for name, value in point.figures.items() if "srm." in name]
        if splits:
            yield float(point.counted), max(splits)


def _values(points: Iterable[EvidencePoint], key: str) -> list[tuple[float, float]]:
    return [(float(point.counted), value) for point in points if (value := point.figures.get(key)) is not None]


# -- a training run: a chart for each metric, with a line for each run ----


HEAD = 44
"""Height of the space above a chart for its title and its lines' names, in a drawing by itself."""
E_VALUE = "/e_value"
"""Suffix of the names of metrics that are e-values: their charts are logarithmic."""
Runs = Mapping[str, Sequence[Curve]]
"""Curves by run; the first run is the one on show, the others are for comparison."""


def run_page(run: Run, curves: Runs, events: Sequence[RunEvent], now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch; `events` newest first."""
    body = [*_page_head(run, now_ns)]
    body += (figure(chart, f"chart{number}") for number, chart in enumerate(run_charts(curves, run.tree)))
    body += _candidates(run)
    body += _events(events)
    body.append(f"<h2>Configuration</h2><pre>{text(json.dumps(run.config, indent=1, ensure_ascii=False))}</pre>")
    return document(f"{run.id}: {run.status}", body)


def _page_head(run: Run, now_ns: int) -> Iterator[str]:
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
            for depth, one in ordered_candidates(run.tree.candidates)
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


def run_charts(runs: Runs, tree: CandidateTree | None = None) -> Iterator[Chart]:
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
