"""Compares rollouts, tries at one task, versions or runs side by side.

Two rollouts are aligned by their messages: the first row where they differ is marked and selected. Of more than two,
such as the tries at one task, each is a column, and for each failed one the step is shown at which it left those that
succeeded or ended. Versions are compared by their texts and outcomes, runs by their curves and configurations.
"""

from __future__ import annotations

import asyncio
import difflib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from penstock.console.views import resources, rollouts
from penstock.console.views.rollout_tree import (
    StepPair,
    TranscriptStep,
    align_steps,
    differing_words,
    find_divergence,
    steps,
)
from penstock.console.views.runs import sparkline
from penstock.console.views.table import (
    Column,
    Listing,
    abbreviate,
    clean,
    figure,
    joined,
    money,
    number,
    plain,
)
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.model.resource import Resource, ResourceView
from penstock.gateway.model.rollout import UNFAILED, RolloutStatus, RolloutSummary
from penstock.gateway.model.run import Curve, Run
from penstock.gateway.model.turn import Transcript
from penstock.tui.screens.chart import chart, legend
from penstock.tui.screens.runs import json_lines, terminal_curve
from penstock.tui.view import Pane, ScreenView, TableModel, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

MOST: Final = 8
"""The most rollouts that are compared."""
STEPS: Final = 1_000
"""The most steps of each rollout that are compared."""
NEWEST: Final = 200
"""The newest rollouts of a version, over which its mean is taken."""
WIDE: Final = 100
"""The least width at which two texts are shown beside each other; characters."""
SIGNS: Final = {"=": "same", "≠": "differs", "<": "only left", ">": "only right"}


class CompareView(ScreenView[Any, Any]):
    """The base of all comparisons."""

    name = "compare"
    title = "Compare"
    help = "two or more rollouts, versions or runs side by side"
    every_s = 30.0


# -- rollouts ----


@dataclass(frozen=True, slots=True)
class RolloutComparison:
    """Rollouts with the steps of their newest attempts."""

    rollouts: Sequence[RolloutSummary]
    steps: Sequence[Sequence[TranscriptStep]]
    pairs: Sequence[StepPair]
    """The aligned steps, when there are two rollouts."""
    left_out: int = 0
    """Members of the group that are not compared."""
    steps_left_out: int = 0
    """Steps of the longest rollout that are not compared."""

    @property
    def first(self) -> int | None:
        """The index of the first row with a difference; None when there is none."""
        if len(self.rollouts) == 2:
            return next((at for at, pair in enumerate(self.pairs) if pair.sign != "="), None)
        return next((at for at in range(self.rows) if len(set(_said(self, at))) > 1), None)

    @property
    def rows(self) -> int:
        """The number of rows: of pairs for two rollouts, else of the longest rollout's steps."""
        return len(self.pairs) if len(self.rollouts) == 2 else max(map(len, self.steps), default=0)


def _said(data: RolloutComparison, at: int) -> list[str]:
    """The role and text of each rollout at a step; empty if it has no such step."""
    return [f"{one[at].who} {one[at].text}" if at < len(one) else "" for one in data.steps]


