"""The report as a self-contained page of HTML, in the style of a release's page. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.console.views.candidates import ordered
from penstock.console.views.release_page import document, figure, table
from penstock.console.views.svg import Chart, LineSeries, text
from penstock.console.views.text import moment, number
from penstock.trainer.apo.gate import Racer
from penstock.trainer.apo.report import report_text
from penstock.trainer.apo.report.changes import LineChange, changes
from penstock.trainer.apo.report.result import FinalistRecord, RunResult
from penstock.trainer.apo.report.summary import RunFigures, aggregate_figures

STYLE: Final = """<style>
.diff { font: 13px/1.5 ui-monospace, monospace; list-style: none; padding: 0; white-space: pre-wrap; }
.diff ins { color: var(--c3); text-decoration: none; } .diff del { color: var(--limit); text-decoration: none; }
.diff small { display: block; padding-left: 2rem; color: var(--dim); } .warning { color: var(--limit); }
td:last-child { text-align: left; }
</style>"""


def page(results: Sequence[RunResult]) -> str:
    """Return the report on one run or more; runs with a placebo are summed up apart."""
    body = [STYLE, f"<header><h1>{text(_title(results))}</h1>"]
    last = max(result.ended_ns for result in results)
    body.append(f'<p class="dim">Ended {moment(last)[:19]} UTC.</p></header>')
    body.append(table("Runs", report_text.COLUMNS, map(report_text.row, aggregate_figures(results).runs)))
    for group, placebo in zip(report_text.placebos(results), (False, True), strict=True):
        if group:
            body += _paragraphs(report_text.aggregate_sentences(aggregate_figures(group), placebo))
    for place, run in enumerate(aggregate_figures(results).runs):
        body += _one(run, place)
    return document(_title(results), body)


def _title(results: Sequence[RunResult]) -> str:
    if len(results) > 1:
        return f"Prompt optimisation: {len(results):,} runs"
    (result,) = results
    return f"{result.run}: {'the seed stays' if result.winner is None else f'{result.winner.id} is better'}"


def _paragraphs(sentences: Iterable[str]) -> Iterator[str]:
    return (f"<p>{text(one)}</p>" for one in sentences)


def _one(run: RunFigures, place: int) -> Iterator[str]:
    result = run.result
    yield f"<h2>{text(result.run)}{' (placebo)' if result.placebo else ''}</h2>"
    yield from _paragraphs(report_text.run_sentences(run))
    yield from _changes(result)
    yield from _leaks(result)
    yield from _worse(run)
    for at, racer in enumerate(result.race):
        if len(points := wealth(result, racer)) > 1:
            yield figure(_race_chart(racer, points), f"race{place}-{at}")
    yield from _tree(result)
    yield from _paragraphs(result.published)


def _changes(result: RunResult) -> Iterator[str]:
    for name, lines in changes(result).items():
        yield f'<h3>{text(name)}</h3><ol class="diff">{"".join(map(_change, lines))}</ol>'


def _change(change: LineChange) -> str:
    tag = {"+": "ins", "-": "del"}.get(change.mark, "span")
    causes = f"<small>from {text(', '.join(change.causes))}</small>" if change.causes else ""
    return f"<li><{tag}>{change.mark} {text(change.line)}</{tag}>{causes}</li>"


def _leaks(result: RunResult) -> Iterator[str]:
    if result.winner is None:
        return
    if not result.leaks:
        yield "<p>Leak test: nothing was found.</p>"
        return
    yield f'<h3 class="warning">Leak test: {len(result.leaks):,} found</h3>'
    rows = [(one.resource, report_text.leak(one), one.line) for one in result.leaks]
    yield table("What stands in new lines and should not", ("text", "found", "line"), rows)


def _worse(run: RunFigures) -> Iterator[str]:
    if not run.pairs:
        return
    worse = sorted((pair for pair in run.pairs if pair.gain < 0), key=lambda pair: pair.gain)
    yield f"<h3>Tasks of the test that got worse: {len(worse):,} of {len(run.pairs):,}</h3>"
    if worse:
        inputs = {task.id: task.input for task in run.result.tasks}
        rows = [
            (one.task, one.key, f"{one.before:.3f}", f"{one.after:.3f}", " ".join(one.rollouts), inputs[one.task])
            for one in worse
        ]
        yield table("The worst first", ("task", "key", "before", "after", "rollouts of the winner", "input"), rows)


def wealth(result: RunResult, racer: FinalistRecord) -> list[tuple[float, float]]:
    """Return (tasks, e-value) of a finalist after each task: computed again, because the race keeps the last value
    only."""
    rewards: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in result.validation:
        if one.reward is not None:
            rewards[one.candidate, one.task].append(one.reward)
    again, found = Racer(racer.candidate, len(result.race), racer.rate), list[tuple[float, float]]()
    for task in dict.fromkeys(one.task for one in result.validation):
        both = rewards[racer.candidate, task], rewards[result.seed.id, task]
        if all(both):
            mine, theirs = (sum(values) / len(values) for values in both)
            again.add(mine - theirs)
            found.append((float(len(found) + 1), again.evidence))
    return found


def _race_chart(racer: FinalistRecord, points: list[tuple[float, float]]) -> Chart:
    said = f"The race of {racer.candidate}: {racer.pairs:,} tasks, {racer.state} at {racer.e_value:.3g}."
    line = LineSeries(racer.candidate, points, 1, stepped=True)
    limits = [(f"better at {racer.needed:g}", racer.needed)]
    return Chart(f"Race of {racer.candidate}", said, [line], "tasks", "e-value", limits=limits, log=True)


def _tree(result: RunResult) -> Iterator[str]:
    rows = [
        (f"{'· ' * depth}{one.id}", number(one.mean), f"{one.rollouts:,}", one.state, f"{one.length:,}", one.claim)
        for depth, one in ordered(result.candidates)
    ]
    heads = ("candidate", "mean", "rollouts", "state", "length", "claim")
    listed = table("Each below the one that it was made from", heads, rows)
    yield f"<details><summary>Candidates: {len(rows):,}</summary>{listed}</details>"
