"""Summary of a backtest of rules: by rule, with the rewards of the rollouts that it touches beside those of the
others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.reading.policy.backtest import BacktestCall
from penstock.gateway.reading.policy.rules import PolicyRule, Verdict

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
    """What one rule would have done."""

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
    """What rules would have done."""

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
