"""What the table of `bench.public` says of a climb, and the peer that a clone may not have."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench import peers
from bench.__main__ import present
from bench.measure import Cell
from bench.procfs import Memory
from bench.public import CLIMB, COLUMNS, PING, row
from bench.report import Idle, Rest, Results

CALM = Cell(0.2, 100.0, 200.0, 50.0, 40.0, 1_000.0, 0)


def climb(speeds: list[float], tails: list[float], errors: list[int]) -> dict[str, str]:
    """The row of a peer that reached these at each number of connections; tails are added to direct's 500 us."""
    direct = Cell(None, 100.0, 500.0, None, None, 50_000.0, 0)
    cells = {case.name: {"direct": [direct], "peer": [CALM]} for case in [PING, *CLIMB]}
    for case, *found in zip(CLIMB, speeds, tails, errors, strict=False):
        speed, tail, failed = found
        cells[case.name]["peer"] = [replace(CALM, cpu_ms=500 / speed, p99_us=tail, per_second=speed, errors=failed)]
    rest = Rest(Memory(60.0, 45.0), Memory(55.0, 41.0), 0.75)
    results = Results([PING, *CLIMB], cells, {"peer": Idle(300.0, 50.0, 30.0)}, [], {}, {"peer": rest})
    return dict(zip(COLUMNS, row(results, "peer"), strict=True))


def test_a_rate_counts_below_the_bound_that_its_own_tail_keeps() -> None:
    found = climb([2_000, 4_000, 6_000, 9_000], [400, 600, 20_000, 30_000], [0, 0, 0, 1])
    assert [found[f"rps, p99 < {bound}"] for bound in ("1 ms", "10 ms", "100 ms")] == ["2,000", "4,000", "6,000"]
    assert (found["rps"], found["rps a core"]) == ("6,000", "12,000")
    assert (found["+p50 us"], found["+p99 us"], found["ping +ms"]) == ("100", "400", "0.10")
    assert [found[name] for name in COLUMNS[-6:]] == ["50", "60", "45", "55", "41", "0.8"]


@pytest.mark.slow
def test_a_clone_without_the_earlier_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    former, notes = replace(peers.PEERS[-1], installed=lambda: False), list[str]()
    assert not present(former, True, notes)
    assert notes == [
        "penstock-5bb4517: cannot be installed: this clone does not have the commit: git fetch --unshallow gets it"
    ]
