"""A release and a training run, each as one page of HTML. Pure.

A page opens with its result in a sentence. It is self-contained: it has no script and loads nothing, and its own policy
forbids both. It follows light and dark, and fits a phone. It can be read by people who do not see it (titles,
descriptions, and a table for each chart), and every foreign text is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from json import dumps
from textwrap import wrap
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
    mean_difference,
    path,
    ramp_thresholds,
    release_result,
    share,
    stage_name,
    units,
    version_changes,
    versions,
    wait_conditions,
)
from penstock.console.views.runs import candidates_chart, needed_e_value, ordered_candidates
from penstock.console.views.svg import (
    DARK,
    HEIGHT,
    LIGHT,
    STYLE,
    WIDTH,
    Chart,
    LineSeries,
    drawn,
    keys,
    legend,
    number_text,
    painted,
    shortened,
    svg,
    text,
    thinned,
)
from penstock.console.views.table import asked_by, duration, moment, number
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry, Release, ReleaseView
from penstock.gateway.model.run import CandidateTree, Curve, Run, RunEvent
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.canary.decision import Canary, figures, interval, replay_steps
from penstock.gateway.releases.canary.outcomes import as_of

ROWS = 24
"""Maximum number of rows of a chart's table."""
HEAD_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 76rem;
  margin: 0 auto; padding: 1rem clamp(.8rem, 3vw, 1.5rem); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } h3 { font-size: 1rem; margin: 0; }
.result { font-size: 1.2rem; margin: .6rem 0; } figure { margin: 0; min-width: 0; } figure p { margin: 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.2rem 1.5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); }
th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--rule); font-weight: normal;
  overflow-wrap: normal; }
