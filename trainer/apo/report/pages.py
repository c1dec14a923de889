"""The report on one run or more, for a terminal and as a self-contained page of HTML, in the same words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.pages import document, table
from penstock.console.views.pages import figure as html_figure
from penstock.console.views.runs import candidates_table, ordered_candidates
from penstock.console.views.svg import Chart, LineSeries, text
from penstock.console.views.table import Column, Listing, figure, moment, number, plain
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.report.figures import MeanEstimate, RunFigures, TaskComparison, aggregate_figures, wealth
from penstock.trainer.apo.report.result import Leak, LineChange, RunResult, changes

LEAKS: Final = {
    "task": "copied from task {0.where}: {0.found}",
    "reason": "copied from a grader's reason on task {0.where}: {0.found}",
    "grader": "speaks to the grader: {0.found}",
    "slot": "slots: {0.found}",
}
MODES: Final[dict[Mode, str]] = {"train": "search", "val": "race", "test": "test"}
RUNS: Final = (
    Column("run"), figure("before", 4), figure("after", 4), figure("gain"), figure("95 %"), figure("gap", 5),
    figure("rollouts", 3), figure("reflections", 2), figure("tokens", 2), figure("money", 2), figure("length", 1),
)  # fmt: skip
WORSE: Final = (Column("task"), Column("key", 2), figure("before"), figure("after"), Column("rollouts", 1, "cut", 24))
MOST: Final = 12
"""Most rows of the tree and of the worse tasks on a terminal; the page has all."""
NAMED: Final = 2
"""Most rollouts beside a line on a terminal; the page has all."""
STYLE: Final = """<style>
.diff { font: 13px/1.5 ui-monospace, monospace; list-style: none; padding: 0; white-space: pre-wrap; }
.diff ins { color: var(--c3); text-decoration: none; } .diff del { color: var(--limit); text-decoration: none; }
.diff small { display: block; padding-left: 2rem; color: var(--dim); } .warning { color: var(--limit); }
td:last-child { text-align: left; }
</style>"""


def signed(value: float | None) -> str:
    """Return a number as +0.123; empty for None."""
    # A rounded -0.0001 is 0, and has no sign.
    return "" if value is None else f"{round(value, 3) + 0.0:+.3f}"


def _mean(found: MeanEstimate | None) -> str:
    return "" if found is None else f"{found.mean:.3f}"


def _interval(found: MeanEstimate | None) -> str:
    return "" if found is None or found.low is None else f"{signed(found.low)} to {signed(found.high)}"


def leak(found: Leak) -> str:
    return LEAKS[found.kind].format(found)


def _row(run: RunFigures) -> list[str]:
    used, (before, after) = run.result.used, run.lengths
    gain = "" if run.gain is None else signed(run.gain.mean)
    return [
        run.result.run, _mean(run.before), _mean(run.after), gain if run.result.winner is not None else "stays",
        _interval(run.gain), signed(run.gap), f"{sum(used.rollouts.values()):,}", f"{used.reflections:,}",
        f"{used.tokens:,}", f"{used.money:.2f}" if used.money else "",
        f"{before:,} → {after:,}" if before != after else f"{after:,}",
    ]  # fmt: skip


def _run_sentences(run: RunFigures) -> Iterator[str]:
    result, used, gain = run.result, run.result.used, run.gain
    yield f"{result.engine}, seed {result.draw}: {result.why}."
    if result.winner is None:
        yield "The texts stay as they are, and the test stays sealed."
    elif gain is None:
        yield "The test was left out (test.repeats), or none of its rollouts has a reward: the gain is not known."
    else:
        rollouts = len([one for one in result.tests if one.reward is not None])
        keys = len({pair.key for pair in run.pairs})
        kept = "each by itself" if keys == len(run.pairs) else f"of {keys:,} keys"
        said = "; there are too few keys, or they are too alike, for an interval."
        if gain.low is not None:
            said = f", 95 % {_interval(gain)} (t over {gain.units:,} keys, paired by task)."
        yield (
            f"Test, {rollouts:,} rollouts on {len(run.pairs):,} tasks {kept} that nobody has seen: {_mean(run.before)} "
            f"before, {_mean(run.after)} after. The gain is {signed(gain.mean)}{said}"
        )
        yield f"In the race the gain was {signed(run.raced)}; validation − test: {signed(run.gap)}."
    by_mode = ", ".join(f"{used.rollouts.get(mode, 0):,} {name}" for mode, name in MODES.items())
    money = f", {used.money:.2f} of money" if used.money else ""
    yield (
        f"Used: {sum(used.rollouts.values()):,} rollouts ({by_mode}); {used.reflections:,} reflections, "
        f"{used.tokens:,} tokens{money}."
    )
    before, after = run.lengths
    yield f"Length of the texts: {before:,} characters before, {after:,} after."


def _sentences(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield what several runs have come to; those with a placebo apart."""
    for placebo in (False, True):
        group = [one for one in results if one.placebo == placebo]
        if not group:
            continue
        found, count = aggregate_figures(group), len(group)
        if placebo:
            released = sum(one.winner is not None for one in group)
            yield f"Placebo, with feedback that says nothing: {released:,} of {count:,} runs found something better."
        if found.gain is not None and count > 1:
            over = f"95 % {_interval(found.gain)} (t over {found.gain.units:,} runs)"
            said = over if found.gain.low is not None else "runs are too alike for an interval"
            yield f"Gain on the test: {signed(found.gain.mean)}, {said}."
        if count > 1:
            figures = f"{found.better:,} of {count:,}; worse: {found.worse:,}; the same: {found.same:,}"
            yield f"Better than the start: {figures}."
        if found.untested:
            yield f"Without a test: {found.untested:,}; these are in no figure of the test."
        if found.gap is not None and count > 1:
            yield f"Validation − test: {signed(found.gap)} on average."


