"""`penstock run` where its agents cannot work: it stops by itself, says why, and what it had tried does not count."""

from __future__ import annotations

import pytest
from fakes.runs import LEASE, PYTHON, StartRun, enqueue, events, when

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, FinishRequest
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Outcome, Reward, RolloutStatus
from penstock.sidecar.run.progress import AttemptResult
from penstock.sidecar.run.runner import EQUAL, FailureBreaker

LACKS = (PYTHON, "-c", "import nowhere_to_be_found")
"""What a wrong environment looks like."""
LEFT = "its worker left before it had it"
"""What the gateway says of an attempt whose claim was given up."""
ASKS_AND_FAILS = (
    PYTHON,
    "-c",
    "import os, sys, urllib.request\n"
    "body, url = b'{\"model\": \"m\", \"messages\": []}', os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
    "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
    "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
    "sys.exit('no good')",
)
"""One that works, and is not up to its task; the official SDK would take longer to be imported than all else."""


async def attempts(client: Client) -> list[Attempt]:
    """All of them."""
    return [attempt async for rollout in client.rollouts() for attempt in rollout.attempts]


async def test_a_wrong_environment_does_not_burn_the_queue(client: Client, start_run: StartRun) -> None:
    names = await enqueue(client, *range(20), retry_on=["failed"], max_attempts=2)
    run = await start_run("--workers", "4", agent=LACKS)
    assert await run.ended() == 3
    assert run.stderr.count(f"{EQUAL} tasks failed in the same way") == 1
    assert run.stderr.splitlines()[-1].startswith("penstock: stopped: ")
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'\n" in run.stderr
    assert "0 succeeded, 0 failed" in run.stdout
    made = await attempts(client)
    assert EQUAL <= len(made) <= 2 * EQUAL + 2 * 4
    # What it was about to be given as it stopped went back to the queue, and no agent ever saw it.
    begun = [attempt for attempt in made if (attempt.outcome and attempt.outcome.reason) != LEFT]
    assert len(begun) >= EQUAL
    assert {attempt.status for attempt in begun} == {AttemptStatus.ENVIRONMENT}
    assert {attempt.outcome.exit_code for attempt in begun if attempt.outcome is not None} == {1}
    assert [(await client.rollout(name)).tries for name in names] == [0] * 20
    # Where it works the same queue is done, and every task has all its tries.
    run = await start_run("--workers", "4", agent=("true",))
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "20 succeeded, 0 failed\n"


async def test_what_counts_as_the_environment_is_not_what_an_agent_does(client: Client, start_run: StartRun) -> None:
    names = await enqueue(client, *range(EQUAL + 1), reward_on_failure=-0.5)
    run = await start_run("--workers", "3", agent=ASKS_AND_FAILS)
    assert await run.ended() == 1
    assert f"0 succeeded, {len(names)} failed, mean reward -0.500 of {len(names)}" in run.stdout
    assert {(await client.rollout(name)).status for name in names} == {RolloutStatus.FAILED}


async def test_who_wants_to_goes_on(client: Client, start_run: StartRun) -> None:
    names = await enqueue(client, *range(EQUAL + 2), reward_on_failure=0.0)
    run = await start_run("--keep-going", agent=("false",))
    assert await run.ended() == 1
    assert run.stdout == f"0 succeeded, {len(names)} failed, mean reward 0.000 of {len(names)}\n"
    (said,) = [Reward.of(span) for span in await events(client) if span.kind == "reward"]
    assert (said.source, said.value, said.trusted, said.late) == ("rule", 0.0, True, False)
    assert said.reason == "reward_on_failure: it ended as failed"


async def test_the_rule_holds_when_the_runner_is_dead(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None, max_attempts=1, reward_on_failure=-1.0)
    run = await start_run(*LEASE, agent=("sleep", "600"))
    _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.RUNNING)
    run.process.kill()
    found = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.FAILED)
    assert (found.attempts[0].status, found.reward) == (AttemptStatus.UNRESPONSIVE, -1.0)
    (said,) = [Reward.of(span) for span in await events(client) if span.kind == "reward"]
    assert (said.source, said.reason) == ("rule", "reward_on_failure: it ended as unresponsive")


