"""Policies on tool calls for a terminal: calls that wait for a person, and the effect of rules on recorded calls.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.noun import NounSelection, NounView, all_rows
from penstock.console.views.table import Column, Listing, abbreviate, ago, clean, duration, figure, number, plain
from penstock.gateway.model.toml import pluralized
from penstock.gateway.reading.policy.questions import Question
from penstock.gateway.reading.policy.report import BacktestCall, PolicyReport, RuleFigures

LONGEST = 2000
"""Maximum number of characters of arguments that are shown."""
STYLES = {"deny": "red", "ask": "yellow", "kernel": "yellow", "redact": "cyan", "dry": "blue", "allow": "green"}

RULES = (
    Column("rule"), Column("verdict"), figure("calls"), figure("unread", 1), figure("rollouts", 2),
    figure("reward"), figure("others"), Column("difference"),
)  # fmt: skip
STOPPED = (
    Column("call"), Column("verdict", 2), Column("rule"), Column("server", 1),
    Column("tool", narrows="cut", least=12), Column("why", 3, narrows="cut", least=24),
)  # fmt: skip


def question(one: Question, now_ns: int) -> Group:
    """A waiting call with all that a person has to know."""
    return Group(*_question(one, now_ns))


def _question(one: Question, now_ns: int) -> Iterator[Text]:
    left = duration(max(0, one.until_ns - now_ns))
    yield Text.assemble(plain(one.id, "bold"), "  ", plain(one.tool, "yellow"), plain(f" on {one.server}"))
    about = [f"asked {ago(one.asked_ns, now_ns)}, refused in {left}", f"rollout {one.rollout}/{one.attempt}"]
    about.append(f"rule {one.rule}" + (f": {one.message}" if one.message else ""))
    yield from (plain(f"  {line}") for line in about)
    yield plain(f"  {abbreviate(clean(one.arguments), LONGEST)}")


WAITING = NounView[NounSelection, Question](
    "waiting",
    Question,
    all_rows(lambda client: client.waiting(), "No tool call waits for a person."),
    lambda one: one.id,
    whole=question,
    every_s=3.0,
)


def answered(one: Question, verdict: str) -> Text:
    """The verdict on a call that has waited, in a sentence."""
    done = "It runs" if verdict == "approve" else "It was refused"
    return plain(f"{done}: {one.tool} on {one.server}, for rollout {one.rollout}.")


def report(told: PolicyReport) -> Group:
    """The sums, rule by rule, and the calls that would not have run as they did."""
    table = Listing(*RULES)
    for one in told.rules:
        unread = plain(one.unread or "")
        means = (number(_rounded(one.touched.mean)), number(_rounded(one.others.mean)))
        head = (plain(one.rule), plain(one.verdict, STYLES[one.verdict]), plain(f"{one.calls:,}"), unread)
        table.add_row(*head, plain(f"{one.touched.rollouts:,}"), *means, _difference(one))
    shown: list[RenderableType] = [Text(_summary(told)), Text(), table, Text(), Text(_MEANING, "dim")]
    if told.stopped:
        shown += [Text(), _stopped(told.stopped), *_more(told)]
    return Group(*shown)


_MEANING = (
    "reward: mean of the rollouts that the rule touches; others: of those with tool calls that it does not.\n"
    "difference: the one less the other, with its 95 % interval. It does not say that the rule is why."
)


def _summary(told: PolicyReport) -> str:
    looked = f"{pluralized(told.calls, 'tool call')} of {pluralized(told.rollouts, 'rollout')}"
    ends = [
        (told.denied, "would not have run"),
        (told.asked, "would have waited for a person or a kernel"),
        (told.changed, "would have been changed"),
    ]
    said = ", ".join(f"{number:,} {words}" for number, words in ends if number)
    return f"{looked}: {said or 'all would have run'}."


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _difference(one: RuleFigures) -> Text:
    if one.difference is not None:
        value, low, high = one.difference
        return plain(f"{value:+.3f} ({low:+.3f} to {high:+.3f})")
    return Text("" if not one.calls else "too little to tell", "dim")


def _stopped(calls: Sequence[BacktestCall]) -> Listing:
    made = Listing(*STOPPED)
    for one in calls:
        place, style = plain(f"{one.rollout}/{one.attempt}#{one.span}"), STYLES[one.verdict]
        what = (plain(one.verdict, style), plain(one.rule), plain(one.server), plain(one.tool))
        made.add_row(place, *what, plain(one.problem))
    return made


def _more(told: PolicyReport) -> Iterator[Text]:
    more = told.denied + told.asked + told.changed - len(told.stopped)
    if more:
        yield Text(f"and {more:,} more; --limit shows more of them.", "dim")
