"""Measures one cell after the other: a peer, a case, one run of the load generator, and its cost.

The peers take turns within every case of every round, in an order that rotates with the round, so that a change of the
machine's speed hits all of them. A cell ends when the gateway has nothing left to do: writes to Penstock's tape after
the last answer count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Any

from bench import procfs
from bench.cases import Case
from bench.corpus import Material
from bench.programs import Cores, Gateway, Mock, answered, load

NOISE = 0.1
"""A cell is measured once more when others used more than this share of a core, and the quieter one counts."""
SLOW_SECONDS = 8.0
"""A peer's case that takes longer than this is measured in one round only."""
CANNOT = 1.2
"""An open loop is left out for a peer that reached less than this times the rate in the closed loop."""


@dataclass
class Cell:
    """The figures of one measurement of one peer. Times in the units of their names; None where there is no figure."""

    cpu_ms: float | None
    p50_us: float | None
    p99_us: float | None
    rss_mb: float | None
    anon_mb: float | None
    per_second: float
    errors: int
    foreign: float = 0.0
    complaints: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Bench:
    """The settings that all cells share."""

    mock: Mock
    cores: Cores
    material: Material
    scale: float
    run: str
    """Prefix of the rollout ids of this run."""
    repeat_until: float
    """Disturbed cells are not repeated after this time (monotonic)."""
    calls: int = 0
    """Calls of each measurement under load; 0: as many as fit into its time."""
    serial: count[int] = field(default_factory=count)

    def direct(self, case: Case) -> Cell:
        """Measure the load generator against the mock, without a gateway between them."""
        traffic = self.straight(case)
        port, core = self.mock.port, self.cores.load
        loaded = load(port, core, [*traffic, *case.loaded(self.scale, self.calls)])
        alone = load(port, core, [*traffic, *case.alone(self.scale)]) if case.alone_seconds else loaded
        speed = per_second(case, loaded, self.scale)
        return Cell(None, *latency(case, alone), None, None, speed, loaded["errors"] + alone["errors"])

    def straight(self, case: Case) -> list[str]:
        """Return arguments of the load generator for requests to the mock."""
        return case.traffic(self.material, exact=True)

    def through(self, gateway: Gateway, case: Case) -> Cell:
        """Measure the load generator against a gateway."""
        arguments = self.arguments(gateway, case)
        bill = self._billed(gateway, [*arguments, *self._fresh(), *case.loaded(self.scale, self.calls)])
        alone = bill.result
        if case.alone_seconds:
            lone = [*arguments, *self._fresh(), *case.alone(self.scale)]
            alone = load(gateway.start.port, self.cores.load, lone)
        cell = bill.cell(case, per_second(case, bill.result, self.scale))
        cell.p50_us, cell.p99_us = latency(case, alone)
        if alone is not bill.result:
            cell.errors += alone["errors"]
        return cell

    def _fresh(self) -> list[str]:
        """Return new names for rollouts."""
        return ["--run", f"{self.run}-{next(self.serial)}"]

    def arguments(self, gateway: Gateway, case: Case) -> list[str]:
        """Return arguments of the load generator for requests to this gateway."""
        peer = gateway.peer
        headers = [part for line in peer.headers(self.mock.port) for part in ("--header", line)]
        return [*case.traffic(self.material, peer.exact), "--path", peer.path, *headers]

    def warm_up(self, gateway: Gateway, case: Case) -> None:
        """Make calls that do not count: compilers learn, connections open."""
        arguments = [*self.arguments(gateway, case), *self._fresh(), "--connections", "16"]
        load(gateway.start.port, self.cores.load, [*arguments, "--seconds", str(gateway.peer.warm_seconds)])

    def _billed(self, gateway: Gateway, arguments: list[str]) -> Bill:
        recorded, upstream = gateway.recorded(), answered(self.mock.port)
        before = self._clocks(gateway)
        result = load(gateway.start.port, self.cores.load, arguments)
        gateway.settle()
        spent = self._clocks(gateway).since(before)
        written = None if recorded is None else (gateway.recorded() or 0) - recorded
        called = answered(self.mock.port) - upstream
        return Bill(result, spent, procfs.memory(gateway.pid), written, called)

    def _clocks(self, gateway: Gateway) -> Clocks:
        own = procfs.own_seconds(self.mock.pid) + procfs.own_seconds(os.getpid())
        busy = [procfs.core_busy_seconds(core) for core in (self.cores.gateway, self.cores.load)]
        return Clocks(time.monotonic(), procfs.cpu_seconds(gateway.pid), own, *busy)