class CompareRolloutsView(CompareView):
    """Compares rollouts, given by their ids or by their group."""

    concerns = frozenset({"rollouts"})

    def __init__(self, ids: Sequence[str] = (), group: str | None = None) -> None:
        self._ids, self._group = ids, group

    async def load(self, client: Client) -> RolloutComparison:
        ids, left_out = list(self._ids), 0
        if self._group is not None:
            quoted = self._group.replace("\\", "\\\\").replace('"', '\\"')
            members = (await client.rollout_page(f'group="{quoted}"', 200, None)).rollouts
            # Failed ones first: comparisons are made for them.
            ended = sorted(members, key=lambda row: (row.ended_ns is None, row.status != RolloutStatus.FAILED))
            ids, left_out = [row.id for row in ended[:MOST]], max(0, len(members) - MOST)

        async def transcript(id: str) -> tuple[RolloutSummary, list[TranscriptStep]]:
            summary = await client.rollout(id)
            told: Transcript | None = await client.transcript(id) if summary.attempts else None
            return summary, [] if told is None else steps(told)

        found = await map_concurrently(transcript, ids)
        # Alignment takes time in proportion to the product of the lengths.
        said = [one[:STEPS] for _, one in found]
        pairs = align_steps(said[0], said[1]) if len(said) == 2 else []
        longest = max((len(one) for _, one in found), default=0)
        return RolloutComparison([row for row, _ in found], said, pairs, left_out, max(0, longest - STEPS))

    def head(self, data: RolloutComparison, now_ns: int) -> Text:
        steps = (
            f"{data.steps_left_out:,} steps after the first {STEPS:,} are not compared" if data.steps_left_out else ""
        )
        if len(data.rollouts) == 2:
            left, right = data.rollouts
            return joined(_short(left), Text("against", style="dim"), _short(right), *_deltas(left, right), steps)
        good, quiet = (
            sum(row.status == one for row in data.rollouts) for one in (RolloutStatus.SUCCEEDED, RolloutStatus.ENDED)
        )
        more = f"{data.left_out:,} more tries are not compared" if data.left_out else ""
        ended = f"{quiet} ended, nobody said how" if quiet else ""
        return joined(f"{good} of {len(data.rollouts)} succeeded", ended, more, steps)

    def table(self, data: RolloutComparison, now_ns: int) -> TableModel:
        ids = [str(at + 1) for at in range(data.rows)]
        none = "None of them has said anything yet." if data.rollouts else "There is no such rollout."
        start = None if data.first is None else ids[data.first]
        if len(data.rollouts) == 2:
            names = [Column(clean(row.id), narrows="cut", least=14) for row in data.rollouts]
            columns = [figure("step"), names[0], Column(" "), names[1], Column("note", optional=True)]
            return TableModel(columns, ids, lambda id: _pair_cells(data, int(id) - 1), none, start=start)
        columns = [figure("step"), Column("who"), *_heads(data), Column("a says", narrows="cut", least=20)]
        return TableModel(columns, ids, lambda id: _row_cells(data, int(id) - 1), none, start=start)

    def panes(self, data: RolloutComparison, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        facts = pane("Rollouts", rollouts.ROLLOUTS.table(data.rollouts, now_ns))
        if id is None:
            return [facts]
        if len(data.rollouts) == 2:
            pair = data.pairs[int(id) - 1]
            return [Pane("Step", lambda width, height: _both(pair, width)), facts]
        shown = [pane("Why", Group(*_reasons(data))), pane("Step", Group(*_all_said(data, int(id) - 1))), facts]
        return shown if any(row.status not in UNFAILED for row in data.rollouts) else shown[1:]

    def command(self, id: str | None) -> str:
        if self._group is not None:
            return f"penstock rollouts {shlex.quote(f'group={self._group}')}"
        return "; ".join(f"penstock show {one}" for one in self._ids)

    def place(self) -> str:
        return f"group {self._group}" if self._group is not None else " ".join(self._ids)


def _short(row: RolloutSummary) -> Text:
    reward = "no reward" if row.reward is None else f"reward {number(row.reward)}"
    return joined(plain(row.id, "bold"), rollouts.status(row.status), reward)


def _deltas(left: RolloutSummary, right: RolloutSummary) -> Iterator[str]:
    """Differences of the right rollout to the left one: reward, tokens, calls."""
    if left.reward is not None and right.reward is not None:
        yield f"reward {right.reward - left.reward:+.4g}"
    a, b = left.totals, right.totals
    tokens = [(t.input_tokens or 0) + (t.output_tokens or 0) for t in (a, b)]
    yield f"{tokens[1] - tokens[0]:+,} tokens"
    if a.cost is not None and b.cost is not None:
        yield f"{'-' if b.cost < a.cost else '+'}{money(abs(b.cost - a.cost))}"
    yield f"{b.calls - a.calls:+,} model calls"


def _pair_cells(data: RolloutComparison, at: int) -> list[Text | str]:
    pair = data.pairs[at]
    mark = Text("◀ first difference", style="bold yellow") if at == data.first else ""
    return [
        str(at + 1),
        _step(pair.left),
        Text(pair.sign, style="" if pair.sign == "=" else "yellow"),
        _step(pair.right),
        mark,
    ]


def _step(step: TranscriptStep | None) -> Text:
    return (
        Text() if step is None else joined(plain(step.who, rollouts.style(step.who)), clean(abbreviate(step.text, 120)))
    )


def _heads(data: RolloutComparison) -> list[Column]:
    """A narrow column for each try, named by the distinct part of its id and a sign for its end."""
    ids = [row.id for row in data.rollouts]
    letters = takewhile(lambda several: len(set(several)) == 1, zip(*ids, strict=False)) if len(ids) > 1 else ()
    shared = len(list(letters))
    signs = {RolloutStatus.SUCCEEDED: "✓", RolloutStatus.FAILED: "✗", RolloutStatus.ENDED: "–"}
    return [Column(f"{clean(row.id[shared:] or row.id)}{signs.get(row.status, '?')}") for row in data.rollouts]


def _row_cells(data: RolloutComparison, at: int) -> list[Text | str]:
    """A letter for each distinct step, `a` for the most frequent; `·` for none."""
    said = _said(data, at)
    often = [text for text, _ in Counter(filter(None, said)).most_common()]
    letters = [ascii_lowercase[often.index(text) % 26] if text else "·" for text in said]
    step = next(one[at] for one in data.steps if at < len(one) and f"{one[at].who} {one[at].text}" == often[0])
    who = plain(f"{step.who} ◀" if at == data.first else step.who, rollouts.style(step.who))
    marked = [Text(letter, style="" if letter == "a" else "yellow") for letter in letters]
    return [str(at + 1), who, *marked, clean(abbreviate(step.text, 200))]


def _both(pair: StepPair, width: int) -> RenderableType:
    """Two steps beside each other, or below each other on a narrow screen."""
    left, right = mark_differences(pair.left.text if pair.left else "", pair.right.text if pair.right else "")
    sides = [(pair.left, left, "left"), (pair.right, right, "right")]
    told = [Group(_said_by(step, side), text) for step, text, side in sides]
    head = Text(SIGNS[pair.sign], style="bold")
    if width < WIDE:
        return Group(head, told[0], Text(), told[1])
    grid = Grid.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*told)
    return Group(head, grid)


