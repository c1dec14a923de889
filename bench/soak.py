"""python -m bench.soak --calls 1000000: does Penstock grow, does it slow down?

Drives the calls of chat_1k through one gateway at 16 connections, in intervals. After each it samples memory, speed and
CPU into bench/out/soak.csv. At the end: a line per figure, and the growth of memory per 100,000 calls as the slope of
a straight line through the second half, when caches have filled. Anonymous memory is the one to watch: the total also
holds pages of the tape that the system keeps mapped and gives back when others need memory.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import linear_regression, mean

from bench import corpus, procfs, programs
from bench.cases import CASES
from bench.peers import BUILD, HERE, PEERS, Peer
from bench.programs import Cores, Gateway, Mock

OUT = HERE / "out" / "soak.csv"
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


@dataclass(frozen=True)
class Sample:
    """After one interval."""

    calls: int
    """Since the start."""
    seconds: float
    """Since the start."""
    per_second: float
    p99_us: float
    cpu_ms: float
    """Per call."""
    rss_mb: float
    anon_mb: float
    disk_mb: float
    recorded: int
    errors: int


class Soak:
    """One gateway under steady load."""

    def __init__(self, gateway: Gateway, mock: Mock, cores: Cores, material: corpus.Material) -> None:
        self._gateway, self._cores = gateway, cores
        headers = [part for line in gateway.peer.headers(mock.port) for part in ("--header", line)]
        traffic = CASES[0].traffic(material, gateway.peer.exact)
        self._arguments = [*traffic, "--path", gateway.peer.path, *headers, "--connections", "16"]
        self._began = time.monotonic()
        self._calls = 0

    def interval(self, calls: int) -> Sample:
        """So many calls more, and what became of the gateway."""
        gateway = self._gateway
        cpu = procfs.cpu_seconds(gateway.pid)
        more = ["--calls", str(calls), "--run", f"s{os.getpid():x}-{self._calls}"]
        result = programs.load(gateway.start.port, self._cores.load, [*self._arguments, *more])
        cpu = gateway.settle() - cpu
        self._calls += result["calls"]
        latency = result["latency_us"] or {"p99": 0.0}
        memory = procfs.memory(gateway.pid)
        return Sample(
            calls=self._calls,
            seconds=round(time.monotonic() - self._began, 2),
            per_second=result["per_second"],
            p99_us=latency["p99"],
            cpu_ms=round(cpu * 1000 / max(1, result["calls"]), 4),
            rss_mb=round(memory.total, 2),
            anon_mb=round(memory.anonymous, 2),
            disk_mb=round(gateway.stored_bytes() / 1e6, 1),
            recorded=gateway.recorded() or 0,
            errors=result["errors"],
        )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1_000_000, help="how many in all (default: 1,000,000)")
    parser.add_argument("--every", type=int, default=20_000, help="calls between two samples (default: 20,000)")
    parser.add_argument("--peer", default="penstock", choices=[peer.name for peer in PEERS], help="what to soak")
    parser.add_argument("--out", type=Path, default=OUT, help="where the CSV goes")
    return parser.parse_args()


def spark(values: list[float]) -> str:
    """A line of bars from the lowest to the highest value, at most WIDTH of them."""
    step = max(1, -(-len(values) // WIDTH))
    means = [mean(values[at : at + step]) for at in range(0, len(values), step)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(7, int((value - low) / span * 8))] for value in means)


def growth(samples: list[Sample], figure: Callable[[Sample], float]) -> float:
    """Slope per 100,000 calls over the second half."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    return linear_regression([sample.calls for sample in half], [figure(sample) for sample in half]).slope * 100_000


def report(samples: list[Sample]) -> str:
    """Sparklines and slopes."""
    last, tenth = samples[-1], max(1, len(samples) // 10)
    lines = [
        f"{last.calls:,} calls in {last.seconds:,.0f} s, {last.recorded:,} recorded, {last.disk_mb:,.0f} MB on disk"
    ]
    for name, unit in (("anon_mb", "MB"), ("rss_mb", "MB"), ("per_second", "calls/s"), ("cpu_ms", "ms/call")):
        values = [float(getattr(sample, name)) for sample in samples]
        first, end = mean(values[:tenth]), mean(values[-tenth:])
        digits = 0 if end > 1000 else 1 if end > 1 else 3
        ends = f"{first:,.{digits}f} -> {end:,.{digits}f} {unit}"
        lines.append(f"{name:10} {spark(values)} {ends}")
    anon, total = growth(samples, lambda sample: sample.anon_mb), growth(samples, lambda sample: sample.rss_mb)
    lines.append(f"growth per 100,000 calls, second half: anonymous {anon:+.2f} MB, total {total:+.2f} MB")
    if failed := sum(sample.errors for sample in samples):
        lines.append(f"{failed} calls FAILED")
    return "\n".join(lines)


def run(options: argparse.Namespace, peer: Peer) -> list[Sample]:
    """All intervals, written down as they come."""
    cores, samples = Cores.choose(), list[Sample]()
    os.sched_setaffinity(0, {cores.load})
    programs.build()
    material = corpus.write(BUILD / "corpus")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with programs.mock(material.folder, cores) as mock, closing(Gateway(peer, mock.port, cores)) as gateway:
        gateway.wait_ready()
        soak = Soak(gateway, mock, cores, material)
        with options.out.open("w", newline="") as file:
            rows = csv.DictWriter(file, [each.name for each in fields(Sample)])
            rows.writeheader()
            while not samples or samples[-1].calls < options.calls:
                samples.append(soak.interval(options.every))
                rows.writerow(asdict(samples[-1]))
                file.flush()
                print(progress(samples[-1]))
                if samples[-1].errors:
                    break
    return samples


def progress(sample: Sample) -> str:
    """One line per interval."""
    speed = f"{sample.per_second:,.0f}/s, {sample.cpu_ms:.3f} ms, p99 {sample.p99_us:,.0f} us"
    memory = f"{sample.anon_mb:.1f} MB anonymous, {sample.rss_mb:.1f} MB resident, {sample.disk_mb:,.0f} MB on disk"
    return f"{sample.calls:>10,} calls: {speed}; {memory}"


def main() -> None:
    """Soak, write, print."""
    options = arguments()
    samples = run(options, next(peer for peer in PEERS if peer.name == options.peer))
    print(report(samples))
    print(f"as CSV in {options.out}")


if __name__ == "__main__":
    main()
