"""Several processes share budgets: together they use no more than there is, and they refuse in the same words."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from fakes import budget_writer
from fakes.budget_writer import limit
from fakes.budgets import ASKED, budget, toml
from fakes.forkserver import forking, reporting
from fakes.gateway_workers import served_by, workers
from fakes.mistakes import tells
from fakes.process import running, upstreams
from fakes.provider import serving
from fakes.raw import body_of, post
from fakes.rig import CHAT

from penstock.gateway.app import open_store
from penstock.gateway.traffic.budgets.operations import BudgetReader

PROCESSES, CALLS, LIMIT = 3, 80, 3_000


def test_processes_that_write_one_tape_share_a_budget(tmp_path: Path) -> None:
    forks = forking("fakes.budget_writer")
    with open_store(tmp_path) as store, ExitStack() as stack:
        writers = [reporting(forks, budget_writer.write, tmp_path, seed, CALLS, LIMIT) for seed in range(PROCESSES)]
        ended = [listen.recv() for _, listen in [stack.enter_context(writer) for writer in writers]]
        (use,) = BudgetReader(store, [limit(LIMIT)]).uses(time.time_ns())
    used, passed, refused = map(sum, zip(*ended, strict=True))
    assert (use.used, use.reserved, use.running) == (used, 0, 0)
    assert used <= LIMIT
    assert passed > 50
    assert refused > 0, "the test itself: there was not room for all"


@pytest.mark.slow
async def test_every_worker_refuses_in_the_same_words(tmp_path: Path) -> None:
    """What does not fit is said by the first worker, not found out on the tape after a fault."""
    config = toml(budget(name="rollouts", per="rollout", only=["r*"], limit=1), budget(name="day", limit=2))
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url) + config, "--workers", "2") as gateway,
    ):
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            refused: list[str] = []
            for rollout, fits in (("r1", True), ("r1", False), ("r2", True), ("x", False)):
                for wire in (second,) if fits else (first, second):
                    wire.send(post(f"/rollout/{rollout}/attempt/a1{CHAT}", ASKED, host="127.0.0.1"))
                    answer = await wire.message()
                    if fits:
                        assert answer.startswith(b"HTTP/1.1 200"), answer
                    else:
                        assert answer.startswith(b"HTTP/1.1 429"), answer
                        refused.append(json.loads(body_of(answer))["error"]["message"])
        assert tells(refused[0], "budget 'rollouts'", "rollout 'r1' has used 1 call of 1 call")
        assert refused[0] == refused[1]
        assert tells(refused[2], "budget 'day'", "all calls have used 2 calls of 2 calls")
        assert refused[2] == refused[3]
        assert await gateway.terminate() == 0
    assert gateway.log == ""
