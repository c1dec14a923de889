"""Holds a history against the tape: a sentence for everything that was promised and not kept. Pure.

What is promised is in docs/reliability.md, ARCHITECTURE.md ("What must always hold") and `gateway.model.rollout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from e2e.histories import call_rules, feed_rules, operator_rules, release_rules, work_rules
from e2e.histories.history import Operation
from e2e.histories.tape import Tape

Rule = Callable[[Sequence[Operation], Tape], Iterator[str]]
RULES: tuple[Rule, ...] = (
    work_rules.enqueued, work_rules.claimed, work_rules.leases, work_rules.superseded, work_rules.finished,
    work_rules.rewarded, feed_rules.followed, feed_rules.numbered, feed_rules.moves, release_rules.one_version,
    release_rules.as_served, release_rules.adapters, release_rules.decided, operator_rules.audited,
    operator_rules.answered, operator_rules.requeued, operator_rules.once, operator_rules.standing,
    operator_rules.cancelled,
)  # fmt: skip


def problems(history: Sequence[Operation], tape: Tape, strict: bool) -> list[str]:
    """Everything that is wrong. `strict`: the tape was written with `record = "strict"`."""
    found = [sentence for rule in RULES for sentence in rule(history, tape)]
    return found + list(call_rules.calls(history, tape, strict)) + list(faults(history))


def faults(history: Sequence[Operation]) -> Iterator[str]:
    """The gateway never answers that it has made a mistake, and a reload that nobody disturbs succeeds."""
    for one in history:
        if one.answer.get("status") == 500:
            yield f"answered with 500: {one}: {one.answer}"
        if one.kind == "fault" and one.answer.get("failed"):
            yield f"{one.answer['failed']}: {one}"
