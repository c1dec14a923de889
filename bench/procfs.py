"""CPU time and memory of a process with all its children, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """Resident memory in MB; `anonymous` excludes pages that are mapped from files."""

    total: float
    anonymous: float


def tree(pid: int) -> list[int]:
    """Return the ids of the process and its descendants."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found


def children(pid: int) -> list[int]:
    """Return the direct children, of all its threads."""
    try:
        lists = [(task / "children").read_text() for task in (PROC / str(pid) / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for line in lists for child in line.split()]


def cpu_seconds(pid: int) -> float:
    """Return utime + stime of the tree, including children that have ended and were waited for."""
    return sum(own_seconds(each) for each in tree(pid))


def own_seconds(pid: int) -> float:
    """Return utime, stime, cutime and cstime of one process."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(field) for field in fields[11:15]) / TICK


def memory(pid: int) -> Memory:
    """Return resident memory of the tree, shared pages counted once per process."""
    sums = {"VmRSS:": 0, "RssAnon:": 0}
    for each in tree(pid):
        for name, value in status(each):
            if name in sums:
                sums[name] += value
    return Memory(sums["VmRSS:"] / 1024, sums["RssAnon:"] / 1024)


def status(pid: int) -> list[tuple[str, int]]:
    """Return the lines of /proc/PID/status that are in kB."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []
    fields = [line.split() for line in lines]
    return [(line[0], int(line[1])) for line in fields if line[2:] == ["kB"]]


def core_busy_seconds(core: int) -> float:
    """Return the time that a core has not been idle, for any process."""
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, idle, waiting, *rest = (int(field) for field in line.split()[1:])
            del idle, waiting
            return (user + nice + system + sum(rest[:3])) / TICK
    return 0.0
