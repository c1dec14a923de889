"""Advice on one screen of 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import clean, joined, plain
from penstock.trainer.apo.advice.report import Advice, Cost, IntervalEstimate, PromptResult

COLOURS = {"prompts": "green", "nothing": "dim"}
BAR = 24
"""Characters of a bar of 100 %."""
PARTS = (Column("variance of the reward"), figure("variance"), figure("share"), Column("", 1))
PROMPTS = (
    Column("prompt"), figure("rollouts"), figure("mean"), figure("gain"), Column("90 %"), figure("characters", 1),
)  # fmt: skip


def page(advice: Advice) -> Group:
    pieces: list[RenderableType] = [_head(advice)]
    pieces += [Padding.indent(plain(sentence), 2) for sentence in advice.why]
    if advice.mean is not None:
        pieces += [Text(), _variance(advice), Text(), _prompts(advice)]
    pieces += [Text(), *_facts(advice)]
    return Group(*pieces)


def _head(advice: Advice) -> Text:
    verdict = Text(advice.verdict, style=f"bold {COLOURS.get(advice.verdict, 'yellow')}")
    seen = f"{advice.rollouts} rollouts of {advice.tasks} tasks"
    return joined(Text(clean(advice.run), style="bold"), "advise:", verdict, seen)


def _variance(advice: Advice) -> Listing:
    made = Listing(*PARTS)
    parts = advice.variance
    total = parts.task + parts.prompt + parts.task_prompt + parts.within
    rows: list[tuple[str, float]] = [
        ("task", parts.task), ("prompt", parts.prompt), ("task x prompt", parts.task_prompt),
    ]  # fmt: skip
    if parts.grader is None:
        rows.append(("agent and grader, not told apart", parts.within))
    else:
        rows += [("agent", parts.within - parts.grader), (f"grader, {parts.judgements} judged again", parts.grader)]
    for name, value in rows:
        share = value / total if total else 0.0
        made.add_row(name, f"{value:.4f}", f"{share:.0%}", "█" * round(share * BAR))
    return made


def _prompts(advice: Advice) -> Listing:
    made = Listing(*PROMPTS)
    for one in advice.prompts:
        made.add_row(*_row(one))
    return made


def _row(one: PromptResult) -> Iterator[str]:
    yield "as it is" if one.stance == "seed" else one.stance
    yield f"{one.rollouts}"
    yield "" if one.mean is None else f"{one.mean:.2f}"
    yield "" if one.gain is None else f"{one.gain.mean:+.2f}"
    yield "" if one.gain is None else _interval(one.gain)
    yield f"{one.characters:,}"


def _interval(found: IntervalEstimate) -> str:
    return f"{found.low:+.2f} to {found.high:+.2f}"


def _facts(advice: Advice) -> Iterator[RenderableType]:
    if advice.mean is not None and advice.best_by_task is not None:
        yield _fact(
            "reward",
            f"{advice.mean.mean:.2f} ({advice.mean.low:.2f} to {advice.mean.high:.2f}) as it is; the best of each "
            f"task's rollouts {advice.best_by_task:.2f}",
        )
    if advice.unrewarded:
        yield _fact("no reward", f"{advice.unrewarded} of {advice.rollouts} rollouts; they are left out")
    if advice.earlier:
        yield _fact("the tape", f"{advice.earlier} earlier rollouts of these tasks count too")
    if advice.failures:
        yield _fact("what fails", "; ".join(advice.failures))
    tools = advice.tools
    if tools.calls:
        said = f"{tools.calls} calls; rollouts with misuse {tools.misused}, with a breakdown {tools.broken}"
        yield _fact("tools", f"{said}; misuse costs {tools.cost.mean:.2f}")
    yield _fact("a run", _needed(advice))
    yield _fact("the probe", _cost(advice.spent))
    for problem in advice.problems:
        yield _fact("problem", problem, "yellow")


def _needed(advice: Advice) -> str:
    if advice.mean is None:
        return "nobody can say"
    if advice.needs is None:
        return "would not decide within 4,000 rollouts of its race"
    return f"{_cost(advice.needs)}; it would decide 4 of 5 races, the budget of {advice.budget:,} {advice.decided:.0%}"


def _cost(cost: Cost) -> str:
    agents = "" if cost.agent_tokens is None else f" ({count(cost.agent_tokens)} tokens)"
    money = f", {cost.money:.2f} at your prices" if cost.money else ""
    return f"{cost.rollouts:,} rollouts{agents}, {cost.reflections} reflections ({count(cost.tokens)} tokens{money})"


def count(number: int) -> str:
    """Return a number as 812, 81k or 1.2M."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1000:.0f}k" if number < 1_000_000 else f"{number / 1e6:.1f}M"


def _fact(name: str, said: str, style: str = "") -> RenderableType:
    from rich.table import Table

    row = Table.grid(padding=(0, 2))
    row.add_column(width=10)
    row.add_column()
    row.add_row(Text(name, style="dim"), plain(said, style))
    return row
