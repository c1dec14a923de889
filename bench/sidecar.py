"""python -m bench.sidecar: what a call costs through a sidecar, by our own front and by mitmproxy; docs/benchmarks.md.

Prints a table with the goals and writes bench/out/sidecar.json. Timing never changes the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench import procfs
from bench.__main__ import machine, say
from bench.peers import HERE, sh
from bench.programs import Cores, pin
from bench.sidecar_programs import MITMDUMP, PEERS, Peer, Programs

OUT = HERE / "out" / "sidecar.json"
LIMIT = 300.0
"""Seconds a run may take: no round begins that would not end in time."""
Kind = Literal["keep", "new", "stream"]


@dataclass(frozen=True)
class Case:
    """A kind of traffic, and its number of connections."""

    name: str
    about: str
    kind: Kind
    connections: int


CASES = [
    Case("call_1", "calls on 1 connection that stays", "keep", 1),
    Case("call_16", "calls on 16 connections that stay", "keep", 16),
    Case("stream_4", "streams on 4 connections; the time is the age of the first event", "stream", 4),
    Case("new_1", "calls, each on a connection of its own: tunnel and handshakes too", "new", 1),
]


@dataclass(frozen=True)
class Goal:
    """Bounds for one peer, in the cases that they are for."""

    cpu_ms: float
    rss_mb: float
    first_us: float = 5000.0
    """Bound of the addition to the age of the first event, at p99."""
    per_second: float | None = None


GOALS = {"own": Goal(cpu_ms=0.35, rss_mb=45.0, per_second=1000.0), "mitmproxy": Goal(cpu_ms=1.5, rss_mb=120.0)}


@dataclass
class Cell:
    """One measurement. CPU in milliseconds a call: of the sidecar, and of the gateway as well."""

    cpu_ms: float | None
    all_ms: float | None
    p50_us: float
    p99_us: float
    per_second: float
    rss_mb: float | None
    foreign: float
    complaints: list[str] = field(default_factory=list[str])


Cells = dict[str, dict[str, list[Cell]]]


@dataclass(frozen=True)
class Bench:
    """The programs and settings that all measurements share."""

    programs: Programs
    cores: Cores
    seconds: float

    def take(self, peer: Peer, case: Case) -> Cell:
        """Measure one peer in one case."""
        programs = self.programs
        running = programs.running[peer.name]
        answered, recorded, before = programs.answered(), programs.recorded(), self._clocks()
        spent = {pid: procfs.own_seconds(pid) for pid in (*running.pids, programs.gateway.pid)}
        result = self._load(running.port, running.trust, case)
        programs.gateway.settle()
        used = {pid: procfs.own_seconds(pid) - then for pid, then in spent.items()}
        wall, busy, ours = (now - then for now, then in zip(self._clocks(), before, strict=True))
        calls, gateway = result["calls"], used.pop(programs.gateway.pid)
        complaints = [f"{result['errors']} calls failed: {result['error']}"] if result["errors"] else []
        if programs.answered() - answered != calls + result["errors"]:
            complaints.append(f"{calls} calls made {programs.answered() - answered} at the host")
        if peer.recorded and programs.recorded() - recorded < calls:
            complaints.append(f"{programs.recorded() - recorded} of {calls} calls were recorded")
        cpu = 1000 * sum(used.values()) / max(calls, 1)
        memory = sum(dict(procfs.status(pid)).get("VmRSS:", 0) for pid in running.pids) / 1024
        return Cell(
            cpu if running.pids else None,
            cpu + 1000 * gateway / max(calls, 1) if running.pids else None,
            result["p50_us"],
            result["p99_us"],
            calls / result["seconds"],
            memory or None,
            (busy - ours - sum(used.values()) - gateway) / wall,
            complaints,
        )

    def _load(self, proxy: int, trust: Path, case: Case) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.sidecar_load", "--host", str(self.programs.host.port)]
        command += ["--proxy", str(proxy), "--trust", str(trust), "--kind", case.kind]
        command += ["--connections", str(case.connections), "--seconds", str(self.seconds)]
        where = pin(self.cores.load)
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=HERE.parent, preexec_fn=where)
        return json.loads(done.stdout)

    def _clocks(self) -> tuple[float, float, float]:
        """Return seconds: wall, both cores, and CPU of our processes except sidecars and gateway."""
        busy = sum(map(procfs.core_busy_seconds, {self.cores.gateway, self.cores.load}))
        return time.monotonic(), busy, procfs.own_seconds(self.programs.host.pid) + procfs.own_seconds(os.getpid())


def measure(bench: Bench, peers: list[Peer], rounds: int, until: float) -> tuple[Cells, int]:
    """Take all measurements; return them and the number of rounds. The peers take turns within every case of every
    round; the first one rotates."""
    cells: Cells = {}
    took = 0.0
    for turn in range(rounds):
        began = time.monotonic()
        if began + took > until:
            return cells, turn
        first = turn % len(peers)
        for case in CASES:
            for peer in peers[first:] + peers[:first]:
                say(f"round {turn + 1}: {case.name} {peer.name}")
                cells.setdefault(case.name, {}).setdefault(peer.name, []).append(bench.take(peer, case))
        took = time.monotonic() - began
    return cells, rounds


def middle(cells: list[Cell]) -> dict[str, float | None]:
    """Return the medians over the rounds."""
    names = ("cpu_ms", "all_ms", "p50_us", "p99_us", "per_second", "rss_mb", "foreign")
    values = {name: [value for cell in cells if (value := getattr(cell, name)) is not None] for name in names}
    return {name: median(found) if found else None for name, found in values.items()}


def figures(cells: Cells) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return {case: {peer: medians}}; latencies of peers are added to `direct`'s."""
    tree = {case: {peer: middle(each) for peer, each in peers.items()} for case, peers in cells.items()}
    for peers in tree.values():
        for name in ("p50_us", "p99_us"):
            base = peers["direct"][name] or 0.0
            for peer, found in peers.items():
                if peer != "direct":
                    found[name] = (found[name] or 0.0) - base
    return tree


