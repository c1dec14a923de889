"""What rules would have done, and who waits, as a terminal shows it; docs/policies.md shows the same."""

from __future__ import annotations

from random import Random

from fakes.goldens import GOLDENS, check_golden, check_widths
from fakes.process import ROOT

from penstock.console.mcp_server.comparison import difference
from penstock.console.views import tools
from penstock.console.views.noun import NounRows
from penstock.gateway.reading.policy.questions import Question
from penstock.gateway.reading.policy.report import BacktestCall, PolicyReport, build_report
from penstock.gateway.reading.policy.rules import PolicyRule

S = 10**9
RULES = [
    PolicyRule(name="no-secrets", verdict="deny"),
    PolicyRule(name="large-payments", verdict="ask"),
    PolicyRule(name="no-mail-addresses", verdict="dry"),
    PolicyRule(name="never", verdict="deny"),
]


def called(rollout: int, span: int, reward: float | None) -> BacktestCall:
    """A recorded call: every sixth rollout reads secrets, two of the others pay much."""
    made = BacktestCall(
        rollout=f"task-{rollout}", attempt="a1", span=span, server="files", tool="read", verdict="allow", reward=reward
    )
    if rollout % 6 == 0 and span == 3:
        made.verdict, made.rule = "deny", "no-secrets"
        made.problem = 'it has the key "Path", which some servers read as "path"' if rollout == 6 else None
    elif rollout in (7, 8) and span == 5:
        made.verdict, made.rule, made.server, made.tool = "ask", "large-payments", "bank", "pay"
    elif rollout % 2:
        made.dry = ["no-mail-addresses"]
    return made


def told(most: int = 5) -> PolicyReport:
    rng = Random(7)
    rewards = {rollout: float(rng.random() < (0.3 if rollout % 6 == 0 else 0.7)) for rollout in range(90)}
    given = {rollout: None if rollout % 15 == 0 else reward for rollout, reward in rewards.items()}
    calls = [called(rollout, span, given[rollout]) for rollout in range(89, -1, -1) for span in (5, 3)]
    return build_report(RULES, calls, difference, most)


def test_what_rules_would_have_done() -> None:
    check_widths("policy-test", tools.report(told()))
    shown = (GOLDENS / "policy-test.txt").read_text().split("\n--- 120 columns")[0].partition("\n")[2]
    assert shown in (ROOT / "docs" / "policies.md").read_text()


def test_the_sums() -> None:
    report = told(100)
    assert (report.calls, report.rollouts, report.denied, report.asked, report.changed) == (180, 90, 15, 2, 0)
    assert len(report.stopped) == 17
    first, second, third, last = report.rules
    assert (first.calls, first.unread, first.touched.rollouts, first.touched.rewarded) == (15, 1, 15, 12)
    assert (first.others.rollouts, first.others.rewarded) == (75, 72)
    assert first.difference is not None
    value, low, high = first.difference
    assert first.touched.mean is not None
    assert first.others.mean is not None
    assert abs(value - (first.touched.mean - first.others.mean)) < 1e-12
    assert low < value < high < 0
    # Two rollouts are too few to say anything.
    assert (second.touched.rollouts, second.difference) == (2, None)
    assert (third.verdict, third.calls, third.touched.rollouts) == ("dry", 89, 45)
    assert (last.calls, last.touched.mean, last.difference) == (0, None, None)


def test_nothing_stopped() -> None:
    calls = [one for one in (called(rollout, 5, 1.0) for rollout in range(0, 6, 2))]
    check_golden("policy-test-none", tools.report(build_report(RULES[3:], calls, difference, 5)))


def test_who_waits() -> None:
    asked = [
        Question(
            id="9f2c41d0", rule="large-payments", message="Above 100 a person decides.", server="bank", tool="pay",
            arguments='{"to":"Acme","amount":250}', rollout="task-7", attempt="a1", asked_ns=0, until_ns=600 * S,
        ),
        Question(
            id="00ff00ff", rule="r", server="files", tool="wri\x1bte", arguments='{"text":"' + "x" * 5000 + '"}',
            rollout="r2", attempt="a1", asked_ns=5 * S, until_ns=65 * S,
        ),
    ]  # fmt: skip
    check_golden("policy-waiting", tools.WAITING.picture(NounRows(asked), 20 * S))


def test_rewards_of_any_size_have_a_mean() -> None:
    found = build_report(RULES, [called(rollout, 3, 1.5e308) for rollout in range(100)], difference, 0)
    (first, *_) = found.rules
    assert (first.touched.mean, first.others.mean, first.difference) == (1.5e308, 1.5e308, None)