th:first-child, .said :last-child { text-align: left; } th:first-child { white-space: nowrap; }
.said td:last-child { min-width: 12rem; }
ol.way { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
.way [aria-current] { font-weight: bold; text-decoration: underline; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0; }
svg { width: 100%; height: auto; } svg.key { width: 34px; height: 10px; margin-right: .4rem; }
.at rect { fill: transparent; } .at > g { visibility: hidden; pointer-events: none; }
svg text { paint-order: stroke; stroke: var(--back); stroke-width: 3px; }
.at:hover > g { visibility: visible; } .at g rect { fill: var(--back); stroke: var(--rule); }
ol.chain > li { margin: .6rem 0; } pre { white-space: pre-wrap; } summary { cursor: pointer; color: var(--dim); }
"""


def _variables(colours: Mapping[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in colours.items())} }}"


PAGE_STYLE = (
    f":root {{ color-scheme: light dark; }} {_variables(LIGHT)}\n"
    f"@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}{HEAD_STYLE}{STYLE.lstrip()}"
)


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A complete page in this style and more `style`; `body` is HTML, the title is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{PAGE_STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def panels(charts: Iterable[Chart], name: str = "chart") -> str:
    """Charts as HTML, beside each other where there is room; `name` makes their ids unique on the page."""
    return f'<div class="panels">{"".join(_figure(one, f"{name}{at}") for at, one in enumerate(charts))}</div>'


def _figure(chart: Chart, name: str) -> str:
    rows = thinned(sorted({x for line in chart.lines for x, _ in line.points}), ROWS)
    columns = [{x: line.said(x, y) for x, y in line.points} for line in chart.lines]
    cells = [[chart.place(x), *(column.get(x, "") for column in columns)] for x in rows]
    numbers = table(chart.title, [chart.x, *(line.name for line in chart.lines)], cells)
    return (
        f"<figure><figcaption><h3>{text(chart.title)}</h3>{legend(chart)}</figcaption>{svg(chart, name)}"
        f'<p class="dim">{text(chart.description)}</p>'
        f"<details><summary>{text(chart.title)} as a table</summary>{numbers}</details></figure>"
    )


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], sentences: bool = False) -> str:
    """Rows of texts as an HTML table; the first cell of each row is its heading. `sentences`: the last column has words
    and no figures."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in heads)
    lines = (
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    kind = ' class="said"' if sentences else ""
    return (
        f'<div class="scroll"><table{kind}><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


# -- a release: its state, the evidence for its decisions, and their reasons ----


MARKS = {"done": "✓ ", "skipped": "– ", "failed": "✗ ", "now": "▶ ", "ahead": ""}


def release_page(view: ReleaseView, history: History, now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch."""
    release, points = view.release, evidence_series(view.release, history)
    if points:
        view = view.model_copy(update={"figures": points[-1].figures, "interval": points[-1].interval})
    body = [*_head(view, history, now_ns), *_arms(view, history)]
    body += ["<h2>Over time</h2>", panels(release_charts(view, history, points, now_ns))]
    body += _evidence(view, points)
    body += _chain(history.audit, release)
    return document(f"{release.id}: {stage_name(release.stage)}", body)


def _head(view: ReleaseView, history: History, now_ns: int) -> Iterator[str]:
    release = view.release
    only = audience(release.only)
    yield f"<header><h1>{text(release.id)}: {text(stage_name(release.stage))}</h1>"
    yield f'<p class="result">{text(release_result(view))}</p>'
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
    return Chart(
        "Traffic", f"Share of new {counts} on the candidate over time. {now}.", [line], "UTC", f"new {counts} on it",
        bounds=(0, 100), axis="time", unit=" %",
    )  # fmt: skip


def _rewards(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    lines = [LineSeries(arm, _values(points, f"{arm}.reward"), style) for style, arm in enumerate(ARMS)]
    means = ", ".join(f"{line.name} {line.points[-1][1]:.3f}" for line in lines if line.points)
    level = len({y for line in lines for _, y in line.points}) == 1
    return Chart(
        "Reward",
        f"Mean reward of each arm, from 0 to 1. Now: {means or 'none'}.",
        lines,
        f"counted {view.release.policy.observation_noun}",
        "mean reward",
        bounds=(0, 1) if level else None,
    )


def _difference(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    band = [(float(at), *interval) for at, _, interval in points if interval is not None]
    means = [(float(one.counted), mean_difference(one.figures)) for one in points]
    line = LineSeries("candidate less stable", [(x, y) for x, y in means if y is not None], 1)
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


GROUPS = {
    "Result": ("evaluation/", "eval/", "val/", "test/", "race/", "cells/", "reward", "best/", "seed/"),
    "Learning": (),
    "Rollouts and samples": (
        "rollouts", "groups/", "samples", "updates", "staleness", "dropped/", "left_out/", "calls/", "failed",
        "lessons", "curriculum/", "tokens_per_rollout", "sampled_otherwise",
    ),
    "Time": ("seconds/", "tokens_per_second"),
}  # fmt: skip
"""Beginnings of the names of metrics, by the group that they are drawn in; all others are of `OTHERS`."""
OTHERS, COUNTS = "Learning", "Rollouts and samples"
ENDS = ("_low", "_high")
"""Ends of the names of metrics that are the bounds of another one's interval."""
PARTNERS = {"test/winner": "test/seed", "best/reward": "seed/reward"}
"""Metrics that are levels in the chart of another one."""
E_VALUE = "/e_value"
"""Suffix of the names of metrics that are e-values: their charts are logarithmic."""
Runs = Mapping[str, Sequence[Curve]]
"""Curves by run; the first run is the one on show, the others are for comparison."""


def run_page(run: Run, result: str, curves: Runs, events: Sequence[RunEvent], now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch. `result`: what the run has come to, in a sentence;
    `events` newest first."""
    body = [f'<header><h1>{text(run.id)}: {text(run.status)}</h1><p class="result">{text(result)}</p></header>']
    for group, charts in run_charts(curves, run.tree).items():
        body += [f"<h2>{group}</h2>", panels(charts, f"{group.split()[0]}-")]
    body += [*_facts(run, now_ns), *_candidates(run), *_events(events)]
    body.append(f"<h2>Configuration</h2><pre>{text(json.dumps(run.config, indent=1, ensure_ascii=False))}</pre>")
    return document(f"{run.id}: {run.status}", body)


def _facts(run: Run, now_ns: int) -> Iterator[str]:
    yield f"<h2>The run</h2><p>{text(f'{run.kind} {run.name}'.strip())}. {text(run.message or '')}</p>"
    planned = "" if run.steps is None else f" of {run.steps:,}"
    rows = [
        ("step", "none yet" if run.step is None else f"{run.step:,}{planned}"),
        ("started", f"{moment(run.created_ns)[:19]} UTC"),
        ("took" if run.ended_ns else "runs for", duration((run.ended_ns or now_ns) - run.created_ns)),
        ("resumed", f"{run.resumed:,} times"),
        ("made", ", ".join(f"{made.name}@{made.version}" for made in run.made) or "nothing yet"),
    ]
    yield table(f"As of {moment(now_ns)[:19]} UTC", ("", ""), rows)


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
        yield "<h2>Candidates</h2>" + table(f"Each below the one that it was made from{missing}", heads, rows, True)


def _events(events: Sequence[RunEvent]) -> Iterator[str]:
    if events:
        rows = [
            (moment(event.time_ns or 0)[:19], "" if event.step is None else f"{event.step:,}", event.level, event.text)
            for event in events
        ]
        yield "<h2>Events</h2>" + table("The newest first", ("when (UTC)", "step", "level", "what"), rows, True)


def run_charts(runs: Runs, tree: CandidateTree | None = None) -> dict[str, list[Chart]]:
    """Charts by group, the result first: one for each metric that any of the runs has points of, and the candidates of
    a run that searches. The bounds of a metric's interval (`NAME_low`, `NAME_high`) are drawn with it."""
    groups: dict[str, list[Chart]] = {name: [] for name in GROUPS}
    found = {name: {curve.metric: curve for curve in curves if curve.count} for name, curves in runs.items()}
    every = dict.fromkeys(metric for curves in found.values() for metric in curves)
    drawn_with = {metric + end for metric in every for end in ENDS if metric + end in every}
    drawn_with |= {partner for metric, partner in PARTNERS.items() if metric in every}
    limits = [] if (bound := needed_e_value(tree)) is None else [(f"better at {bound:g}", bound)]
    for metric in sorted((metric for metric in every if metric not in drawn_with), key=_rank):
        chart = _chart(metric, {name: curves for name, curves in found.items() if metric in curves})
        groups[_group(metric)].append(replace(chart, log=True, limits=limits) if metric.endswith(E_VALUE) else chart)
    if tree is not None and (candidates := candidates_chart(tree)) is not None:
        groups["Result"].append(candidates)
    return {name: charts for name, charts in groups.items() if charts}


def _rank(metric: str) -> int:
    starts = GROUPS["Result"]
    return next((at for at, start in enumerate(starts) if metric.startswith(start)), len(starts))


def _group(metric: str) -> str:
    if metric.endswith("/tasks"):
        return COUNTS
    return next((name for name, starts in GROUPS.items() if metric.startswith(starts)), OTHERS)


def _chart(metric: str, runs: Mapping[str, Mapping[str, Curve]]) -> Chart:
    curves = {name: found[metric] for name, found in runs.items()}
    lines = [
        LineSeries(name, _means(found[metric]), style, intervals=_intervals(metric, found))
        for style, (name, found) in enumerate(runs.items(), 1)
    ]
    first, partner = next(iter(curves.values())), PARTNERS.get(metric, "")
    of = " of {}" if len(curves) > 1 else ""
    levels = {partner + of.format(name): found[partner].last for name, found in runs.items() if partner in found}
    limits = [(f"{name}: {number_text(level)}", level) for name, level in levels.items() if level is not None]
    said = " ".join(f"{name}: {_said(curve)}" if len(curves) > 1 else _said(curve) for name, curve in curves.items())
    # Lines are drawn across values that are not finite, so the title gives their number.
    nulls = sum(curve.nulls for curve in curves.values())
    title = f"{metric} ({nulls:,} not finite)" if nulls else metric
    return Chart(title, said, lines, "step", band=[] if first.exact else list(_band(first)), limits=limits)


def _middle(curve: Curve) -> Iterator[float]:
    return ((low + high) / 2 for low, high in zip(curve.first_step, curve.last_step, strict=True))


def _means(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(_middle(curve), curve.mean, strict=True) if y is not None]


def _intervals(metric: str, found: Mapping[str, Curve]) -> dict[float, tuple[float, float]]:
    low, high = (dict(_means(found[metric + end])) if metric + end in found else {} for end in ENDS)
    return {x: (y, high[x]) for x, y in low.items() if x in high}


def _band(curve: Curve) -> Iterator[tuple[float, float, float]]:
    for x, low, high in zip(_middle(curve), curve.low, curve.high, strict=True):
        if low is not None and high is not None:
            yield x, low, high


def _said(curve: Curve) -> str:
    """A curve in words: its last value, range and points."""
    now = "no finite number" if curve.last is None else number_text(curve.last)
    finite = [value for value in (*curve.low, *curve.high) if value is not None]
    several = f" ({curve.count:,} points, {number_text(min(finite))} to {number_text(max(finite))})" if finite else ""
    means = "" if curve.exact else " Drawn are means of buckets; the band is what they lie between."
    return f"{now} at step {curve.last_step[-1]:,}{several if curve.count > 1 else ''}.{means}"


# -- charts as one file ----


TITLE = 15
"""Size of the letters of a drawing's heading, whose lines are 1.4 times as high."""


def drawing(groups: Mapping[str, Sequence[Chart]], heading: str = "", across: int = 2) -> str:
    """Charts as one SVG file, `across` beside each other, a group below the other; an empty name of a group is not
    shown. Its colours are no variables, which many viewers do not know."""
    every = [chart for charts in groups.values() for chart in charts]
    wide, head = WIDTH * min(across, max(map(len, groups.values()))), 24 + 15 * max(len(keys(one)) for one in every)
    lines = wrap(heading, int(wide / TITLE * 1.9))
    parts = [f'<text class="title" x="10" y="{22 + 21 * at}">{text(one)}</text>' for at, one in enumerate(lines)]
    y = 8 + 21 * len(lines)
    for name, charts in groups.items():
        if name:
            y += 34
            parts.append(f'<text class="group" x="10" y="{y - 10}">{text(name)}</text>')
        for at, chart in enumerate(charts):
            place = f"translate({at % across * WIDTH} {y + at // across * (head + HEIGHT)})"
            title = f'<text class="group" x="10" y="16">{text(shortened(chart.title, WIDTH // 8))}</text>'
            rows = (f'<g transform="translate(0 {34 + 15 * at})">{row}</g>' for at, row in enumerate(keys(chart)))
            said = f"<title>{text(chart.title)}</title><desc>{text(chart.description)}</desc>"
            parts.append(f'<g transform="{place}" role="img">{said}{title}{"".join(rows)}')
            parts.append(f'<g transform="translate(0 {head})">{drawn(chart)}</g></g>')
        y += -(-len(charts) // across) * (head + HEIGHT)
    style = f".back {{ fill: var(--back); }} .title, .group {{ fill: var(--text); }}{STYLE}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{y}" viewBox="0 0 {wide} {y}"',
            'font-family="sans-serif">',
            f"<style>.title {{ font-size: {TITLE}px; }} .group {{ font-size: 13px; font-weight: bold; }}",
            f"{painted(style, LIGHT)} @media (prefers-color-scheme: dark) {{ {painted(style, DARK)} }}</style>",
            '<rect class="back" width="100%" height="100%"/>', *parts, "</svg>", "",
        ]
    )  # fmt: skip
