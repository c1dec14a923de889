"""Measures how often a canary is right, by thousands of simulated releases through the real `Canary`. `python -m
bench.releases`.

Every release is stepped after every rollout, as the gateway does it, at the split of its present stage. *Plain*
releases judge the reward alone, with all of the 5 % that a policy may spend, never promote (`hold_split`) and are
observed for 6,000 rollouts: how often, and when, is the candidate rolled back? *Whole* releases have the default
policy: guards, 2 % for the reward, promotion. Other rules (`bench.release_peers`) see the same rollouts. Figures are
printed beside their targets and written to bench/out/releases.json; a missed target is marked, not hidden. The seed is
printed; a release is drawn from the seed, its scenario and its number alone.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import secrets
import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import comb
from pathlib import Path
from random import Random

from bench import release_peers, release_users
from bench.release_peers import Peer
from bench.release_scenarios import CAUGHT, DROPS, HORIZON, PROMISED, RATE, SCENARIOS, Scenario
from bench.store import Figure, report
from penstock.console.views.pages import drawing
from penstock.console.views.svg import Chart, LineSeries
from penstock.gateway.model.release_policy import EARLY, RampStep
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.evidence import CanaryObservation

OUT = Path(__file__).parent / "out" / "releases.json"
CHUNK = 25
ROLLED_BACK = "share of releases rolled back"
SHOWN = {
    "Penstock": None,
    "t-test after every rollout": "t-test after every rollout",
    "t-test once, at 2,000": "t-test once, at 2,000",
    "Argo-style, windows of 500": "Argo-style, windows of 500, 0.9 of the former rate",
}
"""Peer of each line of a plot, by its name there; None for the canary."""
ENDINGS = {"promote": "promoted", "roll_back": "rolled back", "hold": "held"}
Line = Sequence[tuple[float, float]]
NONE: dict[str, float] = {}
SOUND, FAILED = {"error": 1.0, "violation": 1.0}, {"error": 0.0, "violation": 1.0}


@dataclass
class Ending:
    """The result of one release."""

    action: str
    seen: int
    exposed: int
    """Rollouts on the candidate."""
    alarms: dict[str, int] = field(default_factory=dict[str, int])
    """Rollout at which each peer would have rolled back, by peer."""


# -- one release -----------------------------------------------------------------------------------------------------


class World:
    """Draws the rollouts of one release."""

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self._scenario, self._rng = scenario, rng
        self._skill = [rng.betavariate(RATE, 1 - RATE) / RATE for _ in range(scenario.tasks)]
        self._tables = [_binomial(rate, scenario.checks) for rate in scenario.rates]

    def rollout(self, number: int, stage: RampStep) -> CanaryObservation:
        """Return the next rollout, assigned in `stage`."""
        scenario, chance = self._scenario, self._rng.random
        arm = 1 if chance() < stage.split else 0
        guards = NONE if scenario.errors is None else FAILED if chance() < scenario.errors[arm] else SOUND
        if scenario.tasks:
            task = int(chance() * scenario.tasks)
            reward = 1.0 if chance() < scenario.rates[arm] * self._skill[task] else 0.0
            return CanaryObservation(number, stage.name, arm, stage.split, reward, guards, f"task-{task}")
        if scenario.checks > 1:
            reward = bisect(self._tables[arm], chance()) / scenario.checks
        else:
            rate = scenario.rates[arm] * (1 - scenario.drift * number / HORIZON)
            if arm and scenario.worse_from is not None and number >= scenario.worse_from:
                rate *= 1 - scenario.worse_by
            reward = 1.0 if chance() < rate else 0.0
        if scenario.silent and reward == 0.0 and chance() < scenario.silent:
            return CanaryObservation(number, stage.name, arm, stage.split, None, guards)
        return CanaryObservation(number, stage.name, arm, stage.split, reward, guards)

    def duration(self, one: CanaryObservation) -> float:
        """Return the rollout's duration, in rollouts that start during it."""
        hurried = one.arm and one.reward == 0.0
        return self._rng.expovariate((self._scenario.haste if hurried else 1.0) / self._scenario.running)


def _binomial(rate: float, checks: int) -> list[float]:
    return list(accumulate(comb(checks, k) * rate**k * (1 - rate) ** (checks - k) for k in range(checks)))


def play(scenario: Scenario, rng: Random) -> Ending:
    """Simulate one release from start to end."""
    policy = scenario.policy
    canary = Canary(policy, policy.d(scenario.mean), scenario.srm_alpha, policy.guard_margins(scenario.spreads))
    if scenario.users is not None:
        spent = release_users.play(canary, policy, scenario.users, scenario.rates, scenario.errors or (0.0, 0.0), rng)
        return Ending(canary.verdict.action, spent.rollouts, spent.exposed)
    world = World(scenario, rng)
    if scenario.running:
        _overlapping(canary, world, scenario)
        return _ending(canary, {})
    if scenario.peers:
        return _beside_peers(canary, world, scenario)
    stages, number, early = scenario.policy.ramp, 0, EARLY in canary.evidence.guards
    while not canary.ended:
        one = world.rollout(number, stages[canary.stage])
        number += 1
        # The worst case: every error shows early.
        if not (early and canary.step_early(one.number, one.arm, one.probability, one.guards["error"] or 0.0)):
            canary.step(one)
    return _ending(canary, {})