def verdicts(case: str, peer: str, found: dict[str, float | None]) -> str:
    """Return which goals are reached."""
    goal = GOALS.get(peer)
    if goal is None:
        return ""
    told: list[str] = []
    if case == "call_16":
        told.append(verdict(f"CPU <= {goal.cpu_ms:g}", (found["cpu_ms"] or 0.0) <= goal.cpu_ms))
        told.append(verdict(f"RSS <= {goal.rss_mb:g}", (found["rss_mb"] or 0.0) <= goal.rss_mb))
        if goal.per_second is not None:
            told.append(verdict(f"per s >= {goal.per_second:,.0f}", (found["per_second"] or 0.0) >= goal.per_second))
    if case == "stream_4":
        told.append(verdict(f"p99 <= {goal.first_us:,.0f}", (found["p99_us"] or 0.0) <= goal.first_us))
    return ", ".join(told)


def verdict(bound: str, held: bool) -> str:
    """Return a goal with "reached" or "NOT reached"."""
    return f"{bound} {'reached' if held else 'NOT reached'}"


def table(cells: Cells) -> list[str]:
    """Return the table as Markdown."""
    rows = ["| case | by | CPU ms | x own | with gateway | p50 us | p99 us | per s | RSS MB | goal |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for case, peers in figures(cells).items():
        own = peers["own"]["cpu_ms"]
        for peer, found in peers.items():
            cpu = found["cpu_ms"]
            ratio = cpu / own if cpu and own else None
            columns = [number(cpu, 3), number(ratio, 2), number(found["all_ms"], 3), number(found["p50_us"])]
            columns += [number(found["p99_us"]), number(found["per_second"]), number(found["rss_mb"])]
            rows.append("| " + " | ".join([case, peer, *columns, verdicts(case, peer, found)]) + " |")
    return rows


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with thousands separated; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def complaints(cells: Cells) -> list[str]:
    """Return notes that decide if the figures can be believed."""
    each = [(case, peer, cell) for case, peers in cells.items() for peer, cells_ in peers.items() for cell in cells_]
    loud = [cell.foreign for _, _, cell in each if cell.foreign > 0.1]
    found = [f"{case}, {peer}: {complaint}" for case, peer, cell in each for complaint in cell.complaints]
    if loud:
        found.append(
            f"NOISE: in {len(loud)} of {len(each)} measurements others used more than a tenth of a core "
            f"({max(loud):.0%} at most): repeat on a quiet machine before believing the latencies"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sidecar", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make install-mitmproxy first, if it is missing")
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer takes its turn (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of short measurements")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    options = parser.parse_args()
    began, notes = time.monotonic(), list[str]()
    if options.install and not MITMDUMP.exists():
        try:
            sh("make", "install-mitmproxy", cwd=HERE.parent)
        except (RuntimeError, OSError) as error:
            notes.append(f"mitmproxy cannot be installed: {error}")
    peers = [peer for peer in PEERS if MITMDUMP.exists() or not peer.mitmproxy]
    if len(peers) < len(PEERS):
        notes.append("mitmproxy is not here: --install gets it")
    cores = Cores.choose()
    os.sched_setaffinity(0, {cores.load})
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    with ExitStack() as stack:
        programs = Programs.start(peers, cores, stack)
        bench = Bench(programs, cores, seconds)
        measure(Bench(programs, cores, 0.5), peers, 1, began + LIMIT)  # a warm-up, which does not count
        cells, done = measure(bench, peers, rounds, began + LIMIT)
    say("")
    print("\n".join(table(cells)))
    print("\nCPU: the sidecar's, a call. p50, p99: added to direct's, which has its own.")
    for case in CASES:
        print(f"{case.name}: {case.about}")
    notes = [machine(cores), *notes, f"{done} rounds, {time.monotonic() - began:.0f} s", *complaints(cells)]
    print("\n".join(notes))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures(cells), indent=2) + "\n")
    print(f"as JSON in {options.out}")


if __name__ == "__main__":
    main()