def _worse(run: RunFigures) -> tuple[str, list[TaskComparison]]:
    worse = sorted((pair for pair in run.pairs if pair.gain < 0), key=lambda pair: pair.gain)
    return f"Tasks of the test that got worse: {len(worse):,} of {len(run.pairs):,}", worse


def report(results: Sequence[RunResult]) -> Group:
    runs, alone, pieces = aggregate_figures(results).runs, len(results) == 1, list[RenderableType]()
    if not alone:
        made = Listing(*RUNS)
        for run in runs:
            made.add_row(*map(plain, _row(run)))
        pieces += [made, Text()]
    pieces += map(plain, _sentences(results))
    for run in runs:
        pieces += [*([Text()] if pieces else []), *_run_pieces(run, alone)]
    return Group(*pieces)


def _run_pieces(run: RunFigures, alone: bool) -> Iterator[RenderableType]:
    """Yield everything about a run; if it is one of several, only its changes and leaks."""
    result = run.result
    yield Text.assemble(plain(result.run, "bold"), "  placebo" if result.placebo else "")
    if alone:
        yield from map(plain, _run_sentences(run))
    elif result.winner is None:
        yield Text("The texts stay as they are.")
    for name, lines in changes(result).items():
        yield plain(f"\n{name}", "dim")
        yield from map(_change_text, lines)
    if result.winner is not None:
        told = f"\nLeak test: {len(result.leaks):,} found."
        yield Text(told, "bold yellow") if result.leaks else Text("\nLeak test: nothing was found.")
    for one in result.leaks:
        yield plain(f"  {one.resource}: {leak(one)}", "yellow")
        yield Padding.indent(plain(one.line), 4)
    if not alone:
        return
    heading, worse = _worse(run)
    if run.pairs:
        yield Text(f"\n{heading}.")
    if worse:
        made = Listing(*WORSE)
        for one in worse[:MOST]:
            made.add_row(one.task, plain(one.key), f"{one.before:.3f}", f"{one.after:.3f}", " ".join(one.rollouts))
        yield made
    found = ordered_candidates(result.candidates)
    yield Text(f"\nCandidates: {len(found):,}{f', of which {MOST} are shown' if len(found) > MOST else ''}.")
    yield candidates_table(found[:MOST])
    yield from map(plain, result.published)