@dataclass(frozen=True)
class Clocks:
    """Times so far, in seconds; `since` returns the differences."""

    wall: float
    gateway: float
    ours: float
    """CPU of mock, load generator and this process."""
    gateway_core: float
    load_core: float

    def since(self, before: Clocks) -> Clocks:
        """Return the times between two readings."""
        return Clocks(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def foreign(self) -> float:
        """Share of the busier of both cores that other processes used."""
        return max(self.gateway_core - self.gateway, self.load_core - self.ours) / self.wall


@dataclass(frozen=True)
class Bill:
    """The load generator's result and the gateway's use during it."""

    result: dict[str, Any]
    spent: Clocks
    memory: procfs.Memory
    recorded: int | None
    called: int
    """Calls that reached the mock."""

    def cell(self, case: Case, speed: float) -> Cell:
        """Return the result as a cell without latencies."""
        result = self.result
        count = result["events"] if case.unit == "event" else result["calls"]
        cpu_ms = self.spent.gateway * 1000 / count if count else None
        memory = self.memory.total, self.memory.anonymous
        return Cell(cpu_ms, None, None, *memory, speed, result["errors"], self.spent.foreign, self._complaints())

    def _complaints(self) -> list[str]:
        calls, found = self.result["calls"], list[str]()
        if self.result["errors"]:
            found.append(
                f"{self.result['errors']} of {calls + self.result['errors']} calls failed: {self.result['error']}"
            )
        elif self.called != calls:
            found.append(f"{calls} calls made {self.called} upstream")
        if self.recorded is not None and self.recorded < calls:
            found.append(f"only {self.recorded} of {calls} calls were recorded")
        return found


def latency(case: Case, result: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return median and 99th percentile in microseconds."""
    found = result["holdup_us" if case.holdup else "latency_us"]
    return (found["p50"], found["p99"]) if found else (None, None)


def per_second(case: Case, result: dict[str, Any], scale: float) -> float:
    """Return calls a second, or events while all streams were running."""
    events = result["holdup_us"] or {"count": 0}
    return events["count"] / (case.seconds * scale) if case.holdup else result["per_second"]


def added(cell: Cell, direct: Cell) -> Cell:
    """Subtract the latency of `direct` from a cell's, and return the cell."""
    for name in ("p50_us", "p99_us"):
        mine, floor = getattr(cell, name), getattr(direct, name)
        setattr(cell, name, None if mine is None or floor is None else mine - floor)
    return cell


Cells = dict[str, dict[str, list[Cell]]]
"""Cells by case and peer, one per round."""


def quiet(take: Callable[[], Cell], again: bool) -> Cell:
    """Take a cell; if others disturbed it, take another and return the quieter one."""
    cell = take()
    return min(cell, take(), key=lambda each: each.foreign) if again and cell.foreign > NOISE else cell


class Rounds:
    """Takes all peers through all cases, several times."""

    def __init__(self, bench: Bench, gateways: list[Gateway], say: Callable[[str], None]) -> None:
        self.cells: Cells = {}
        self._bench, self._gateways, self._say = bench, gateways, say
        self._reached: dict[str, float] = {}
        self._slow: set[tuple[str, str]] = set()

    def run(self, cases: list[Case], rounds: int, until: float) -> int:
        """Run `rounds` rounds, fewer when the next would not end in time; return the number."""
        took = 0.0
        for turn in range(rounds):
            began = time.monotonic()
            if began + took > until:
                return turn
            for case in cases:
                self._take(case, turn)
            took = time.monotonic() - began
        return rounds

    def _take(self, case: Case, turn: int) -> None:
        # The order rotates: another peer is first in every round.
        direct = self._bench.direct(case)
        self._keep(case, "direct", direct)
        first = turn % len(self._gateways) if self._gateways else 0
        for gateway in self._gateways[first:] + self._gateways[:first]:
            name = gateway.peer.name
            if (case.name, name) not in self._slow and case.rate * CANNOT <= self._reached.get(name, inf):
                self._say(f"round {turn + 1}: {case.name} {name}")
                cell = self._timed(case, gateway)
                self._keep(case, name, cell if case.holdup else added(cell, direct))

    def _timed(self, case: Case, gateway: Gateway) -> Cell:
        began, name = time.monotonic(), gateway.peer.name
        cell = quiet(partial(self._bench.through, gateway, case), began < self._bench.repeat_until)
        if time.monotonic() - began > SLOW_SECONDS:
            self._slow.add((case.name, name))
        if case.name == "chat_1k":
            self._reached[name] = cell.per_second
        return cell

    def _keep(self, case: Case, name: str, cell: Cell) -> None:
        self.cells.setdefault(case.name, {}).setdefault(name, []).append(cell)