async def test_what_is_handed_back_is_another_workers_and_keeps_no_reward(client: Client) -> None:
    _ = await enqueue(client, None, reward_on_failure=0.0, max_attempts=1)
    (claim,) = (await client.claim(ClaimRequest(worker="w1"))).claims
    failed = await client.finish("r1", "a1", FinishRequest(worker="w1", status="failed", outcome=Outcome(exit_code=1)))
    assert (failed.rollout.status, failed.attempt.reward) == (RolloutStatus.FAILED, 0.0)
    outcome = Outcome(exit_code=1, reason="no docker")
    for _ in range(2):  # also when the first answer was lost
        back = await client.finish("r1", "a1", FinishRequest(worker="w1", status="environment", outcome=outcome))
        assert (back.attempt.status, back.attempt.reward) == (AttemptStatus.ENVIRONMENT, None)
        assert (back.rollout.status, back.rollout.tries) == (RolloutStatus.REQUEUING, 0)
    (claim,) = (await client.claim(ClaimRequest(worker="w2"))).claims
    assert claim.rollout.tries == 1
    _ = await client.finish("r1", claim.attempt.id, FinishRequest(worker="w2", status="failed"))
    found = await client.rollout("r1")
    assert (found.status, found.reward) == (RolloutStatus.FAILED, 0.0)
    assert [(one.status.value, one.reward) for one in found.attempts] == [("environment", None), ("failed", 0.0)]
    (first, _) = (await client.diagnosis("r1")).attempts
    assert any("handed back: its agent could not work" in finding.reason for finding in first.findings)


async def test_a_module_that_needs_an_attempt_is_left_to_it(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    run = await start_run("--callable", "breaks:reward")
    assert await run.ended() == 0, run.stderr
    assert run.stdout.startswith("1 succeeded, 0 failed, mean reward 1.000")


# -- the breaker alone -------------------------------------------------------------------------------------------------


def failed(number: int, reason: str = "exit code 1: no module", calls: int = 0, seconds: float = 0.1) -> AttemptResult:
    """A failure of a task."""
    outcome = Outcome(exit_code=1, duration_ns=int(seconds * 1e9))
    return AttemptResult(f"r{number}", "a1", "w", "failed", seconds, None, reason, outcome, calls)


def test_equal_failures_of_several_tasks_trip_it_and_all_of_them_are_handed_back() -> None:
    breaker, results = (
        FailureBreaker(),
        [failed(n, f"exit code 1: pid {1000 + n} at 0xfe{n}") for n in range(EQUAL + 2)],
    )
    assert [breaker.record(result) for result in results] == [
        *([[]] * (EQUAL - 1)),
        results[:EQUAL],
        [results[EQUAL]],
        [results[EQUAL + 1]],
    ]
    assert breaker.tripped is results[EQUAL - 1]
    assert breaker.record(failed(99, "exit code 1: something else")) == []


@pytest.mark.parametrize(
    "between",
    [AttemptResult("ok", "a1", "w", "succeeded", 1.0), failed(90, calls=1), failed(90, "exit code 2: other", calls=3)],
)
def test_what_works_in_between_shows_that_it_can(between: AttemptResult) -> None:
    breaker = FailureBreaker()
    for result in [*map(failed, range(EQUAL - 1)), between, *map(failed, range(EQUAL - 1))]:
        assert breaker.record(result) == []
    assert breaker.record(failed(50)) != []


@pytest.mark.parametrize(
    "results",
    [
        [failed(1)] * 20,
        [failed(n, calls=1) for n in range(20)],
        [failed(n, seconds=11.0) for n in range(20)],
        [failed(n, f"exit code 1: {'x' * n}") for n in range(20)],
        [AttemptResult(f"r{n}", "a1", "w", "lost", 0.1, None, "lost") for n in range(20)],
    ],
    ids=["one task", "calls", "slow", "different", "lost"],
)
def test_other_failures_do_not_trip_it(results: list[AttemptResult]) -> None:
    breaker = FailureBreaker()
    assert [breaker.record(result) for result in results] == [[]] * 20
    assert breaker.tripped is None


def test_it_never_trips_where_it_is_told_so() -> None:
    breaker = FailureBreaker(keep_going=True)
    assert [breaker.record(failed(n)) for n in range(20)] == [[]] * 20