def _change_text(change: LineChange) -> Text:
    more = len(change.causes) - NAMED
    said = ", ".join(change.causes[:NAMED]) + (f" and {more:,} more" if more > 0 else "")
    line = plain(f"{change.mark} {change.line}", {"-": "red", "+": "green"}.get(change.mark, ""))
    return Text("\n").join([line, plain(f"    from {said}", "dim")]) if said else line


def page(results: Sequence[RunResult]) -> str:
    """Return the report as a page, in the style of a release's page."""
    title = f"Prompt optimisation: {len(results):,} runs"
    if len(results) == 1:
        winner = results[0].winner
        title = f"{results[0].run}: {'the seed stays' if winner is None else f'{winner.id} is better'}"
    runs, last = aggregate_figures(results).runs, max(result.ended_ns for result in results)
    body = [STYLE, f"<header><h1>{text(title)}</h1>", f'<p class="dim">Ended {moment(last)[:19]} UTC.</p></header>']
    body.append(table("Runs", [column.name for column in RUNS], map(_row, runs)))
    body += _paragraphs(_sentences(results))
    for place, run in enumerate(runs):
        body += _run_html(run, place)
    return document(title, body)


def _paragraphs(sentences: Iterable[str]) -> Iterator[str]:
    return (f"<p>{text(one)}</p>" for one in sentences)


def _run_html(run: RunFigures, place: int) -> Iterator[str]:
    result = run.result
    yield f"<h2>{text(result.run)}{' (placebo)' if result.placebo else ''}</h2>"
    yield from _paragraphs(_run_sentences(run))
    for name, lines in changes(result).items():
        yield f'<h3>{text(name)}</h3><ol class="diff">{"".join(map(_change_html, lines))}</ol>'
    if result.leaks:
        yield f'<h3 class="warning">Leak test: {len(result.leaks):,} found</h3>'
        leaks = [(one.resource, leak(one), one.line) for one in result.leaks]
        yield table("What stands in new lines and should not", ("text", "found", "line"), leaks)
    elif result.winner is not None:
        yield "<p>Leak test: nothing was found.</p>"
    heading, worse = _worse(run)
    if run.pairs:
        yield f"<h3>{heading}</h3>"
    if worse:
        inputs = {task.id: task.input for task in result.tasks}
        rows = [
            (one.task, one.key, f"{one.before:.3f}", f"{one.after:.3f}", " ".join(one.rollouts), inputs[one.task])
            for one in worse
        ]
        yield table("The worst first", ("task", "key", "before", "after", "rollouts of the winner", "input"), rows)
    for at, one in enumerate(result.race):
        if len(points := wealth(result, one.candidate, one.rate)) > 1:
            said = f"The race of {one.candidate}: {one.pairs:,} tasks, {one.state} at {one.e_value:.3g}."
            line = LineSeries(one.candidate, points, 1, stepped=True)
            limits = [(f"better at {one.needed:g}", one.needed)]
            chart = Chart(f"Race of {one.candidate}", said, [line], "tasks", "e-value", limits=limits, log=True)
            yield html_figure(chart, f"race{place}-{at}")
    candidates = [
        (f"{'· ' * depth}{one.id}", number(one.mean), f"{one.rollouts:,}", one.state, f"{one.length:,}", one.claim)
        for depth, one in ordered_candidates(result.candidates)
    ]
    heads = ("candidate", "mean", "rollouts", "state", "length", "claim")
    listed = table("Each below the one that it was made from", heads, candidates)
    yield f"<details><summary>Candidates: {len(candidates):,}</summary>{listed}</details>"
    yield from _paragraphs(result.published)


def _change_html(change: LineChange) -> str:
    tag = {"+": "ins", "-": "del"}.get(change.mark, "span")
    causes = f"<small>from {text(', '.join(change.causes))}</small>" if change.causes else ""
    return f"<li><{tag}>{change.mark} {text(change.line)}</{tag}>{causes}</li>"