def _ending(canary: Canary, alarms: dict[str, int]) -> Ending:
    books = canary.evidence.books
    seen, exposed = sum(one.seen for one in books), sum(one.assigned[1] for one in books)
    return Ending(canary.verdict.action, seen, exposed, alarms)


def _beside_peers(canary: Canary, world: World, scenario: Scenario) -> Ending:
    """Simulate a release beside its peers. The ramp goes on for the peers after the canary's end, by the canary's rule,
    which is checked before it."""
    stages = scenario.policy.ramp
    peers: dict[str, Peer] = (
        release_peers.on_a_ramp(scenario.rates[0]) if scenario.peers == "ramp" else release_peers.at_half()
    )
    alarms: dict[str, int] = {}
    place = candidates = 0
    for number in range(HORIZON if scenario.peers == "ramp" else 4000):
        one = world.rollout(number, stages[place])
        for name, peer in list(peers.items()):
            if peer.add(one.arm, one.reward or 0.0):
                alarms[name] = number + 1
                del peers[name]
        if not canary.ended:
            canary.step(one)
        elif not peers:
            break
        candidates += one.arm
        if place < len(stages) - 1 and candidates == stages[place].rollouts:
            place, candidates = place + 1, 0
        assert canary.ended or canary.stage == place
    return _ending(canary, alarms)


def _overlapping(canary: Canary, world: World, scenario: Scenario) -> None:
    """Simulate overlapping rollouts: one starts at every tick; one that takes more than eight mean durations is
    missing."""
    deadline, tick, stages = 8 * scenario.running, 0, scenario.policy.ramp
    ready: list[tuple[float, int, CanaryObservation]] = []
    while not canary.ended:
        one = world.rollout(tick, stages[canary.stage])
        took = world.duration(one)
        if took > deadline:
            one, took = replace(one, reward=None), deadline
        heapq.heappush(ready, (tick + took if scenario.by_completion else tick, tick, one))
        tick += 1
        while ready and not canary.ended and _may_be_looked_at(ready[0], tick, deadline, scenario.by_completion):
            one = heapq.heappop(ready)[2]
            canary.step(replace(one, number=canary.evidence.number + 1))


def _may_be_looked_at(
    first: tuple[float, int, CanaryObservation], tick: int, deadline: float, by_completion: bool
) -> bool:
    return first[0] <= tick if by_completion else first[1] + deadline <= tick


# -- many ------------------------------------------------------------------------------------------------------------


def tried(name: str, seed: int, first: int) -> list[Ending]:
    """Return a chunk of the releases of a scenario."""
    return [play(SCENARIOS[name], Random(f"{seed}/{name}/{number}")) for number in range(first, first + CHUNK)]


