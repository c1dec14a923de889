"""The report for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.candidates import listing, ordered
from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import plain
from penstock.trainer.apo.report import report_text
from penstock.trainer.apo.report.changes import LineChange, changes
from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.report.summary import RunFigures, aggregate_figures

RUNS: Final = (
    Column("run"), figure("before", 4), figure("after", 4), figure("gain"), figure("95 %"), figure("gap", 5),
    figure("rollouts", 3), figure("reflections", 2), figure("tokens", 2), figure("money", 2), figure("length", 1),
)  # fmt: skip
WORSE: Final = (Column("task"), Column("key", 2), figure("before"), figure("after"), Column("rollouts", 1, "cut", 24))
MOST: Final = 12
"""Most rows of the tree and of the worse tasks; the page has all."""
NAMED: Final = 2
"""Most rollouts beside a line; the page has all."""
COLOURS: Final = {"-": "red", "+": "green"}


def report(results: Sequence[RunResult]) -> Group:
    """Return the report on one run or more; runs with a placebo are summed up apart."""
    alone = len(results) == 1
    pieces: list[RenderableType] = [] if alone else list(_runs(results))
    for group, placebo in zip(report_text.placebos(results), (False, True), strict=True):
        if group:
            pieces += map(plain, report_text.aggregate_sentences(aggregate_figures(group), placebo))
    for run in aggregate_figures(results).runs:
        pieces += [*([Text()] if pieces else []), *_one(run, alone)]
    return Group(*pieces)


def _runs(results: Sequence[RunResult]) -> Iterator[RenderableType]:
    made = Listing(*RUNS)
    for run in aggregate_figures(results).runs:
        made.add_row(*map(plain, report_text.row(run)))
    yield from (made, Text())


def _one(run: RunFigures, alone: bool) -> Iterator[RenderableType]:
    """Yield everything about a run; if it is one of several, only its changes and leaks."""
    result = run.result
    yield Text.assemble(plain(result.run, "bold"), "  placebo" if result.placebo else "")
    if alone:
        yield from map(plain, report_text.run_sentences(run))
    elif result.winner is None:
        yield Text("The texts stay as they are.")
    yield from _changes(result)
    yield from _leaks(result)
    if alone:
        yield from _worse(run)
        yield from _tree(result)
        yield from map(plain, result.published)


def _changes(result: RunResult) -> Iterator[Text]:
    for name, lines in changes(result).items():
        yield plain(f"\n{name}", "dim")
        yield from map(_change, lines)


def _change(change: LineChange) -> Text:
    colour = COLOURS.get(change.mark, "")
    more = len(change.causes) - NAMED
    said = ", ".join(change.causes[:NAMED]) + (f" and {more:,} more" if more > 0 else "")
    line = plain(f"{change.mark} {change.line}", colour)
    return Text("\n").join([line, plain(f"    from {said}", "dim")]) if said else line


def _leaks(result: RunResult) -> Iterator[RenderableType]:
    if result.winner is None:
        return
    yield Text()
    if not result.leaks:
        yield Text("Leak test: nothing was found.")
        return
    yield Text(f"Leak test: {len(result.leaks):,} found.", "bold yellow")
    for one in result.leaks:
        yield plain(f"  {one.resource}: {report_text.leak(one)}", "yellow")
        yield Padding.indent(plain(one.line), 4)


def _worse(run: RunFigures) -> Iterator[RenderableType]:
    worse = sorted((pair for pair in run.pairs if pair.gain < 0), key=lambda pair: pair.gain)
    if not run.pairs:
        return
    yield Text(f"\nTasks of the test that got worse: {len(worse):,} of {len(run.pairs):,}.")
    if worse:
        made = Listing(*WORSE)
        for one in worse[:MOST]:
            made.add_row(one.task, plain(one.key), f"{one.before:.3f}", f"{one.after:.3f}", " ".join(one.rollouts))
        yield made


def _tree(result: RunResult) -> Iterator[RenderableType]:
    found = ordered(result.candidates)
    more = f", of which {MOST} are shown" if len(found) > MOST else ""
    yield Text(f"\nCandidates: {len(found):,}{more}.")
    yield listing(found[:MOST])
