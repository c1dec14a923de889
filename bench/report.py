"""Medians over the rounds, one table with ratios and targets, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import procfs
from bench.cases import IDLE, IMPLICIT_RATIO, Case, Target
from bench.measure import NOISE, Cell, Cells

OURS, IMPLICIT = "penstock", "implicit"
COLUMNS = ["case", "peer", "CPU ms", "x bare", "p50 us", "p99 us", "per s", "RSS MB", "anon MB", "target"]


@dataclass(frozen=True)
class Idle:
    """A peer after its start: medians over its starts."""

    ready_ms: float
    rss_mb: float
    anon_mb: float


@dataclass(frozen=True)
class Rest:
    """A peer's memory after all its cases and a minute later, and its CPU in the second half of that minute."""

    loaded: procfs.Memory
    later: procfs.Memory
    cpu_ms: float
    """Milliseconds in each second."""


@dataclass(frozen=True)
class Results:
    """The cells and notes of a run."""

    cases: list[Case]
    cells: Cells
    idle: dict[str, Idle]
    notes: list[str]
    """Missing peers, size of the tape and the like."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions by name of the peer."""
    rest: dict[str, Rest] = field(default_factory=dict[str, Rest])

    def label(self, peer: str) -> str:
        """Return a peer's name in the table."""
        return f"{peer} {self.versions.get(peer, '')}".strip()


def middle(cells: list[Cell], name: str) -> float | None:
    """Return the median of one figure over the rounds that have it."""
    values = [value for cell in cells if (value := getattr(cell, name)) is not None]
    return median(values) if values else None


def table(results: Results) -> str:
    """Return the table, and below it the complaints."""
    rows = [row for case in results.cases for row in case_rows(case, results.cells[case.name])]
    rows += [idle_row(peer, idle) for peer, idle in results.idle.items()]
    rows += [row for peer, rest in results.rest.items() for row in rest_rows(peer, rest)]
    rows = [[case, results.label(peer), *figures] for case, peer, *figures in rows]
    about = [f"{case.name}: {case.about}" for case in results.cases]
    legend = "CPU: gateway, per call or event; x bare: relative to bare's. p50, p99: added to direct's, which has rows."
    return "\n".join([*markdown(rows), "", *about, legend, *complaints(results)])


def case_rows(case: Case, cells: dict[str, list[Cell]]) -> Iterable[list[str]]:
    """Yield one row per peer."""
    bare = middle(cells.get("bare", []), "cpu_ms")
    for peer, rounds in cells.items():
        cpu, p50, p99 = (middle(rounds, name) for name in ("cpu_ms", "p50_us", "p99_us"))
        ratio = cpu / bare if cpu and bare else None
        told = judge(case.target, ratio, cpu, p50, p99) if peer == OURS else ""
        if peer == IMPLICIT and case.alike:
            told = beside(cpu, middle(cells.get(OURS, []), "cpu_ms"))
        speed, rss, anon = (middle(rounds, name) for name in ("per_second", "rss_mb", "anon_mb"))
        figures = [number(cpu, 4), number(ratio, 2), number(p50), number(p99), number(speed), number(rss), number(anon)]
        yield [case.name, peer, *figures, told]


def beside(cpu: float | None, addressed: float | None) -> str:
    """Return the cost of a call without an address relative to one with an address, with its verdict."""
    ratio = cpu / addressed if cpu and addressed else None
    return f"{number(ratio, 2)} x penstock; {verdict('x', IMPLICIT_RATIO, ratio)}" if ratio else ""


def idle_row(peer: str, idle: Idle) -> list[str]:
    """Return memory and start of one peer."""
    target = verdict("RSS MB", IDLE.rss_mb, idle.rss_mb), verdict("ready ms", IDLE.ready_ms, idle.ready_ms)
    words = f"ready {idle.ready_ms:,.0f} ms" + (f"; {', '.join(target)}" if peer == OURS else "")
    return ["idle", peer, "", "", "", "", "", number(idle.rss_mb), number(idle.anon_mb), words]


