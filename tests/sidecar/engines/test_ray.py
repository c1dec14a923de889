"""`penstock run --on ray` on a real Ray cluster of several nodes (processes on this machine)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from fakes.process import Gateway, gone
from fakes.ray_cluster import Nodes, two_nodes
from fakes.runs import AGENTS, LEASE, PATIENCE, PYTHON, StartRun, enqueue, only_attempt, written

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, FinishRequest
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Outcome, RolloutStatus
from penstock.sidecar.run.progress import AT_ONCE_S, AttemptResult, AttemptTally, LineProgress
from penstock.sidecar.run.runner import EQUAL, FailureBreaker
from penstock.sidecar.run.settings import AgentSettings, RunnerError, RunnerSettings

# A cluster starts a dozen processes, a machine of two cores that tests elsewhere takes its time.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A running cluster; the test that takes a node away is the last one."""
    with two_nodes() as made:
        yield made


async def requeued(client: Client) -> str:
    """The rollout that waits for another attempt, as soon as there is one."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async for rollout in client.rollouts("status:requeuing"):
                return rollout.id


def took_long(attempt: Attempt) -> bool:
    """True of an agent that the machine has kept waiting for so long that it may have worked: its failure counts."""
    return attempt.outcome is not None and (attempt.outcome.duration_ns or 0) >= AT_ONCE_S * 1e9


async def test_agents_that_cannot_work_stop_all_actors(nodes: Nodes, client: Client, start_run: StartRun) -> None:
    # A second each, and many: some are left, however late a driver on a busy machine hears of those that fail.
    names = await enqueue(client, *range(20 * EQUAL))
    ray = ("--on", "ray", "--workers", "2")
    agent = ("/bin/sh", "-c", "sleep 1; echo no such thing >&2; exit 1")
    run = await start_run(*ray, agent=agent, env={"RAY_ADDRESS": nodes.address})
    assert await run.ended(3 * PATIENCE) == 3, run.stderr
    assert f"{EQUAL} tasks failed in the same way" in run.stderr
    found = [await client.rollout(name) for name in names]
    assert [one.tries for one in found] == [sum(map(took_long, one.attempts)) for one in found]
    made = [attempt.status for one in found for attempt in one.attempts if not took_long(attempt)]
    assert EQUAL <= len(made) < len(names)
    # An agent that is at work when the run gives up is stopped.
    assert made.count(AttemptStatus.CANCELLED) <= 2
    assert set(made) - {AttemptStatus.CANCELLED} == {AttemptStatus.ENVIRONMENT}


async def test_a_cluster_works_the_queue_and_loses_nothing_with_a_node(
    nodes: Nodes, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    # Each agent meets the other one: they can only end when they run at the same time, on two nodes.
    meet = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, os.environ['PENSTOCK_ROLLOUT_ID']).touch()\n"
    meet += f"while len(list(pathlib.Path({str(tmp_path)!r}).glob('r?'))) < 2: time.sleep(0.01)\n"
    meet += "print('{\"reward\": 1}')"
    ray = ("--on", "ray", "--workers", "2", *LEASE)
    at = {"RAY_ADDRESS": nodes.address}
    _ = await enqueue(client, None, None)
    run = await start_run(*ray, agent=(PYTHON, "-c", meet), env=at)
    assert await run.ended(3 * PATIENCE) == 0, run.stderr
    assert run.stdout.startswith("2 succeeded, 0 failed, mean reward 1.000")
    workers = {(await only_attempt(client, rollout)).worker for rollout in ("r1", "r2")}
    assert len(workers) == 2

    # The same again, and a node goes while both agents are at work.
    stay = f"{PYTHON} {AGENTS / 'family.py'} {tmp_path}/$PENSTOCK_ROLLOUT_ID.pids 600"
    again = f"test $PENSTOCK_ATTEMPT_ID = a2 && exec {stay}; exit 0"
    for rollout in ("r1", "r2"):
        _ = await client.requeue(rollout)
    run = await start_run(*ray, agent=("/bin/sh", "-c", again), env=at)
    pids = [*await written(tmp_path / "r1.pids"), *await written(tmp_path / "r2.pids")]
    await asyncio.to_thread(nodes.cluster.remove_node, nodes.second, allow_graceful=False)
    lost = await requeued(client)
    kept = "r2" if lost == "r1" else "r1"
    _ = await client.cancel(kept)
    assert await run.ended(3 * PATIENCE) == 0, run.stderr
    for pid in pids:
        await gone(pid)
    assert [attempt.status for attempt in await client.attempts(lost)] == ["succeeded", "unresponsive", "succeeded"]
    assert (await client.rollout(kept)).status == RolloutStatus.CANCELLED


async def test_the_driver_hands_back_what_its_actors_could_not_do(client: Client, gateway: Gateway) -> None:
    from penstock.sidecar.run.engines import ray as on_ray

    names = await enqueue(client, *range(EQUAL + 1))
    claims = (await client.claim(ClaimRequest(worker="w-1", limit=len(names)))).claims
    outcome, results = Outcome(exit_code=1, duration_ns=10**8), list[AttemptResult]()
    for claim in claims:
        key = claim.rollout.id, claim.attempt.id
        _ = await client.finish(*key, FinishRequest(worker="w-1", status="failed", outcome=outcome))
        results.append(AttemptResult(*key, "w-1", "failed", 0.1, None, "exit code 1: no module", outcome))

    class Actors:
        """Takes note of what actors are told."""

        def __init__(self) -> None:
            self.told: list[str] = []

        def tell(self, order: str) -> None:
            self.told.append(order)

    actors, tally, settings = Actors(), AttemptTally(), RunnerSettings(gateway=gateway.url, name="w")
    breaker, shown = FailureBreaker(), LineProgress(echo=False)
    fleet = cast("on_ray.ActorGroup", actors)

    def look(ended: list[AttemptResult]) -> None:
        """As the driver does, which has no loop of its own."""
        on_ray._mind(fleet, on_ray._tell(ended, tally, shown), breaker, settings, tally, shown)

    await asyncio.to_thread(look, results[: EQUAL - 1])
    assert (actors.told, tally.stopped) == ([], None)
    await asyncio.to_thread(look, results[EQUAL - 1 :])
    assert actors.told == ["stop"]
    assert str(tally) == f"0 succeeded, 0 failed, {len(names)} handed back"
    assert {(await client.rollout(name)).status for name in names} == {RolloutStatus.REQUEUING}


@pytest.mark.parametrize(
    ("options", "env", "code", "message"),
    [
        ((), {"RAY_ADDRESS": "127.0.0.1:1"}, 1, "cannot reach the Ray cluster at 127.0.0.1:1: nothing answers there;"),
        (
            ("--ray-options", '{"num_cpu": 1}'),
            {"RAY_ADDRESS": "127.0.0.1:1"},
            2,
            "penstock: --ray-options: Invalid option keyword num_cpu for actors.",
        ),
    ],
)
async def test_wrong_options_are_told_in_one_line(
    client: Client, start_run: StartRun, options: tuple[str, ...], env: dict[str, str], code: int, message: str
) -> None:
    """Ray would ask for minutes, or show where in its code it stopped."""
    _ = await enqueue(client, None)
    run = await start_run("--on", "ray", *options, agent=("true",), env=env)
    assert await run.ended(3 * PATIENCE) == code
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert (await client.rollout("r1")).tries == 0


def test_a_failure_without_words_is_known_by_its_kind() -> None:
    from ray.exceptions import RayTaskError

    from penstock.sidecar.run.engines import ray as engine

    failed = RayTaskError("run", "traceback", AssertionError())
    assert engine._cause(failed) == "AssertionError"  # pyright: ignore[reportPrivateUsage]  # the words of a failure


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("Version mismatch: the cluster was started with Ray 1.0"),
        Exception("The current node timed out during startup."),
    ],
)
def test_why_there_is_no_cluster_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    from penstock.sidecar.run.engines import ray as engine

    def init(**_: object) -> None:
        raise problem

    monkeypatch.setattr(engine.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RunnerError, match=f"cannot reach the Ray cluster at this machine: {problem}"):
        _ = engine.run(RunnerSettings(gateway="http://127.0.0.1:1", name="w", agents=AgentSettings()), None)
