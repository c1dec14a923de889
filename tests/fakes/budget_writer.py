"""What reserves and settles in a process, on a tape that others write too.

It has up to ten calls under way, each of which uses at most what it has reserved. Each refusal is compared with what is
on the tape in that very transaction. It reports what its calls have used, and how many passed and were refused.
"""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.gateway.app import open_store
from penstock.gateway.model.state import Budget
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.traffic.budgets.operations import (
    RESERVATIONS,
    BudgetCharge,
    BudgetClaim,
    BudgetOperations,
    BudgetReservation,
    Limit,
)


def limit(most: int) -> Limit:
    """The budget that all of them share."""
    return Limit(Budget(name="shared", unit="tokens", limit=most, window="total"))


def reserve(store: Store, asked: BudgetReservation) -> bool:
    """Whether there is room, which must be true."""

    def do(tape: Transaction) -> bool:
        short = BudgetOperations(tape).reserve(asked, time.time_ns())
        (claim,) = asked.claims
        there = [int.from_bytes(value[8:]) for _, value in tape.scan(RESERVATIONS, claim.limit.key(""))]
        for one in short:
            assert one.sum.used + one.sum.reserved + claim.amount > claim.limit.most, "refused for nothing"
            assert (one.sum.reserved, one.sum.running) == (sum(there), len(there))
        return not short

    task = QueuedOperation(do)
    store.write([task])
    return bool(task.result)


def write(report: Connection, path: Path, seed: int, calls: int, most: int) -> None:
    """Makes its calls."""
    chance, process, used, passed, refused = random.Random(seed), os.urandom(8), 0, 0, 0
    under_way: list[BudgetReservation] = []
    with open_store(path, lock=os.open(os.devnull, os.O_RDONLY)) as store:
        for number in range(calls):
            claim = BudgetClaim(limit(most), "", chance.randrange(1, 100))
            asked = BudgetReservation([claim], "r", time.time_ns(), process + keys.number(number))
            if reserve(store, asked):
                passed += 1
                under_way.append(asked)
            else:
                refused += 1
            while under_way and (len(under_way) == 10 or number + 1 == calls or chance.random() < 0.4):
                over = under_way.pop(chance.randrange(len(under_way)))
                took = chance.choice((0, over.claims[0].amount, chance.randrange(over.claims[0].amount + 1)))
                used += took
                store.write(
                    [QueuedOperation(lambda tape, r=over, u=took: BudgetOperations(tape).settle(r, [BudgetCharge(u)]))]
                )  # type: ignore[misc]
    report.send([used, passed, refused])
