"""Splits the train split for an engine into tasks to reflect on and held-out tasks: external methods need two sets."""

from __future__ import annotations

from typing import NamedTuple

from penstock.trainer.apo.protocol import Evidence


class HoldOutSplit(NamedTuple):
    """Two parts of the train split, as task ids."""

    learn: list[str]
    """Tasks to reflect on."""
    choose: list[str]
    """Held-out tasks, to compare candidates on."""


def hold_out(evidence: Evidence, count: int) -> HoldOutSplit:
    """Return two parts of the train split, of which the second has about `count` tasks, and at most half. Tasks of one
    key stay together, unless all have the same key. The order is random."""
    half = len(evidence.tasks) // 2
    most = min(count, half)
    keys = sorted({task.key for task in evidence.tasks})
    evidence.random.shuffle(keys)
    choose: list[str] = []
    for key in keys:
        mine = [task.id for task in evidence.tasks if task.key == key]
        if len(choose) < most and len(choose) + len(mine) <= half:
            choose += mine
    choose = choose or [task.id for task in evidence.tasks[:most]]
    learn = [task.id for task in evidence.tasks if task.id not in set(choose)]
    evidence.random.shuffle(learn)
    return HoldOutSplit(learn, choose)
