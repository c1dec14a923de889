"""The report on one run or more: figures with their intervals, on a terminal and as a self-contained page of HTML, in
the same words. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.pages import document, panels, table
from penstock.console.views.runs import PromptTest, candidates_table, ordered_candidates, searched
from penstock.console.views.svg import Chart, LineSeries, text
from penstock.console.views.table import Column, Listing, figure, moment, number, plain
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.protocol import means
from penstock.trainer.apo.result import Leak, LineChange, RunResult, changes
from penstock.trainer.apo.search import Racer

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


def verdict(run: RunFigures) -> str:
    """Return what a run has come to, in a sentence."""
    test = None
    if run.before is not None and run.after is not None and run.gain is not None:
        interval = None if run.gain.low is None or run.gain.high is None else (run.gain.low, run.gain.high)
        test = PromptTest(run.before.mean, run.after.mean, len(run.pairs), interval)
    return searched(run.result.candidates, test)


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


def terminal_page(results: Sequence[RunResult]) -> Group:
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
        yield from map(plain, [verdict(run), *_run_sentences(run)])
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


def html_page(results: Sequence[RunResult]) -> str:
    """Return the report as a page, in the style of a release's page."""
    title = results[0].run if len(results) == 1 else f"Prompt optimisation: {len(results):,} runs"
    runs, last = aggregate_figures(results).runs, max(result.ended_ns for result in results)
    lead = [*map(verdict, runs[:1] if len(runs) == 1 else ()), *_sentences(results)]
    body = [STYLE, f"<header><h1>{text(title)}</h1>", *(f'<p class="result">{text(one)}</p>' for one in lead)]
    body.append(f'<p class="dim">Ended {moment(last)[:19]} UTC.</p></header>')
    body.append(table("Runs", [column.name for column in RUNS], map(_row, runs)))
    for place, run in enumerate(runs):
        body += _run_html(run, place, len(runs) == 1)
    return document(title, body)


def _paragraphs(sentences: Iterable[str]) -> Iterator[str]:
    return (f"<p>{text(one)}</p>" for one in sentences)


def _run_html(run: RunFigures, place: int, alone: bool) -> Iterator[str]:
    result = run.result
    yield f"<h2>{text(result.run)}{' (placebo)' if result.placebo else ''}</h2>"
    yield from _paragraphs([verdict(run), *_run_sentences(run)][alone:])
    yield panels(_charts(run), f"run{place}-")
    for name, lines in changes(result).items():
        yield f'<h3>{text(name)}</h3><ol class="diff">{"".join(map(_change_html, lines))}</ol>'
    if result.leaks:
        yield f'<h3 class="warning">Leak test: {len(result.leaks):,} found</h3>'
        leaks = [(one.resource, leak(one), one.line) for one in result.leaks]
        yield table("What stands in new lines and should not", ("text", "found", "line"), leaks, True)
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
        yield table(
            "The worst first", ("task", "key", "before", "after", "rollouts of the winner", "input"), rows, True
        )
    candidates = [
        (f"{'· ' * depth}{one.id}", number(one.mean), f"{one.rollouts:,}", one.state, f"{one.length:,}", one.claim)
        for depth, one in ordered_candidates(result.candidates)
    ]
    heads = ("candidate", "mean", "rollouts", "state", "length", "claim")
    listed = table("Each below the one that it was made from", heads, candidates, True)
    yield f"<details><summary>Candidates: {len(candidates):,}</summary>{listed}</details>"
    yield from _paragraphs(result.published)


def _charts(run: RunFigures) -> Iterator[Chart]:
    if run.before is not None and run.after is not None:
        values = {0.0: run.before, 1.0: run.after}
        ends = {x: (one.low, one.high) for x, one in values.items()}
        # Rewards are between 0 and 1 here, and t knows no bounds.
        spread = {x: (max(0.0, low), min(1.0, high or 0.0)) for x, (low, high) in ends.items() if low is not None}
        line = LineSeries("test", [(x, one.mean) for x, one in values.items()], 1, dots=True, intervals=spread)
        names, said = ("before", "after"), "Mean reward on the tasks that nobody has seen, each with its 95 % interval."
        yield Chart("Test", said, [line], "texts", "mean reward", bounds=(0.0, 1.0), names=names)
    for one in run.result.race:
        if points := wealth(run.result, one.candidate, one.rate):
            said = f"The race of {one.candidate}: {one.pairs:,} tasks, {one.state} at {one.e_value:.3g}."
            line = LineSeries(one.candidate, points, 1, stepped=True)
            limits = [(f"better at {one.needed:g}", one.needed)]
            yield Chart(f"Race of {one.candidate}", said, [line], "tasks", "e-value", limits=limits, log=True)


def _change_html(change: LineChange) -> str:
    tag = {"+": "ins", "-": "del"}.get(change.mark, "span")
    causes = f"<small>from {text(', '.join(change.causes))}</small>" if change.causes else ""
    return f"<li><{tag}>{change.mark} {text(change.line)}</{tag}>{causes}</li>"


# Figures of one run, and of several together, with their intervals. Pure.
#
# Rollouts of one task, and tasks of one key, are alike: a test of 60 tasks of 3 customers has 3 independent units. So
# the unit within a run is the key, with the variance of a mean over clusters (Cameron & Miller, "A practitioner's
# guide to cluster-robust inference", 2015, the correction K / (K - 1)), and over several runs it is the run. Both
# intervals are Student's t with one degree of freedom less than there are units: rewards are bounded, but units are
# often few, and a bootstrap of few units is too narrow.
#
#     mean +- t(0.975, K - 1) * sqrt(K / (K - 1) * sum_k (sum_i in k (x_i - mean))^2) / n
#
# A run whose seed stays has changed nothing: its gain is 0 exactly, its test stays sealed, and it counts. A run whose
# test was left out has no gain, and is counted as untested.

