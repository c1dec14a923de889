"""Prints the results of a soak, a line per figure. Pure.

Memory is judged within the life of one process, because a restart begins anew, and in the last third of it: until then
caches with a bound in bytes fill. The last to be full is that of conversations whose rollout is found, after 450,000
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import linear_regression, mean, median

from bench.soak.account import Account
from bench.soak.harness import Outcome
from bench.soak.kinds import KINDS
from bench.soak.samples import Sample

FLAT_MB, SLOWER = 1.0, 1.1
"""MB of growth per 100,000 calls that count as flat, and the factor that counts as no slower. Neither decides the exit
status."""
MINUTE_S = 60.0
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


def report(outcome: Outcome) -> str:
    """Return all figures, a line each."""
    samples = outcome.samples
    last = samples[-1]
    lines = [f"{last.calls:,} calls in {last.seconds:,.0f} s, {last.disk_mb:,.0f} MB on disk"]
    lines += [f"{name:10} {spark([figure(one) for one in samples])}" for name, figure in SHOWN.items()]
    lines += [_life(life) for life in lives(samples)]
    lines += [_minutes(samples), "", *_kinds(outcome), "", *_account(outcome.account)]
    return "\n".join(lines)


SHOWN: dict[str, Callable[[Sample], float]] = {
    "anon_mb": lambda one: one.anon_mb,
    "per_second": lambda one: one.per_second,
    "cpu_ms": lambda one: one.cpu_ms,
    "p99_ms": lambda one: one.fast.p99,
}


def spark(values: list[float]) -> str:
    """Return a line of bars from the lowest to the highest value, at most WIDTH of them."""
    step = max(1, -(-len(values) // WIDTH))
    means = [mean(values[at : at + step]) for at in range(0, len(values), step)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    bars = "".join(BARS[min(7, int((value - low) / span * 8))] for value in means)
    return f"{bars} {min(values):,.4g} to {max(values):,.4g}"


def lives(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return samples by their process, without samples of several processes."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.whole:
            found.setdefault(sample.life, []).append(sample)
    return list(found.values())


def growth(life: Sequence[Sample]) -> float | None:
    """Return MB of anonymous memory per 100,000 calls over the last third of a life; None if it was too short."""
    end = life[-(len(life) // 3) :]
    if len(end) < 4:
        return None
    return linear_regression([one.calls for one in end], [one.anon_mb for one in end]).slope * 100_000


def _life(life: list[Sample]) -> str:
    first, last, slope = life[0], life[-1], growth(life)
    said = f"process {first.life + 1}: {last.calls - first.calls:,} calls, {first.anon_mb:.1f} -> {last.anon_mb:.1f} MB"
    if slope is None:
        return said
    return f"{said}, {slope:+.2f} MB per 100,000 calls in its last third (flat: {_reached(slope <= FLAT_MB)})"


def _minutes(samples: Sequence[Sample]) -> str:
    """Compare the first minute with the last; of a run shorter than two minutes its halves."""
    whole = [one for one in samples if one.whole]
    length = min(MINUTE_S, samples[-1].seconds / 2)
    first = [one for one in whole if one.seconds <= length] or whole[:1]
    last = [one for one in whole if one.seconds > samples[-1].seconds - length] or whole[-1:]
    ends = {name: (mean(map(of, first)), mean(map(of, last))) for name, of in COMPARED.items()}
    said = ", ".join(f"{name} {begin:,.4g} -> {end:,.4g}" for name, (begin, end) in ends.items())
    begin, end = ends["CPU ms/call"]
    return f"first {length:.0f} s against the last: {said} (as fast by CPU: {_reached(end <= begin * SLOWER)})"


COMPARED: dict[str, Callable[[Sample], float]] = {
    "calls/s": lambda one: one.per_second,
    "CPU ms/call": lambda one: one.cpu_ms,
    "p50 ms": lambda one: one.fast.p50,
    "p99 ms": lambda one: one.fast.p99,
}


def _reached(good: bool) -> str:
    return "reached" if good else "NOT reached"


def _kinds(outcome: Outcome) -> list[str]:
    """Return a line for each kind: its calls, the medians of its latencies over intervals, and its ends on the tape."""
    lines = [f"{'kind':16} {'calls':>9} {'p50 ms':>8} {'p99 ms':>8}  on the tape"]
    for kind in KINDS:
        found = [one.kinds[kind.name] for one in outcome.samples if kind.name in one.kinds]
        ends = {end: count for (name, end), count in sorted(outcome.account.ends.items()) if name == kind.name}
        times = (
            f"{median(one.p50 for one in found):8.1f} {median(one.p99 for one in found):8.1f}" if found else " " * 17
        )
        told = ", ".join(f"{count:,} {end}" for end, count in ends.items())
        lines.append(f"{kind.name:16} {sum(ends.values()):>9,} {times}  {told}")
    return lines


def _account(account: Account) -> list[str]:
    """Return the lines of the account."""
    absent = f"{account.absent} absent (the first began {account.absent_s:.3f} s before its kill)"
    unended = f"{account.unended} of them answered (at most {account.unended_s:.3f} s before)"
    return [
        f"at kills: {absent}, {account.interrupted} interrupted, {unended}, {account.cut} with another end,"
        f" {account.unsent} not sent",
        f"{account.wrong} calls not accounted for",
        *account.problems,
    ]
