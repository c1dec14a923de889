"""Backtest of rules on calls that are on the tape: one row for each call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import Id, Mode, Noun
from penstock.gateway.reading.policy.call_parser import tool_calls
from penstock.gateway.reading.policy.path_values import UnreadableCall
from penstock.gateway.reading.policy.policy import ALLOWED, ToolPolicy
from penstock.gateway.reading.policy.rules import PolicyRule

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


def backtest_call(policy: ToolPolicy, server: str, mode: Mode, request: bytes) -> tuple[str, dict[str, object]]:
    """(the tool, the fields of `BacktestCall` for the decision) for a recorded request. Of several calls in one body,
    the first that is not simply allowed counts."""
    try:
        calls = [one for one in tool_calls(request) if one is not None]
        made = [(one.tool, policy.decide(server, mode, one)) for one in calls]
        tool, found = next((one for one in made if one[1].verdict != "allow"), made[0] if made else ("", ALLOWED))
    except UnreadableCall as unreadable:
        tool, found = "", policy.decide_unreadable(server, mode, str(unreadable))
    name = None if found.rule is None else found.rule.name
    return tool, {"verdict": found.verdict, "rule": name, "dry": list(found.dry), "problem": found.problem}