COVERAGE: Final = 0.95


class MeanEstimate(NamedTuple):
    mean: float
    low: float | None
    """None, as is `high`, without an interval: one unit only, or equal values."""
    high: float | None
    units: int


def estimate(values: Sequence[tuple[str, float]], coverage: float = COVERAGE) -> MeanEstimate | None:
    """Return the mean of values and its interval; each value comes with its unit. None without values."""
    if not values:
        return None
    mean = math.fsum(value for _, value in values) / len(values)
    residues: defaultdict[str, float] = defaultdict(float)
    for unit, value in values:
        residues[unit] += value - mean
    units = len(residues)
    spread = math.fsum(residue**2 for residue in residues.values())
    if units < 2 or spread < 1e-12:
        return MeanEstimate(mean, None, None, units)
    error = math.sqrt(units / (units - 1) * spread) / len(values)
    reach = t_quantile((1 + coverage) / 2, units - 1) * error
    return MeanEstimate(mean, mean - reach, mean + reach, units)


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, above the median, by bisection; to 1e-9 of its value."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """Return P(T <= t), t >= 0, for whole degrees of freedom (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for at in range(2 + odd, freedom - 1, 2):
        term *= square * (at - 1) / at
        total += term
    if not odd:
        return (1 + sine * total) / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi


class TaskComparison(NamedTuple):
    task: str
    key: str
    before: float
    after: float
    rollouts: tuple[str, ...]

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class RunFigures:
    result: RunResult
    pairs: Sequence[TaskComparison]
    before: MeanEstimate | None
    after: MeanEstimate | None
    gain: MeanEstimate | None
    """Paired, over the tasks of the test, by key. 0 if the seed stays; None if there was no test."""
    raced: float | None
    """The winner's gain in the race; None without a winner."""

    @property
    def gap(self) -> float | None:
        """Gain in the race less gain on the test: the part of the gain that is due to the choice of the winner."""
        return None if self.raced is None or self.gain is None else self.raced - self.gain.mean

    @property
    def lengths(self) -> tuple[int, int]:
        return self.result.seed.length, (self.result.winner or self.result.seed).length


@dataclass(frozen=True)
class AggregateFigures:
    runs: Sequence[RunFigures]
    gain: MeanEstimate | None
    """Mean gain over runs; of a single run its own."""
    gap: float | None
    better: int
    worse: int
    same: int
    """Runs whose seed stays, or whose winner is just as good on the test."""
    untested: int


def figures(result: RunResult) -> RunFigures:
    winner = result.winner
    if winner is None:
        return RunFigures(result, [], None, None, MeanEstimate(0.0, None, None, 0), None)
    rewards: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for one in result.tests:
        if one.reward is not None:
            rewards[one.candidate, one.task].append(one.reward)
        if one.candidate == winner.id:
            names[one.task].append(one.rollout)
    pairs: list[TaskComparison] = []
    for task in result.tasks:
        both = rewards[result.seed.id, task.id], rewards[winner.id, task.id]
        if all(both):
            before, after = map(_average, both)
            pairs.append(TaskComparison(task.id, task.key, before, after, tuple(names[task.id])))
    return RunFigures(
        result, pairs, before=estimate([(pair.key, pair.before) for pair in pairs]),
        after=estimate([(pair.key, pair.after) for pair in pairs]),
        gain=_within(estimate([(pair.key, pair.gain) for pair in pairs])),
        raced=next((one.gain for one in result.race if one.candidate == winner.id), None),
    )  # fmt: skip


def aggregate_figures(results: Sequence[RunResult]) -> AggregateFigures:
    runs = [figures(result) for result in results]
    known = [(run.result.run, run.gain.mean) for run in runs if run.gain is not None]
    gaps = [run.gap for run in runs if run.gap is not None]
    return AggregateFigures(
        runs, gain=runs[0].gain if len(runs) == 1 else _within(estimate(known)), gap=_average(gaps) if gaps else None,
        better=sum(gain > 0 for _, gain in known), worse=sum(gain < 0 for _, gain in known),
        same=sum(gain == 0 for _, gain in known), untested=len(runs) - len(known),
    )  # fmt: skip


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _within(found: MeanEstimate | None) -> MeanEstimate | None:
    """Return a gain's interval limited to -1 and 1, as all gains are."""
    if found is None or found.low is None or found.high is None:
        return found
    return found._replace(low=max(-1.0, found.low), high=min(1.0, found.high))


def wealth(result: RunResult, candidate: str, rate: float) -> list[tuple[float, float]]:
    """Return (tasks, e-value) of a finalist after each task, computed again: the race keeps the last value only."""
    mean = means(((one.candidate, one.task), one.reward) for one in result.validation)
    again, found = Racer(candidate, len(result.race), rate), list[tuple[float, float]]()
    for task in dict.fromkeys(one.task for one in result.validation):
        mine, theirs = mean.get((candidate, task)), mean.get((result.seed.id, task))
        if mine is not None and theirs is not None:
            again.add(mine - theirs)
            found.append((float(len(found) + 1), again.e_value))
    return found
