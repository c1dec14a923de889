"""Tasks that an engine holds out of the train split, to choose by: engines that come from elsewhere want two sets."""

from __future__ import annotations

from typing import NamedTuple

from penstock.trainer.apo.protocol import Evidence


class Parts(NamedTuple):
    """Names of tasks."""

    learn: list[str]
    """To reflect on."""
    choose: list[str]
    """To compare candidates on."""


def parts(evidence: Evidence, count: int) -> Parts:
    """Two parts of the train split, of which the second has about `count` tasks, and at most half. Tasks of one key
    stay together; where all are of one key they do not. The order is drawn."""
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
    return Parts(learn, choose)
