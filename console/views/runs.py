"""Training runs for a terminal, and the candidates of those that search. Pure."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.console.views.noun import LimitedSelection, NounRows, NounView, limited
from penstock.console.views.rollouts import pluralized, status
from penstock.console.views.svg import Chart, LineSeries, number_text
from penstock.console.views.table import (
    Column,
    Listing,
    age,
    ago,
    clean,
    duration,
    figure,
    joined,
    moment,
    number,
    plain,
)
from penstock.gateway.model.run import CandidateTree, Curve, Run, RunCandidate, RunEvent, RunHead, RunKind, RunStatus

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

BARS = "▁▂▃▄▅▆▇█"
TREND = 32
"""Number of characters of a sparkline."""
WATCHED = 12
"""Maximum number of candidates that are shown of a run in progress."""
METRICS = (
    Column("metric"), figure("last"), Column("trend", 4), figure("lowest", 2), figure("highest", 3),
    figure("points", 1), figure("not finite", 5),
)  # fmt: skip
SUITE = r"evaluation/([^/]+/)?reward"
"""Names of the metrics that are the mean reward of a held-out suite."""
COLOURS = {"warning": "yellow", "error": "red"}


class RunSelection(LimitedSelection):
    """The options of the list of runs."""

    kind: RunKind | None = None
    """Only those that learn like this: grpo, sft, dpo, apo or custom."""
    status: RunStatus | None = None
    """Only those that stand here: running, silent, succeeded, failed or stopped."""


async def _fetch(client: Client, selection: RunSelection) -> NounRows[RunHead]:
    kind, status = selection.kind, selection.status
    none = "No run matches." if kind or status else "There are no training runs yet; `penstock train` starts one."
    return await limited(selection.limit, lambda most: client.runs(kind, status, most), none)


def _step(run: RunHead) -> str:
    done = "" if run.step is None else f"{run.step:,}"
    return done if run.steps is None else f"{done or 0}/{run.steps:,}"


RUNS = NounView[RunSelection, RunHead](
    "runs",
    RunHead,
    _fetch,
    selection=RunSelection,
    key=lambda one: one.id,
    columns={
        Column("run"): lambda one, _: plain(one.id),
        Column("kind", 6): lambda one, _: one.kind,
        Column("status"): lambda one, _: status(one.status),
        figure("step"): lambda one, _: plain(_step(one)),
        figure("metrics", 1): lambda one, _: plain(len(one.metrics) or ""),
        figure("made", 2): lambda one, _: plain(len(one.made) or ""),
        figure("resumed", 3): lambda one, _: plain(one.resumed or ""),
        figure("age", 5): lambda one, now_ns: plain(age(one.created_ns, now_ns)),
        Column("heard", 4): lambda one, now_ns: ago(one.ended_ns or one.last_seen_ns, now_ns),
        Column("message", 7, narrows="fold", least=24): lambda one, _: plain(one.message or one.name),
    },
    concerns=frozenset({"runs"}),
)


def show(run: Run, curves: Sequence[Curve], events: Sequence[RunEvent], now_ns: int) -> Group:
    """A run with its configuration, metrics and events, to fit a screen or two; `events` newest first."""
    pieces: list[RenderableType] = [_head(run, now_ns), *_facts(run)]
    if run.tree is not None:
        pieces += [Text(), candidates_tree(run.tree)]
    if run.config is not None:
        pieces += [Text("\nconfig", style="dim"), Padding.indent(_json(run), 2)]
    if curves:
        pieces += [Text(), metrics(curves)]
    if events:
        pieces += [Text(), *(event(one) for one in reversed(events))]
    return Group(*pieces)


def watched(run: Run, curves: Sequence[Curve], events: Sequence[RunEvent], now_ns: int) -> Group:
    """A run in progress, with its metrics and events; `events` newest first."""
    pieces: list[RenderableType] = [_head(run, now_ns)]
    if run.steps is not None:
        pieces.append(_progress(run, run.steps, now_ns))
    pieces += _facts(run)
    if run.tree is not None:
        pieces.append(candidates_tree(run.tree, WATCHED))
    return Group(*pieces, metrics(curves), *(event(one) for one in reversed(events)))


def _head(run: RunHead, now_ns: int) -> Text:
    end = run.ended_ns or now_ns
    took = f"{'took' if run.ended_ns else 'for'} {duration(end - run.created_ns)}"
    name = Text(clean(run.id), style="bold")
    return joined(name, run.kind, status(run.status), f"step {_step(run)}" if run.step is not None else "", took)


def _progress(run: RunHead, steps: int, now_ns: int) -> Table:
    done = 0 if run.step is None else min(run.step + 1, steps)
    left = ""
    if done and run.status == "running":
        left = f"{duration((run.last_seen_ns - run.created_ns) * (steps - done) // done)} left at this pace"
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=steps, completed=done, width=40), f"{done / steps:.0%}", left)
    return row


def _facts(run: RunHead) -> Iterator[Text]:
    if run.name:
        yield plain(run.name)
    if run.message:
        yield plain(run.message)
    if run.resumed:
        yield joined(f"resumed {pluralized(run.resumed, 'time')}, the last from step {run.since_step:,}")
    if run.made:
        yield joined("made", ", ".join(f"{clean(made.name)}@{clean(made.version)}" for made in run.made))


def _json(run: Run) -> Text:
    return plain(json.dumps(run.config, indent=2, ensure_ascii=False))


def metrics(curves: Iterable[Curve]) -> Listing:
    """A line for each metric: the last value, its trend, and its range."""
    made = Listing(*METRICS)
    for curve in curves:
        low = min((value for value in curve.low if value is not None), default=None)
        high = max((value for value in curve.high if value is not None), default=None)
        last = number(curve.last) if curve.last is not None or not curve.count else "none"
        figures = (number(low), number(high), f"{curve.count:,}", f"{curve.nulls:,}" if curve.nulls else "")
        made.add_row(plain(curve.metric), last, sparkline(curve.mean), *figures)
    return made


def sparkline(values: Sequence[float | None]) -> str:
    """Values as bars between their lowest and their highest; a space where there is none."""
    finite = [value for value in values if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # Halved first: the difference of two doubles may overflow.
    span = high / 2 - low / 2

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return BARS[round((value / 2 - low / 2) / span * (len(BARS) - 1))] if span else BARS[len(BARS) // 2 - 1]

    return "".join(map(bar, values))


def event(one: RunEvent) -> Text:
    """A run's event on a line."""
    at = Text(moment(one.time_ns or 0)[5:19], style="dim")
    level = Text("" if one.level == "info" else one.level, style=COLOURS.get(one.level, ""))
    return joined(at, "" if one.step is None else f"step {one.step:,}", level, clean(one.text))


