"""Decides whether a candidate passes, from many compared answers. Pure.

A replayed call is asked again of the candidate and of the incumbent, and both answers are scored against the recorded
one. Models seldom say the same twice, so only what the candidate loses *against the incumbent* counts. The scores go
into the paired betting test (`gateway.releases.canary.evidence`), in the order in which the calls were drawn, and
`PassTest` says when it is over:

* **pass**: a loss of the margin or more is excluded (e >= 1/alpha), and the incumbent itself agrees often enough for
  such a loss to be seen at all;
* **fail**: the candidate is worse (e >= 1/alpha) and its mean lower by more than the margin, or, when all calls are
  used, worse at all;
* **undecided**: neither, when all calls or the budget are used. That shows no harm; it says nothing more.

A candidate that is no worse fails with probability alpha at most, one that is worse by the margin passes with
probability alpha at most, however early it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from penstock.gateway.releases.canary.evidence import PairedTest

T = TypeVar("T")
PassVerdict = Literal["pass", "fail", "undecided"]


class ReorderBuffer(Generic[T]):
    """Results in the order in which their calls began, so that quick failures are not seen first."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def put(self, number: int, result: T) -> Iterator[T]:
        """Takes the result of this number, from 0; yields the results whose turn has come."""
        self._held[number] = result
        while self._next in self._held:
            self._next += 1
            yield self._held.pop(self._next - 1)


class PassTest:
    """Scores of both versions, call by call."""

    def __init__(self, margin: float, alpha: float) -> None:
        self.calls = 0
        self.sums = [0.0, 0.0]
        """Sums of the scores of candidate and incumbent."""
        self._margin, self._limit = margin, 1 / alpha
        self._test = PairedTest(margin)

    def add(self, candidate: float, incumbent: float) -> None:
        """Takes one pair of scores, each in [0, 1]."""
        self.calls += 1
        self.sums[0] += candidate
        self.sums[1] += incumbent
        self._test.add(candidate, incumbent)

    @property
    def candidate(self) -> float:
        """Mean score of the candidate; 0 before the first call."""
        return self.sums[0] / self.calls if self.calls else 0.0

    @property
    def incumbent(self) -> float:
        """Mean score of the incumbent; 0 before the first call."""
        return self.sums[1] / self.calls if self.calls else 0.0

    @property
    def blind(self) -> bool:
        """True while the incumbent agrees so seldom that a loss of the margin could not be seen."""
        return self.incumbent <= self._margin

    def verdict(self, used_up: bool = False) -> PassVerdict | None:
        """The trial's result; None while it continues. `used_up`: whether no call is left."""
        if self._test.non_inferiority >= self._limit and not self.blind:
            return "pass"
        lower = self.candidate - self.incumbent < -self._margin
        if self._test.harm >= self._limit and (lower or used_up):
            return "fail"
        return "undecided" if used_up else None

    def figures(self) -> dict[str, float]:
        """Counts, means and e-values for the audit."""
        return {
            "calls": self.calls,
            "candidate": self.candidate,
            "incumbent": self.incumbent,
            "harm": self._test.harm,
            "non_inferiority": self._test.non_inferiority,
        }

    def sentence(self, verdict: PassVerdict, what: str = "next action", unit: str = "calls") -> str:
        """The verdict for a person. `what` was compared in each `unit`."""
        seen = (
            f"the candidate's {what} agrees with the recorded one in {self.candidate:.1%} of {self.calls} {unit}, "
            f"the incumbent's in {self.incumbent:.1%}"
        )
        harm, not_worse = self._test.harm, self._test.non_inferiority
        if verdict == "pass":
            return f"{seen}: a loss of {self._margin:g} is excluded (e = {not_worse:.4g} >= {self._limit:.4g})"
        if verdict == "fail":
            return f"{seen}: it is worse (e = {harm:.4g} >= {self._limit:.4g})"
        why = f"undecided (harm e = {harm:.4g}, non-inferiority e = {not_worse:.4g} of {self._limit:.4g})"
        if self.blind:
            why += "; with an incumbent that seldom agrees with itself a loss cannot be seen: use another judge"
        return f"{seen}: {why}; no harm is shown"