@dataclass
class Tried:
    """All releases of a scenario."""

    endings: list[Ending]

    def share(self, action: str) -> float:
        """Return the percentage of releases with this ending."""
        return 100 * sum(one.action == action for one in self.endings) / len(self.endings)

    def median(self, action: str, of: str = "seen") -> float:
        """Return the median of rollouts, or of those on the candidate (`exposed`), of releases with this ending; there
        must be some."""
        return statistics.median(getattr(one, of) for one in self.endings if one.action == action)

    def alarmed(self, peer: str) -> float:
        """Return the percentage of releases that a peer would have rolled back."""
        return 100 * sum(peer in one.alarms for one in self.endings) / len(self.endings)

    def curve(self, peer: str | None = None, until: int = HORIZON) -> list[tuple[float, float]]:
        """Return the share rolled back over rollouts, by a peer or by the canary."""
        ends = [one.alarms.get(peer, HORIZON * 9) for one in self.endings] if peer else self._rollbacks()
        counts = Counter(-(-end // 50) * 50 for end in ends)
        steps = range(0, until + 1, 50)
        return [
            (at, so_far / len(self.endings))
            for at, so_far in zip(steps, accumulate(counts[at] for at in steps), strict=True)
        ]

    def _rollbacks(self) -> list[int]:
        return [one.seen if one.action == "roll_back" else HORIZON * 9 for one in self.endings]


def figures(
    names: Sequence[str], canaries: int, seed: int, processes: int, found: dict[str, Tried]
) -> Iterator[Figure]:
    """Yield the figures of these scenarios, as they are measured; keep the releases in `found` for the plots."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name in names:
            count = max(CHUNK, int(canaries * SCENARIOS[name].part))
            chunks = pool.imap_unordered(partial(tried, name, seed), range(0, count, CHUNK))
            found[name] = one = Tried([ending for chunk in chunks for ending in chunk])
            yield from told(name, one)


def told(name: str, one: Tried) -> Iterator[Figure]:
    """Yield the figures of a scenario, with their targets if there are any."""
    if name.startswith(("whole", "guarded", "low", "silent", "users, whole", "held back", "no holdback")):
        yield from _outcomes(name, one)
    elif name.startswith("beside"):
        yield from _compared(name, one)
    elif "A/A" in name:
        mistaken = SCENARIOS[name].by_completion or SCENARIOS[name].users == "mistake"
        bound = None if mistaken else 5.0
        yield Figure(f"{name}: false rollback", one.share("roll_back"), "%", at_most=bound)
    else:
        share, median, exposed = CAUGHT.get(name, (None, None, None))
        yield Figure(f"{name}: rollback", one.share("roll_back"), "%", at_least=share)
        yield Figure(f"{name}: median", one.median("roll_back"), "rollouts", at_most=median)
        yield Figure(f"{name}: exposed, median", one.median("roll_back", "exposed"), "rollouts", at_most=exposed)


def _outcomes(name: str, one: Tried) -> Iterator[Figure]:
    for action in ("promote", "roll_back", "hold"):
        bound = PROMISED.get((name, action))
        yield Figure(f"{name}: {action.replace('_', ' ')}", one.share(action), "%", at_most=bound)
    if one.share("promote"):
        yield Figure(f"{name}: promote, median", one.median("promote"), "rollouts")
    if SCENARIOS[name].worse_from is not None and one.share("roll_back"):
        yield Figure(f"{name}: roll back, median", one.median("roll_back"), "rollouts")


def _compared(name: str, one: Tried) -> Iterator[Figure]:
    """Yield the rollbacks by Penstock and by other rules on the same rollouts."""
    yield Figure(f"{name}: Penstock", one.share("roll_back"), "%")
    worse = "worse" in name
    if worse:
        yield Figure(f"{name}: Penstock, median", one.median("roll_back"), "rollouts")
    for peer in release_peers.on_a_ramp(RATE) if SCENARIOS[name].peers == "ramp" else release_peers.at_half():
        yield Figure(f"{name}: {peer}", one.alarmed(peer), "%")
        at = [ending.alarms[peer] for ending in one.endings if peer in ending.alarms]
        if at and worse:
            yield Figure(f"{name}: {peer}, median", statistics.median(at), "rollouts")


def plots(found: Mapping[str, Tried], folder: Path) -> None:
    """Write the pages of curves whose scenarios were simulated."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in _pages(found):
        (folder / f"{name}.svg").write_text(page, encoding="utf-8")


def _pages(found: Mapping[str, Tried]) -> Iterator[tuple[str, str]]:
    """Yield (name, page) of each plot."""
    peers = [
        _chart(title, {name: found[scenario].curve(peer) for name, peer in SHOWN.items()}, [("5 %", 5.0)])
        for title, scenario in (
            ("Identical candidate", "beside, equal"),
            ("Identical candidate, all rewards sink by 30 %", "beside, rewards drift by -30 %"),
        )
        if scenario in found
    ]
    if peers:
        yield "canary-peers", drawing({"": peers})
    drops = {f"{name} worse": found[f"drop of {name}"].curve() for name in DROPS if f"drop of {name}" in found}
    if drops:
        yield "canary-drops", drawing({"": [_chart("Worse candidate, 5 % → 20 % → 50 %", drops)]})
    if any(name.startswith("whole") for name in found):
        yield "canary-outcomes", drawing({"": [_outcome_chart(found)]})


def _chart(title: str, shares: Mapping[str, Line], limits: Sequence[tuple[str, float]] = ()) -> Chart:
    """Return a chart of shares over rollouts."""
    lines = [
        LineSeries(name, [(x, share * 100) for x, share in line], style)
        for style, (name, line) in enumerate(shares.items(), 1)
    ]
    return Chart(title, "", lines, "rollouts", ROLLED_BACK, limits=[*limits], bounds=(0, 100), unit=" %")


def _outcome_chart(found: Mapping[str, Tried]) -> Chart:
    whole = {name.split(", ", 1)[1]: one for name, one in found.items() if name.startswith("whole")}
    names = [name.removeprefix("worse by ").removeprefix("the margin, ") for name in whole]
    lines = [
        LineSeries(name, [(float(at), one.share(action)) for at, one in enumerate(whole.values())], style)
        for style, (action, name) in enumerate(ENDINGS.items(), 1)
    ]
    title, across = "What becomes of a release with a margin of 10 %", "candidate worse by"
    return Chart(title, "", lines, across, "share of releases", bounds=(0, 100), names=names, unit=" %")


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a canary is right.")
    parser.add_argument("--canaries", type=int, default=10_000, help="in each scenario")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6) + 1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--plots", type=Path, help="where SVG plots go, those whose scenarios are tried")
    parser.add_argument("--only", nargs="+", default=[""], help="starts of names of scenarios")
    given = parser.parse_args()
    names = [name for name in SCENARIOS if name.startswith(tuple(given.only))]
    print(f"{given.canaries:,} releases a scenario, seed {given.seed}")
    found: dict[str, Tried] = {}
    report(figures(names, given.canaries, given.seed, given.processes, found), OUT)
    if given.plots:
        plots(found, given.plots)


if __name__ == "__main__":
    main()