def line(run: RunHead, curves: Iterable[Curve]) -> Text:
    """The state of a run on a line, for output that is no terminal."""
    values = (f"{clean(curve.metric)} {number(curve.last) or 'none'}" for curve in curves if curve.count)
    return joined(clean(run.id), status(run.status), f"step {_step(run)}", *values)


# -- what a run has come to, in a sentence: by the figures that the run itself decides from, and by no other test ----


RESULTS = ("evaluation/", "test/", "updates", "rollouts", "reward", "loss", "lessons")
"""Beginnings of the names of metrics that `result` reads."""
Curves = Mapping[str, Curve]


class PromptTest(NamedTuple):
    """The test of a search for prompts, on tasks that nobody has seen."""

    before: float
    """Mean reward of the texts that the search began with."""
    after: float
    """That of the winner."""
    tasks: int
    interval: tuple[float, float] | None
    """95 % of the gain; None without one."""


def result(run: Run, curves: Iterable[Curve]) -> str:
    """A sentence that says whether a run was of use. `curves`: those of `RESULTS`, each point by itself."""
    found = {curve.metric: curve for curve in curves if curve.count}
    if run.kind == "apo":
        said = _searched(run, found)
    elif not found:
        said = "Not enough data yet: it has not reported a step."
    elif run.kind == "grpo":
        said = _trained(found)
    elif run.kind == "custom":
        name = "reward" if "reward" in found else next(iter(found))
        said = _unjudged(found, name, "a custom run does not say what decides")
    else:
        said = _tuned(found)
    ended = run.status not in ("running", "silent")
    return said if ended or said.startswith("Not ") else f"So far, {said[0].lower()}{said[1:]}"


def _values(found: Curves, name: str) -> dict[int, float]:
    """The finite values of a metric by step; empty without any."""
    curve = found.get(name)
    steps = () if curve is None else zip(curve.last_step, curve.mean, strict=True)
    return {step: value for step, value in steps if value is not None}


