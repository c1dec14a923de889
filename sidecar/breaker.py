"""Decides when a runner stops by itself: agents that cannot work on this machine would fail every task of the queue.

A failure says nothing about its task when it came at once, before any model call, and other tasks have failed in the
very same way with no success between. After `EQUAL` of them the breaker trips. The runner then takes no more work and
hands back those attempts, and others that still fail in this way; they do not count as tries. Pure: the runner carries
out the decisions.

Two failures are equal when they have the same exit code or signal and the same last line on stderr, numbers in that
line aside. Each rollout counts once, however often it is tried again, because its task may be at fault.
"""

from __future__ import annotations

import re
from collections import defaultdict

from penstock.sidecar.result import AttemptResult

EQUAL = 5
"""Tasks that must fail alike. Fewer may do so by chance, because an agent refuses some tasks in one way; more would
cost more time and money before the user hears of it.
"""
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|[0-9]+")
"""Parts that differ between equal messages: times, ports, process ids, addresses, ids of containers."""


class FailureBreaker:
    """Judges the results of one runner, of all its workers."""

    def __init__(self, keep_going: bool = False) -> None:
        """With `keep_going` it never trips."""
        self.tripped: AttemptResult | None = None
        """The failure that tripped it; None until then."""
        self._keep_going = keep_going
        self._alike: defaultdict[str, list[AttemptResult]] = defaultdict(list)

    def record(self, result: AttemptResult) -> list[AttemptResult]:
        """Record a result; return the attempts to hand back now."""
        if self.tripped is None and (result.end == "succeeded" or result.calls):
            self._alike.clear()
        if not result.at_once or self._keep_going:
            return []
        kind = signature(result)
        if self.tripped is not None:
            return [result] if kind == signature(self.tripped) else []
        self._alike[kind].append(result)
        if len({each.rollout for each in self._alike[kind]}) < EQUAL:
            return []
        self.tripped = result
        return self._alike.pop(kind)

    def explanation(self) -> str:
        """A message for the user: what happened and what to do."""
        assert self.tripped is not None
        said = "\n".join(f"  {line}" for line in self.tripped.last_lines)
        return (
            f"{EQUAL} tasks failed in the same way, at once and before any model call: {self.tripped.reason}\n"
            + (f"the last lines of {self.tripped.name}:\n{said}\n" if said else "")
            + "no more work is taken; these attempts are handed back and do not count. Repair what the agents need and "
            "start again; --keep-going goes on in spite of it"
        )


def signature(result: AttemptResult) -> str:
    """A text that is the same for equal failures."""
    outcome = result.outcome
    how = (None, None) if outcome is None else (outcome.exit_code, outcome.signal)
    return f"{how}: {NUMBERS.sub('#', result.reason or '')}"
