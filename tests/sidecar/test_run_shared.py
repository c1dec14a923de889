"""`penstock run --concurrency`: many attempts of a function in one process, each with its own address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.process import deep_folder, gone
from fakes.runs import LEASE, OVERRUNS, StartRun, enqueue, events, only_attempt, said, when, written
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import AttemptStatus, RolloutStatus


async def outputs(client: Client) -> dict[str, Any]:
    """What each attempt returned."""
    found = {rollout.id: rollout.attempts[-1].outcome async for rollout in client.rollouts()}
    return {name: None if outcome is None else outcome.output for name, outcome in found.items()}


@pytest.mark.parametrize("function", ["shares:asks", "shares:later"], ids=["threads", "tasks"])
async def test_attempts_share_a_process_and_nothing_else(client: Client, start_run: StartRun, function: str) -> None:
    names = await enqueue(client, "one", "two", "three")
    run = await start_run("--concurrency", "3", "--callable", function)
    assert await run.ended() == 0, run.stderr
    found = await outputs(client)
    assert len({output["pid"] for output in found.values()}) == 1
    for name, task in zip(names, ("one", "two", "three"), strict=True):
        assert found[name]["rollout"] == name
        (call,) = [span async for span in client.spans(name, filter="kind:llm")]
        assert task.encode() in await client.request_body(name, "a1", call.sequence)
        seen = await events(client, name)
        assert f"asked {task}" in said(seen, "stdout")
        assert not any(f"asked {other}" in said(seen, "stdout") for other in ("one", "two", "three") if other != task)
        assert [(span.attributes or {})["task"] for span in seen if span.name == "asked"] == [task]
        assert (await only_attempt(client, name)).reward == 1


async def test_where_temporary_files_lie_deep(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, "one", "two", "three")
    deep = {"TMPDIR": deep_folder(tmp_path)}
    run = await start_run("--concurrency", "3", "--callable", "shares:asks", env=deep)
    assert await run.ended() == 0, run.stderr


async def test_a_thread_that_overruns_is_left_behind_and_its_process_replaced(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    place = tmp_path / "pid"
    _ = await enqueue(client, str(place), None, None, max_attempts=1)
    run = await start_run("--concurrency", "2", "--timeout", OVERRUNS, "--callable", "shares:stuck")
    assert await run.ended() == 0, run.stderr
    (pid,) = await written(place)
    await gone(pid)
    assert (await only_attempt(client, "r1")).status == AttemptStatus.TIMEOUT
    assert {(await only_attempt(client, name)).status for name in ("r2", "r3")} == {AttemptStatus.SUCCEEDED}


async def test_a_task_is_stopped_when_its_rollout_is_cancelled(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    place = tmp_path / "pid"
    _ = await enqueue(client, str(place))
    words = (*LEASE, "--concurrency", "2", "--callable", "shares:waits")
    run = await start_run(*words)
    (pid,) = await written(place)
    _ = await client.cancel("r1")
    assert await run.ended() == 1
    await gone(pid)
    assert (await only_attempt(client)).status == AttemptStatus.CANCELLED


async def test_nothing_is_lost_with_a_runner_that_is_killed(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    place = tmp_path / "pid"
    _ = await enqueue(client, str(place))
    words = (*LEASE, "--concurrency", "4", "--callable", "shares:waits")
    run = await start_run(*words)
    (pid,) = await written(place)
    run.process.kill()
    _ = await run.ended()
    await gone(pid)
    rollout = await when(client, "r1", lambda one: one.status in (RolloutStatus.REQUEUING, RolloutStatus.QUEUING))
    assert rollout.attempts[0].status == AttemptStatus.UNRESPONSIVE


async def test_a_process_that_ends_fails_those_that_share_it(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None, None, max_attempts=1)
    run = await start_run("--concurrency", "2", "--callable", "shares:leaves")
    assert await run.ended() == 1
    outcome = (await only_attempt(client)).outcome
    assert outcome is not None
    assert "shared with others has ended: exit code 3" in str(outcome.reason)


async def test_who_looks_for_its_address_among_the_variables_is_told_where_it_is(
    client: Client, start_run: StartRun
) -> None:
    _ = await enqueue(client, None, max_attempts=1)
    run = await start_run("--concurrency", "2", "--callable", "shares:by_variable")
    assert await run.ended() == 1
    await until(lambda: "failed" in run.stderr)
    assert "with --concurrency the variables of the process" in said(await events(client), "stderr")