def _trained(found: Curves) -> str:
    """The best weights are those with the highest mean reward on the first suite, the first of equal ones."""
    updates, name = found.get("updates"), next((name for name in found if re.fullmatch(SUITE, name)), None)
    if updates is not None and not any(updates.mean):
        return f"Nothing was learnt: none of {pluralized(updates.count, 'step')} has updated the weights."
    if name is None:
        return _unjudged(found, "reward", "no tasks are held out ([[evaluate.suite]])")
    rewards, count = _values(found, name), _values(found, f"{name.removesuffix('reward')}tasks")
    if len(rewards) < 2:
        return _unjudged(found, name, "the held-out tasks were evaluated only once")
    (first, before), *_, (last, after) = rewards.items()
    step = max(rewards, key=lambda step: (rewards[step], -step))
    began = "before" if first == 0 else f"after step {first:,}"
    over = f" over {count[last]:,.0f} held-out tasks" if last in count else " on held-out tasks"
    old, best, new = _apart(before, rewards[step], after)
    if step == first:
        how = f"{old} {began} and after" if before == after else f"{old} {began}, {new} after"
        return f"Nothing was learnt: {how}{over}."
    low, high = (_values(found, f"{name}_{end}") for end in ("low", "high"))
    overlap = "; the 95 % intervals overlap" if low.get(step, 1.0) <= high.get(first, 0.0) else ""
    later = "" if rewards[step] == after else f" It was {new} after step {last:,}."
    return f"Step {step:,} was better: {best} against {old} {began}{over}{overlap}.{later}"


def _apart(*values: float) -> list[str]:
    """Values with as many decimals as tell them apart, two at least."""
    shown = ([f"{value:.{digits}f}" for value in values] for digits in range(2, 7))
    return next((found for found in shown if len(set(found)) == len(set(values))), [number_text(v) for v in values])


def _unjudged(found: Curves, name: str, why: str) -> str:
    """The way of a metric that nothing is decided from."""
    values, rollouts = _values(found, name), found.get("rollouts")
    if not values and rollouts is not None:
        count = sum(mean * finite for mean, finite in zip(rollouts.mean, rollouts.finite, strict=True) if mean)
        return f"Not enough data yet: 0 of {count:,.0f} rollouts have a reward."
    places = [*values.items()][:: max(1, len(values) - 1)]
    way = " and ".join(f"{number_text(value)} at step {step:,}" for step, value in places)
    return f"Not known: {why}. {clean(name)}: {way or 'no value'}."


def _tuned(found: Curves) -> str:
    """The weights of the last update are published, whatever the held-out loss."""
    losses, lessons = _values(found, "evaluation/loss"), _values(found, "lessons/held_out")
    if len(losses) < 2:
        why = "the held-out loss is known only once" if losses else "no lessons are held out (data.held_out)"
        return _unjudged(found, "evaluation/loss" if losses else "loss", why)
    (before, *_), (last, after) = losses.values(), [*losses.items()][-1]
    least = min(losses, key=lambda step: (losses[step], step))
    over = f" over {pluralized(int(max(lessons.values())), 'held-out lesson')}" if lessons else ""
    figures = f"the loss{over} was {before:.4g} before and {after:.4g} after step {last:,}"
    if after == before:
        return f"Nothing was learnt: {figures}."
    lowest = f", lowest after step {least:,} ({losses[least]:.4g})" if losses[least] < min(before, after) else ""
    return f"It was {'better' if after < before else 'worse'}: {figures}{lowest}."


def _searched(run: Run, found: Curves) -> str:
    last = {name: curve.last for name, curve in found.items() if curve.last is not None}
    test = None
    if {"test/seed", "test/winner"} <= last.keys():
        low, high = last.get("test/gain_low"), last.get("test/gain_high")
        interval = None if low is None or high is None else (low, high)
        test = PromptTest(last["test/seed"], last["test/winner"], int(last.get("test/tasks", 0)), interval)
    every = [] if run.tree is None else run.tree.candidates
    return searched(every, test, run.status not in ("running", "silent"))


def searched(every: Sequence[RunCandidate], test: PromptTest | None, ended: bool = True) -> str:
    """A sentence that says whether a search found something better: the race decides, and the test measures."""
    winner = next((one for one in every if one.state == "winner"), None)
    best = max((one for one in every if one.pairs), key=lambda one: one.e_value or 0.0, default=None)
    if winner is not None and test is not None:
        over = f" over {pluralized(test.tasks, 'task')}" if test.tasks else " on tasks"
        low, high = test.interval or (0.0, 0.0)
        gain = f"; the 95 % interval of the gain is {low:+.3f} to {high:+.3f}" if test.interval else ""
        gain += ", so it may be chance" if low < 0 < high else ""
        how = "better" if test.after > test.before else "not better, though it had won the race"
        after, before = _apart(test.after, test.before)
        figures = f"{after} against {before}{over} that nobody has seen{gain}"
        return f"Candidate {clean(winner.id)} was {how}: {figures}."
    if winner is not None:
        over = pluralized(winner.pairs, "task")
        return f"Candidate {clean(winner.id)} won the race: {winner.gain or 0:+.3f} over {over}. It was not tested."
    raced = " No candidate was in the race."
    if best is not None:
        figures = f"{best.e_value or 0:.3g} of {best.needed or 0:g} after {pluralized(best.pairs, 'task')}"
        raced = f" The best in the race, {clean(best.id)}, has an e-value of {figures}."
    start = "Nothing was learnt: no candidate was shown to be better, and the texts stay as they are."
    return f"{start if ended else 'Not decided yet.'}{raced}"