def _said_by(step: TranscriptStep | None, side: str) -> Text:
    return plain(f"{side}: {step.who}, call #{step.call}" if step else f"{side}: nothing", "dim")


def _reasons(data: RolloutComparison) -> Iterator[Text]:
    """For each rollout that failed or is not over, the step at which it left the others."""
    good = [said for row, said in zip(data.rollouts, data.steps, strict=True) if row.status in UNFAILED]
    if not good:
        yield Text("None has succeeded or ended, so there is nothing to compare the failed ones with.")
        return
    for row, said in zip(data.rollouts, data.steps, strict=True):
        if row.status in UNFAILED:
            continue
        at, other = find_divergence(said, good)
        own = _at(said, at)
        theirs = _at(other or (), at)
        where = f"leaves the others at step {at + 1}"
        yield joined(plain(row.id, "bold"), rollouts.status(row.status), where)
        yield Text.assemble(("  it:   ", "dim"), own)
        yield Text.assemble(("  they: ", "dim"), theirs)


def _at(said: Sequence[TranscriptStep], at: int) -> Text:
    return _step(said[at]) if at < len(said) else Text("said nothing more")


def _all_said(data: RolloutComparison, at: int) -> Iterator[Text]:
    for row, said in zip(data.rollouts, data.steps, strict=True):
        yield joined(plain(row.id, "bold"), rollouts.status(row.status))
        yield Text(clean(f"{said[at].who}: {said[at].text}") if at < len(said) else "nothing")
        yield Text()


# -- versions ----


@dataclass(frozen=True, slots=True)
class VersionComparison:
    """Two versions of a resource, and rollouts that had them."""

    resource: ResourceView
    versions: Sequence[Resource]
    rollouts: Sequence[Sequence[RolloutSummary]]


