"""Sentences and figures that both reports share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.trainer.apo.report.result import Leak, RunResult
from penstock.trainer.apo.report.statistics import MeanEstimate
from penstock.trainer.apo.report.summary import AggregateFigures, RunFigures

LEAKS: Final = {
    "task": "copied from task {0.where}: {0.found}",
    "reason": "copied from a grader's reason on task {0.where}: {0.found}",
    "grader": "speaks to the grader: {0.found}",
    "slot": "slots: {0.found}",
}
COLUMNS: Final = (
    "run", "before", "after", "gain", "95 %", "gap", "rollouts", "reflections", "tokens", "money", "length",
)  # fmt: skip


def signed(value: float | None) -> str:
    """Return a number as +0.123; empty for None."""
    # A rounded -0.0001 is 0, and has no sign.
    return "" if value is None else f"{round(value, 3) + 0.0:+.3f}"


def value(found: MeanEstimate | None) -> str:
    """Return a mean as 0.123; empty for None."""
    return "" if found is None else f"{found.mean:.3f}"


def interval(found: MeanEstimate | None) -> str:
    """Return an interval as +0.100 to +0.200; empty without one."""
    return "" if found is None or found.low is None else f"{signed(found.low)} to {signed(found.high)}"


def leak(found: Leak) -> str:
    """Return a leak as a clause."""
    return LEAKS[found.kind].format(found)


def row(run: RunFigures) -> list[str]:
    """Return the figures of a run, in the order of `COLUMNS`."""
    used = run.result.used
    before, after = run.lengths
    gain = "" if run.gain is None else signed(run.gain.mean)
    return [
        run.result.run,
        value(run.before),
        value(run.after),
        gain if run.result.winner is not None else "stays",
        interval(run.gain),
        signed(run.gap),
        f"{sum(used.rollouts.values()):,}",
        f"{used.reflections:,}",
        f"{used.tokens:,}",
        f"{used.money:.2f}" if used.money else "",
        f"{before:,} → {after:,}" if before != after else f"{after:,}",
    ]


def run_sentences(run: RunFigures) -> Iterator[str]:
    """Yield the results of a run, in sentences."""
    result = run.result
    yield f"{result.engine}, seed {result.draw}: {result.why}."
    if result.winner is None:
        yield "The texts stay as they are, and the test stays sealed."
    elif run.gain is None:
        yield "The test was left out (test.repeats), or none of its rollouts has a reward: the gain is not known."
    else:
        yield f"Test, {_sampled(run)}: {value(run.before)} before, {value(run.after)} after. {_gained(run.gain)}"
        yield f"In the race the gain was {signed(run.raced)}; validation − test: {signed(run.gap)}."
    yield _spent(result)
    before, after = run.lengths
    yield f"Length of the texts: {before:,} characters before, {after:,} after."


def _sampled(run: RunFigures) -> str:
    rollouts = len([one for one in run.result.tests if one.reward is not None])
    keys = len({pair.key for pair in run.pairs})
    kept = "each by itself" if keys == len(run.pairs) else f"of {keys:,} keys"
    return f"{rollouts:,} rollouts on {len(run.pairs):,} tasks {kept} that nobody has seen"


def _gained(gain: MeanEstimate) -> str:
    if gain.low is None:
        return f"The gain is {signed(gain.mean)}; there are too few keys, or they are too alike, for an interval."
    return f"The gain is {signed(gain.mean)}, 95 % {interval(gain)} (t over {gain.units:,} keys, paired by task)."


def _spent(result: RunResult) -> str:
    used = result.used
    by_mode = ", ".join(
        f"{count:,} {name}"
        for name, count in zip(("search", "race", "test"), (used.rollouts.get(mode, 0) for mode in MODES), strict=True)
    )
    money = f", {used.money:.2f} of money" if used.money else ""
    return (
        f"Used: {sum(used.rollouts.values()):,} rollouts ({by_mode}); {used.reflections:,} reflections, "
        f"{used.tokens:,} tokens{money}."
    )


MODES: Final = ("train", "val", "test")


def aggregate_sentences(found: AggregateFigures, placebo: bool) -> Iterator[str]:
    """Yield the results of several runs, in sentences."""
    count = len(found.runs)
    if placebo:
        released = sum(run.result.winner is not None for run in found.runs)
        yield f"Placebo, with feedback that says nothing: {released:,} of {count:,} runs found something better."
    if found.gain is not None and count > 1:
        over = f"95 % {interval(found.gain)} (t over {found.gain.units:,} runs)" if found.gain.low is not None else ""
        yield f"Gain on the test: {signed(found.gain.mean)}, {over or 'runs are too alike for an interval'}."
    if count > 1:
        yield f"Better than the start: {found.better:,} of {count:,}; worse: {found.worse:,}; the same: {found.same:,}."
    if found.untested:
        yield f"Without a test: {found.untested:,}; these are in no figure of the test."
    if found.gap is not None and count > 1:
        yield f"Validation − test: {signed(found.gap)} on average."


def placebos(results: Sequence[RunResult]) -> tuple[list[RunResult], list[RunResult]]:
    """Return (results without a placebo, results with one)."""
    return [one for one in results if not one.placebo], [one for one in results if one.placebo]