# -- candidates ----


TREE = (
    Column("candidate"), figure("mean"), figure("rollouts", 3), Column("state"), figure("gain", 4, ),
    figure("e-value", 5), figure("length", 1), Column("claim", 6, "cut", 16),
)  # fmt: skip
STATE_COLOURS = {"winner": "bold green", "better": "green", "out": "red", "racing": "yellow"}
T = TypeVar("T", bound=RunCandidate)


def ordered_candidates(found: Sequence[T]) -> list[tuple[int, T]]:
    """(depth, candidate), in the order of the tree: below each candidate those that were made from it, finalists and
    the highest mean first. The root comes first; candidates whose parents do not lead to a root come last."""
    if not found:
        return []
    root, names = found[0], {one.id for one in found}
    children: defaultdict[str, list[T]] = defaultdict(list)
    for one in found[1:]:
        children[one.parent if one.parent and one.parent in names else root.id].append(one)

    lines, waiting = list[tuple[int, T]](), [(0, root)]
    while waiting:
        depth, one = waiting.pop()
        lines.append((depth, one))
        # `pop`: of several candidates with one name only the first gets the children, and a cycle ends.
        waiting += [(depth + 1, child) for child in sorted(children.pop(one.id, []), key=_rank)[::-1]]
    return [*lines, *((1, one) for left in children.values() for one in left)]


def _rank(one: RunCandidate) -> tuple[bool, float, int]:
    return one.state == "tried", -(one.mean or 0.0), -one.rollouts


def candidates_table(found: Sequence[tuple[int, RunCandidate]]) -> Listing:
    """A line for each candidate, indented by its depth."""
    made = Listing(*TREE)
    for depth, one in found:
        name = Text(f"{'  ' * (depth - 1)}└ {clean(one.id)}" if depth else clean(one.id))
        value = "" if one.e_value is None else f"{one.e_value:.3g} of {one.needed or 0:g}"
        state = "" if one.state == "tried" else one.state
        made.add_row(
            name, _mean(one), f"{one.rollouts:,}" if one.rollouts else "", plain(state, STATE_COLOURS.get(state, "")),
            "" if one.gain is None else f"{one.gain:+.3f}", value, f"{one.length:,}" if one.length else "",
            plain(one.claim),
        )  # fmt: skip
    return made


def _mean(one: RunCandidate) -> str:
    return "" if one.mean is None else f"{one.mean:.3f}"


def candidates_tree(told: CandidateTree, most: int | None = None) -> RenderableType:
    """The tree, or its first `most` lines, and how many candidates are missing."""
    lines = ordered_candidates(told.candidates)
    shown = lines if most is None else lines[:most]
    missing = told.left_out + len(lines) - len(shown)
    if not missing:
        return candidates_table(shown)
    return Group(candidates_table(shown), Text(f"{missing:,} more candidates are not shown", "dim"))


def candidates_chart(told: CandidateTree) -> Chart | None:
    """The mean of each candidate at the step at which it came, and the best so far; None without means."""
    points = sorted((float(one.step), one.mean) for one in told.candidates if one.mean is not None)
    if not points:
        return None
    best: list[tuple[float, float]] = []
    for step, mean in points:
        best.append((step, max(mean, best[-1][1] if best else mean)))
    said = (
        f"{len(points):,} candidates by the step at which they came. The highest mean is lucky too: only the race says "
        "whether a candidate is better."
    )
    lines = [LineSeries("candidates", points, dots=True), LineSeries("highest so far", best, 1, stepped=True)]
    return Chart("Candidates: mean reward in the search", said, lines, "step", "mean reward")


def needed_e_value(told: CandidateTree | None) -> float | None:
    """The e-value at which a finalist is better; None while nothing races."""
    candidates = told.candidates if told is not None else []
    return next((one.needed for one in candidates if one.needed is not None), None)