class CompareVersionsView(CompareView):
    """Compares two versions of a resource."""

    stacked = True
    concerns = frozenset({"resources"})

    def __init__(self, resource: str, versions: Sequence[str]) -> None:
        self._resource, self._versions = resource, versions

    async def load(self, client: Client) -> VersionComparison:
        async def having(version: str) -> list[RolloutSummary]:
            return (await client.rollout_page(f'version="{self._resource}@{version}"', NEWEST, None)).rollouts

        found, had = await asyncio.gather(client.resource(self._resource), map_concurrently(having, self._versions))
        by_name = {version.version: version for version in found.versions}
        return VersionComparison(found, [by_name[name] for name in self._versions if name in by_name], had)

    def panes(self, data: VersionComparison, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        if len(data.versions) < 2:
            there = ", ".join(clean(one.version) for one in data.resource.versions)
            return [pane("Versions", Text(f"{clean(self._resource)} has no such version; it has {there}."))]
        old, new = data.versions
        return [pane("Outcomes", _outcomes(data)), pane("Difference", resources.difference(old, new))]

    def command(self, id: str | None) -> str:
        return f"penstock resource diff {self._resource} {' '.join(self._versions)}"

    def place(self) -> str:
        return f"{self._resource} {' '.join(self._versions)}"


def _outcomes(data: VersionComparison) -> RenderableType:
    """The outcomes of the newest rollouts of each version."""
    made = Listing(Column("version"), figure("rollouts"), figure("succeeded"), figure("ended", 1), figure("failed"),
                   figure("mean reward"), figure("with reward"), figure("mean tokens"))  # fmt: skip
    for version, rows in zip(data.versions, data.rollouts, strict=True):
        rewards = [row.reward for row in rows if row.reward is not None]
        tokens = [(row.totals.input_tokens or 0) + (row.totals.output_tokens or 0) for row in rows]
        statuses = (RolloutStatus.SUCCEEDED, RolloutStatus.ENDED, RolloutStatus.FAILED)
        ends = [sum(row.status == one for row in rows) for one in statuses]
        made.add_row(
            plain(version.qualified_name), f"{len(rows):,}", *(f"{count:,}" for count in ends),
            number(round(sum(rewards) / len(rewards), 4)) if rewards else "none", f"{len(rewards):,}",
            f"{sum(tokens) / len(tokens):,.0f}" if tokens else "",
        )  # fmt: skip
    note = "Rollouts were not assigned by chance here; a release compares versions fairly."
    return Group(made, Text(note, style="dim"))


# -- runs ----


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two training runs with their curves by metric."""

    runs: Sequence[Run]
    curves: Sequence[dict[str, Curve]]


class CompareRunsView(CompareView):
    """The view of two training runs side by side, a row for each metric."""

    concerns = frozenset({"runs"})

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids

    async def load(self, client: Client) -> RunComparison:
        runs = await map_concurrently(client.run, self._ids)
        curves = await map_concurrently(lambda id: client.curves(id, max_points=200), self._ids)
        return RunComparison(runs, [{curve.metric: curve for curve in found} for found in curves])

    def head(self, data: RunComparison, now_ns: int) -> Text:
        one, other = (
            joined(plain(run.id, "bold"), rollouts.status(run.status), f"step {run.step or 0:,}") for run in data.runs
        )
        return Text.assemble(one, (" against ", "dim"), other)

    def table(self, data: RunComparison, now_ns: int) -> TableModel:
        names = list(dict.fromkeys(name for found in data.curves for name in found))
        heads = [column for run in data.runs for column in (figure(clean(run.id)), Column("trend", 2))]
        columns = [Column("metric"), *heads, figure("difference")]
        return TableModel(columns, names, lambda id: _metric(data, id), "Neither has reported a point yet.")

    def panes(self, data: RunComparison, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        config = pane("Config", Group(*_configs(data)))
        if id is None:
            return [config]
        lines = [
            terminal_curve(found[id], run.id) for run, found in zip(data.runs, data.curves, strict=True) if id in found
        ]
        return [
            Pane("Curves", lambda width, height: Group(chart(lines, width, (height or 11) - 1), legend(lines))),
            config,
        ]

    def command(self, id: str | None) -> str:
        return f"penstock runs plot {self._ids[0]} --compare {self._ids[1]}"

    def place(self) -> str:
        return " ".join(self._ids)


def _metric(data: RunComparison, name: str) -> list[Text | str]:
    found = [curves.get(name) for curves in data.curves]
    cells: list[Text | str] = [plain(name)]
    for curve in found:
        cells += ["", ""] if curve is None else [number(curve.last), sparkline(curve.mean[-24:])]
    last = [curve.last for curve in found if curve is not None and curve.last is not None]
    return [*cells, f"{last[1] - last[0]:+.4g}" if len(last) == 2 else ""]


def _configs(data: RunComparison) -> Iterator[Text]:
    """The differences of the configurations."""
    old, new = data.runs
    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = list(difflib.unified_diff(json_lines(old.config), json_lines(new.config), old.id, new.id, lineterm="", n=0))
    yield from (plain(one, colours.get(one[:1], "")) for one in lines)
    if not lines:
        yield Text("Both are configured alike.")


def mark_differences(left: str, right: str) -> tuple[Text, Text]:
    """Both texts; the words that the other lacks are marked."""
    made = Text(), Text()
    for both, only_left, only_right in differing_words(left, right):
        for text in made:
            text.append(clean(both))
        if only_left:
            made[0].append(f"[-{clean(only_left)}-]", "red")
        if only_right:
            made[1].append(f"{{+{clean(only_right)}+}}", "green")
    return made
