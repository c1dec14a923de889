"""The figures of releases for Prometheus, from memory: a scrape walks no canary.

Names of releases never end, so only `SHOWN` releases have series: those that are live, newest first, then those that
have ended within `RECENT_NS`. A series of a release that is not shown any more is gone from the page.

The figures are those of the canary that the driver steps. A release that has none (it has ended, or was held before the
gateway started) has the figures of the last link of its audit chain, on which its decision was based.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import ARMS, AuditTrailEntry, Release
from penstock.gateway.model.release_policy import HOLDBACK
from penstock.gateway.releases.canary.decision import Canary, figures

SHOWN: Final = 20
RECENT_NS: Final = 24 * 3600 * 10**9
_TESTS: Final = ("harm", "non_inferiority")
_MANY: Final = ("guard.", "srm.")
"""Prefixes of tests of which a policy has several."""
_NUMBERS: Final = ("assigned", "missing")
_LATER: Final = f"{HOLDBACK}."


class ReleaseMetrics:
    """The figures that Prometheus gets of releases."""

    def __init__(self, audit: Callable[[str], list[AuditTrailEntry]], canary: Callable[[str], Canary | None]) -> None:
        """`audit` returns the chain of a release; `canary` the canary that is stepped for it."""
        self._audit, self._canary = audit, canary
        self._decided: dict[tuple[str, int], Mapping[str, float]] = {}

    def update(self, newest_first: Iterable[Release], metrics: Metrics, now_ns: int) -> None:
        """Set the figures of the shown releases, and no others."""
        shown = _shown(newest_first, now_ns)
        found = {release.id: self._figures(release) for release in shown}
        self._decided = {(it.id, it.revision): found[it.id] for it in shown if (it.id, it.revision) in self._decided}
        metrics.release_stage = {(it.id, it.stage): 1 for it in shown}
        metrics.release_split = {(it.id,): it.split for it in shown}
        metrics.release_assigned = {(it.id,): it.assigned for it in shown}
        metrics.release_counted = {(it.id,): it.counted for it in shown}
        metrics.release_rollouts = dict(_by_arm(found, "assigned"))
        metrics.release_missing = dict(_by_arm(found, "missing"))
        metrics.release_reward_mean = dict(_by_arm(found, "reward"))
        metrics.release_e_value = {
            (name, test): value
            for name, one in found.items()
            for test, value in one.items()
            if test.removeprefix(_LATER) in _TESTS or test.removeprefix(_LATER).startswith(_MANY)
        }

    def _figures(self, release: Release) -> Mapping[str, float]:
        canary = self._canary(release.id)
        if canary is not None:
            try:
                return figures(canary.evidence)
            except RuntimeError:
                # The counter's thread has just met the first rollout of a stage: the next scrape has it.
                return {}
        key = release.id, release.revision
        if key not in self._decided:
            self._decided[key] = _of_last(self._audit(release.id))
        return self._decided[key]


def _shown(newest_first: Iterable[Release], now_ns: int) -> list[Release]:
    recent = [it for it in newest_first if it.live or it.changed_ns > now_ns - RECENT_NS]
    return sorted(recent, key=lambda release: not release.live)[:SHOWN]


def _of_last(links: Iterable[AuditTrailEntry]) -> Mapping[str, float]:
    found: Mapping[str, float] = {}
    for link in links:
        numbers = {name: it for name, it in link.evidence.items() if isinstance(it, int | float)}
        found = numbers if "harm" in numbers else found
    return found


def _by_arm(found: Mapping[str, Mapping[str, float]], what: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield a figure by arm: a number of rollouts is the sum of ramp and holdback; any other is the latest."""
    for name, one in found.items():
        for arm in ARMS:
            both = [one[key] for key in (f"{arm}.{what}", f"{_LATER}{arm}.{what}") if key in one]
            if both:
                yield (name, arm), sum(both) if what in _NUMBERS else both[-1]