def rest_rows(peer: str, rest: Rest) -> Iterable[list[str]]:
    """Yield memory after all cases and memory a minute later, with the CPU of a peer that nobody calls."""
    for name, memory, words in (("loaded", rest.loaded, ""), ("rested", rest.later, f"CPU {rest.cpu_ms:.1f} ms/s")):
        yield [name, peer, "", "", "", "", "", number(memory.total), number(memory.anonymous), words]


def judge(target: Target, ratio: float | None, cpu: float | None, p50: float | None, p99: float | None) -> str:
    """Return the verdicts on a case's targets."""
    found = [("x", target.cpu_ratio, ratio), ("CPU ms", target.cpu_ms, cpu)]
    found += [("p50", target.p50_us, p50), ("p99", target.p99_us, p99)]
    return ", ".join(verdict(*each) for each in found if each[1] is not None)


def verdict(name: str, bound: float | None, value: float | None) -> str:
    """Return `p50 <= 160 reached`, or not."""
    outcome = "not measured" if value is None or bound is None else "reached" if value <= bound else "NOT reached"
    return f"{name} <= {bound:g} {outcome}"


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with thousands separated; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def markdown(rows: list[list[str]], columns: list[str] = COLUMNS) -> list[str]:
    """Return an aligned Markdown table: words to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    words = {i for i, column in enumerate(columns) if column in ("case", "peer", "target")}
    rule = ["-" * width if i in words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(row: list[str]) -> str:
        padded = [row[i].ljust(width) if i in words else row[i].rjust(width) for i, width in enumerate(widths)]
        return "| " + " | ".join(padded) + " |"

    return [line(columns), line(rule), *(line(row) for row in rows)]


def complaints(results: Results) -> list[str]:
    """Return notes that decide if the figures can be believed."""
    found = [
        f"{case}, {peer}, round {round_}: {complaint}"
        for case, peers in results.cells.items()
        for peer, cells in peers.items()
        for round_, cell in enumerate(cells, 1)
        for complaint in cell.complaints or ([f"{cell.errors} calls failed"] if cell.errors else [])
    ]
    return [*results.notes, *noise(results.cells), *found]


def noise(cells: Cells) -> list[str]:
    """Return a warning if the machine was not quiet."""
    shares = [cell.foreign for peers in cells.values() for rounds in peers.values() for cell in rounds]
    loud = [share for share in shares if share > NOISE]
    if not loud:
        return []
    return [
        f"NOISE: in {len(loud)} of {len(shares)} measurements others used more than {NOISE:.0%} of one of the cores "
        f"({max(loud):.0%} at most): repeat on a quiet machine before believing the latencies"
    ]


def as_json(results: Results) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Return {case: {peer: figures}}; p50 and p99 of `direct` are its own, those of the others are added to it."""
    names = ("cpu_ms", "p50_us", "p99_us", "rss_mb", "anon_mb", "per_second", "foreign")
    tree: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for case, peers in results.cells.items():
        for peer, cells in peers.items():
            figures = {name: middle(cells, name) for name in names}
            tree.setdefault(case, {})[peer] = {**figures, "errors": sum(cell.errors for cell in cells)}
    empty: dict[str, float | int | None] = dict.fromkeys(names)
    for peer, idle in results.idle.items():
        figures = {**empty, "rss_mb": idle.rss_mb, "anon_mb": idle.anon_mb, "ready_ms": idle.ready_ms}
        tree.setdefault("idle", {})[peer] = figures
    for peer, rest in results.rest.items():
        for name, memory in (("loaded", rest.loaded), ("rested", rest.later)):
            tree.setdefault(name, {})[peer] = {**empty, "rss_mb": memory.total, "anon_mb": memory.anonymous}
        tree["rested"][peer]["idle_ms"] = rest.cpu_ms
    return tree


def write(results: Results, path: Path) -> None:
    """Write the results as JSON, for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(results), indent=2) + "\n")
