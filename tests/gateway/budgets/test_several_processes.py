"""Several processes that write one tape share its budgets: together they use no more than there is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from fakes import budget_writer
from fakes.budget_writer import limit
from fakes.process import PATHS

from penstock.gateway.app import open_store
from penstock.gateway.budgets.reader import BudgetReader

PROCESSES, CALLS, LIMIT = 3, 80, 3_000


async def test_processes_share_a_budget(tmp_path: Path) -> None:
    async def run(seed: int) -> list[int]:
        words = (tmp_path, str(seed), str(CALLS), str(LIMIT))
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(budget_writer.__file__), *map(str, words),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": PATHS},
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return json.loads(out)

    with open_store(tmp_path) as store:
        ended = await asyncio.gather(*map(run, range(PROCESSES)))
        (use,) = BudgetReader(store, [limit(LIMIT)]).uses(time.time_ns())
    used, passed, refused = map(sum, zip(*ended, strict=True))
    assert (use.used, use.reserved, use.running) == (used, 0, 0)
    assert used <= LIMIT
    assert passed > 50
    assert refused > 0, "the test itself: there was not room for all"
