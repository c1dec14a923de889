"""The measurements during a soak: a sample every so many calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from bench.soak.kinds import KINDS, Seen
from bench.soak.served import Served


@dataclass(frozen=True)
class Latency:
    """Latencies of the calls of one kind in an interval; ms."""

    calls: int
    p50: float
    p99: float
    unexpected: int
    """Calls whose client did not see the expected end."""


@dataclass(frozen=True)
class Sample:
    """The figures of one interval."""

    calls: int
    """Calls since the start of the soak."""
    seconds: float
    """Seconds since the start of the soak."""
    life: int
    """Number of the gateway's process: a kill and a reload each begin another."""
    whole: bool
    """True if one process has served all of the interval."""
    per_second: float
    cpu_ms: float
    """CPU of the gateway per call; 0 if it was killed in the interval."""
    rss_mb: float
    anon_mb: float
    disk_mb: float
    fast: Latency
    """Latencies of calls whose provider does not make them wait."""
    kinds: dict[str, Latency]

    def row(self) -> dict[str, Any]:
        """Return the sample for JSON."""
        return asdict(self)


@dataclass
class Sampler:
    """Collects the calls of an interval and makes a sample of them."""

    served: Served
    life: int = 0
    began: float = field(default_factory=monotonic)
    _at: tuple[int, float, float] = (0, 0.0, 0.0)
    """Calls, seconds and CPU seconds at the last sample."""
    _life: int = 0
    """`life` at the last sample."""
    _took: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _unexpected: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def begin(self) -> None:
        """Note that the gateway has started: its start does not count."""
        self._at = (0, monotonic() - self.began, self.served.cpu())

    def note(self, kind: int, seen: Seen, took: float) -> None:
        """Note a call that is over."""
        self._took[kind].append(took)
        if seen != KINDS[kind].sees:
            self._unexpected[kind] += 1

    def sample(self, calls: int) -> Sample:
        """Return the figures since the last sample."""
        before, begun, spent = self._at
        seconds, cpu, memory = monotonic() - self.began, self.served.cpu(), self.served.memory()
        whole, used = self._life == self.life, cpu - spent
        self._at, self._life = (calls, seconds, cpu), self.life
        took, self._took = self._took, defaultdict(list)
        wrong, self._unexpected = self._unexpected, defaultdict(int)
        fast = [one for kind, all_ in took.items() if not KINDS[kind].waits for one in all_]
        return Sample(
            calls=calls,
            seconds=round(seconds, 2),
            life=self.life,
            whole=whole,
            per_second=round((calls - before) / (seconds - begun), 1),
            cpu_ms=round(max(0.0, used) * 1000 / max(1, calls - before), 4),
            rss_mb=round(memory.total, 2),
            anon_mb=round(memory.anonymous, 2),
            disk_mb=round(self.served.stored_mb(), 1),
            fast=_latency(fast, sum(count for kind, count in wrong.items() if not KINDS[kind].waits)),
            kinds={KINDS[kind].name: _latency(times, wrong[kind]) for kind, times in sorted(took.items())},
        )


def _latency(times: list[float], unexpected: int) -> Latency:
    ordered = sorted(times) or [0.0]
    p50, p99 = (round(ordered[int(len(ordered) * share)] * 1000, 3) for share in (0.5, 0.99))
    return Latency(len(times), p50, p99, unexpected)


def progress(sample: Sample) -> str:
    """Return a sample as one line."""
    speed = (
        f"{sample.per_second:,.0f}/s, {sample.cpu_ms:.3f} ms, p50 {sample.fast.p50:.1f} p99 {sample.fast.p99:.1f} ms"
    )
    memory = f"{sample.anon_mb:.1f} MB anonymous, {sample.rss_mb:.1f} MB resident, {sample.disk_mb:,.0f} MB on disk"
    wrong = sum(one.unexpected for one in sample.kinds.values())
    return f"{sample.calls:>10,} calls: {speed}; {memory}" + (f"; {wrong} not as planned" if wrong else "")
