"""Agents and runners that end otherwise than they should: nothing outlives its attempt or is finished twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fakes.process import Gateway, alive, gone
from fakes.runs import AGENTS, LEASE, OVERRUNS, PYTHON, StartRun, enqueue, only_attempt, when, written
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import AttemptStatus, RolloutStatus

SLEEP = (PYTHON, "-c", "import time; time.sleep(600)")


def family(pids: Path, seconds: float) -> tuple[str, ...]:
    """An agent with descendants that want to stay."""
    return PYTHON, str(AGENTS / "family.py"), str(pids), str(seconds)


async def test_grandchildren_do_not_survive_an_agent_that_ends(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    run = await start_run(agent=family(tmp_path / "pids", 0))
    assert await run.ended() == 0, run.stderr
    pids = await written(tmp_path / "pids")
    assert len(pids) == 3
    assert not [pid for pid in pids if alive(pid)]
    assert (await only_attempt(client)).status == AttemptStatus.SUCCEEDED


@pytest.mark.parametrize("whose", ["runner", "rollout"])
async def test_a_timeout_kills_the_whole_tree(client: Client, start_run: StartRun, tmp_path: Path, whose: str) -> None:
    _ = await enqueue(client, None, **({"timeout_s": float(OVERRUNS[:-1])} if whose == "rollout" else {}))
    words = ("--timeout", OVERRUNS) if whose == "runner" else ()
    run = await start_run(*words, agent=family(tmp_path / "pids", 600))
    assert await run.ended() == 1
    assert not [pid for pid in await written(tmp_path / "pids") if alive(pid)]
    assert (await only_attempt(client)).status == AttemptStatus.TIMEOUT
    assert run.stdout == "0 succeeded, 0 failed, 1 timed out\n"


async def test_a_cancelled_rollout_kills_its_agent(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None)
    run = await start_run(*LEASE, agent=family(tmp_path / "pids", 600))
    pids = await written(tmp_path / "pids")
    _ = await client.cancel("r1")
    assert await run.ended() == 1
    assert not [pid for pid in pids if alive(pid)]
    assert (await only_attempt(client)).status == AttemptStatus.CANCELLED
    assert "the attempt is cancelled at the gateway" in run.stderr


async def test_nothing_survives_a_runner_that_is_killed_and_its_rollout_is_done_again(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    run = await start_run(*LEASE, agent=family(tmp_path / "pids", 600))
    pids = await written(tmp_path / "pids")
    run.process.kill()
    _ = await run.ended()
    for pid in pids:
        await gone(pid)
    # The second runner finds an empty queue and stays: somebody seems to hold an attempt.
    again = await start_run(agent=("true",))
    assert await again.ended() == 0, again.stderr
    assert [attempt.status for attempt in await client.attempts("r1")] == ["unresponsive", "succeeded"]


async def test_a_runner_that_comes_back_late_cannot_overwrite_the_new_attempt(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    first = await start_run(*LEASE, "--name", "late", agent=family(tmp_path / "pids", 600))
    pids = await written(tmp_path / "pids")
    first.process.send_signal(signal.SIGSTOP)
    second = await start_run("--name", "new", agent=(PYTHON, "-c", "print('{\"reward\": 1}')"))
    assert await second.ended() == 0, second.stderr
    os.kill(pids[0], signal.SIGKILL)  # the agent itself ends: its runner has something to finish with
    first.process.send_signal(signal.SIGCONT)
    assert await first.ended() == 1
    assert first.stdout == "0 succeeded, 0 failed, 1 lost\n"
    rollout = await client.rollout("r1")
    assert (rollout.status, rollout.reward) == (RolloutStatus.SUCCEEDED, 1.0)
    assert [attempt.status for attempt in rollout.attempts] == ["unresponsive", "succeeded"]
    for pid in pids:
        await gone(pid)


async def test_an_agent_does_not_outlive_its_lease_when_the_gateway_is_away(
    gateway: Gateway, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    run = await start_run(*LEASE, "--max", "1", agent=family(tmp_path / "pids", 600))
    pids = await written(tmp_path / "pids")
    _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.RUNNING)
    _ = await gateway.kill()
    for pid in pids:
        await gone(pid)
    assert await run.ended() == 1
    assert "away for longer than the lease" in run.stderr
    await gateway.start(gateway.port)


async def test_a_result_is_kept_until_the_gateway_is_back(
    gateway: Gateway, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
    script = wait + "print('{\"reward\": 1}')"
    run = await start_run("--max", "1", agent=(PYTHON, "-c", script))
    _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.RUNNING)
    _ = await gateway.kill()
    go.touch()
    await until(lambda: "waiting for the gateway" in run.stderr)
    await gateway.start(gateway.port)
    assert await run.ended() == 0, run.stderr
    rollout = await client.rollout("r1")
    assert (rollout.status, rollout.reward, len(rollout.attempts)) == (RolloutStatus.SUCCEEDED, 1.0, 1)
