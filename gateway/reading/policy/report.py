"""Summary of a backtest of rules: by rule, with the rewards of the rollouts that it touches beside those of the
others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import Id, Mode, Noun
from penstock.gateway.reading.policy.policy import ALLOWED, ToolPolicy, tool_calls
from penstock.gateway.reading.policy.rules import PolicyRule, UnreadableCall, Verdict

# Backtest of rules on calls that are on the tape: one row for each call.

MOST_RULES = 1000


class PolicyTest(Noun):
    """Rules, and the recorded calls to try them on."""

    rules: list[PolicyRule] = Field(max_length=MOST_RULES)
    """As in `[[policy]]`."""
    filter: str = Field(default="", max_length=4096)
    """Terms about spans that all must hold, such as `since:30d mode:online`."""
    cursor: str | None = None
    """The `next` of the page before."""


class BacktestCall(Noun):
    """A recorded tool call, and what the rules say to it."""

    # pytest would take a class whose name begins so for a test.
    __test__ = False

    rollout: Id
    """Its rollout."""
    attempt: Id
    """Its attempt."""
    span: int
    """Its place there."""
    server: str
    """The server of the tool."""
    tool: str
    """The tool, by its server's own name; empty where the request cannot be read."""
    verdict: Literal["allow", "deny", "redact", "ask", "kernel"]
    """What becomes of it. A kernel is not asked."""
    rule: str | None = None
    """The rule that says so."""
    dry: list[str] = Field(default=[])
    """Rules that would only mark it."""
    problem: str | None = None
    """What could not be read, where that is why it is denied."""
    reward: float | None = None
    """The reward of its rollout."""


class BacktestPage(Noun):
    """A part of what was looked at, newest first."""

    __test__ = False

    calls: list[BacktestCall]
    """Every tool call that the filter finds, those that may run too."""
    next: str | None
    """Give it as `cursor` for the calls before these; none is left without one."""
    scanned: int
    """Spans that were looked at."""


def backtest_call(
    policy: ToolPolicy, server: str, mode: Mode, request: bytes, agent: str | None = None
) -> tuple[str, dict[str, object]]:
    """(the tool, the fields of `BacktestCall` for the decision) for a recorded request. Of several calls in one body,
    the first that is not simply allowed counts."""
    try:
        calls = [one for one in tool_calls(request) if one is not None]
        made = [(one.tool, policy.decide(server, mode, one, agent)) for one in calls]
        tool, found = next((one for one in made if one[1].verdict != "allow"), made[0] if made else ("", ALLOWED))
    except UnreadableCall as unreadable:
        tool, found = "", policy.decide_unreadable(server, mode, str(unreadable), agent)
    name = None if found.rule is None else found.rule.name
    return tool, {"verdict": found.verdict, "rule": name, "dry": list(found.dry), "problem": found.problem}


Compare = Callable[[Sequence[float], Sequence[float]], tuple[float, float, float] | None]
"""Compares two samples: (mean of the second less that of the first, and its 95 % interval); None where there is too
little to tell."""


class Rewards(Noun):
    """The rewards of some rollouts."""

    rollouts: int
    """How many there are."""
    rewarded: int
    """How many have one."""
    mean: float | None
    """Of those that have."""


class RuleFigures(Noun):
    """The effect that one rule would have had on recorded tool calls."""

    rule: str
    """Its name."""
    verdict: Verdict
    """What it says."""
    calls: int
    """Calls that it decides, or marks."""
    unread: int
    """Those of them that it refuses because it cannot read them."""
    touched: Rewards
    """Rollouts with such a call."""
    others: Rewards
    """The other rollouts with tool calls."""
    difference: tuple[float, float, float] | None
    """Mean reward of those it touches less that of the others, and its 95 % interval."""


class PolicyReport(Noun):
    """The effect that rules would have had on recorded tool calls."""

    calls: int
    """Tool calls that were looked at."""
    rollouts: int
    """Rollouts that they belong to."""
    denied: int
    """Calls that would not have run."""
    asked: int
    """Calls that would have waited for a person, or for what a kernel says."""
    changed: int
    """Calls that would have been changed, or their results."""
    rules: list[RuleFigures]
    """Each rule, in the order in which they are asked."""
    stopped: list[BacktestCall] = Field(default=[])
    """Calls that would not simply have run, the newest."""


@dataclass(slots=True)
class _RuleTally:
    calls: int = 0
    unread: int = 0
    rollouts: set[str] = field(default_factory=set[str])


def build_report(
    rules: Sequence[PolicyRule], calls: Iterable[BacktestCall], compare: Compare, most: int
) -> PolicyReport:
    """The sums over calls; lists up to `most` of those that would not simply have run."""
    tallies = {rule.name: _RuleTally() for rule in rules}
    rewards: dict[str, float | None] = {}
    report = PolicyReport(calls=0, rollouts=0, denied=0, asked=0, changed=0, rules=[])
    for call in calls:
        report.calls += 1
        rewards[call.rollout] = call.reward
        report.denied += call.verdict == "deny"
        report.asked += call.verdict in ("ask", "kernel")
        report.changed += call.verdict == "redact"
        for name in (*call.dry, *([call.rule] if call.rule is not None else [])):
            tally = tallies[name]
            tally.calls += 1
            tally.unread += call.problem is not None and name == call.rule
            tally.rollouts.add(call.rollout)
        if call.verdict != "allow" and len(report.stopped) < most:
            report.stopped.append(call)
    report.rollouts = len(rewards)
    report.rules = [_figures(rule, tallies[rule.name], rewards, compare) for rule in rules]
    return report


def _figures(rule: PolicyRule, tally: _RuleTally, rewards: dict[str, float | None], compare: Compare) -> RuleFigures:
    touched = [rewards[rollout] for rollout in tally.rollouts]
    others = [reward for rollout, reward in rewards.items() if rollout not in tally.rollouts]
    return RuleFigures(
        rule=rule.name,
        verdict=rule.verdict,
        calls=tally.calls,
        unread=tally.unread,
        touched=_rewards(touched),
        others=_rewards(others),
        difference=compare(_known(others), _known(touched)),
    )


def _known(values: Sequence[float | None]) -> list[float]:
    # Sorted, so that the sums are the same every time.
    return sorted(value for value in values if value is not None)


def _rewards(values: Sequence[float | None]) -> Rewards:
    known = _known(values)
    return Rewards(rollouts=len(values), rewarded=len(known), mean=mean(known) if known else None)


def mean(values: Sequence[float]) -> float:
    """The mean of rewards of any size."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        # Their sum may be beyond a float although their mean is not.
        return statistics.mean(values)
