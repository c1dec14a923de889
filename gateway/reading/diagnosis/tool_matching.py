"""Finds the pairs that are the only possibility among equal ones. Pure.

Given the asks that each tool run may be for, `settle` finds the pairs that cannot be otherwise if each of these asks
has a run: a run that may be for one ask only, which no other run depends on, and an ask that has one run only, which
no other ask depends on. The rest can be paired in several ways, of which none is chosen.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R", bound=Hashable)
A = TypeVar("A", bound=Hashable)


def settle(candidates: Mapping[R, Sequence[A]]) -> tuple[dict[R, A], dict[R, list[A]]]:
    """(the ask of each settled run, the possible asks of each other run). A run without candidates is in neither."""
    asks = {run: dict.fromkeys(found) for run, found in candidates.items() if found}
    runs: defaultdict[A, dict[R, None]] = defaultdict(dict)
    for run, found in asks.items():
        for ask in found:
            runs[ask][run] = None
    settled: dict[R, A] = {}
    look = deque(asks)
    while look:
        run = look.popleft()
        if run not in asks or (ask := _forced(run, asks, runs)) is None:
            continue
        settled[run] = ask
        touched = dict.fromkeys(other for it in asks[run] for other in runs[it] if other != run)
        for it in asks.pop(run):
            del runs[it][run]
        for other in runs.pop(ask):
            del asks[other][ask]
        look += touched
    return settled, {run: list(found) or list(candidates[run]) for run, found in asks.items()}


def _forced(run: R, asks: Mapping[R, Mapping[A, None]], runs: Mapping[A, Mapping[R, None]]) -> A | None:
    needing = [ask for ask in asks[run] if len(runs[ask]) == 1]
    if needing:
        return needing[0] if len(needing) == 1 else None
    if len(asks[run]) != 1:
        return None
    ask = next(iter(asks[run]))
    return None if any(len(asks[other]) == 1 for other in runs[ask] if other != run) else ask
