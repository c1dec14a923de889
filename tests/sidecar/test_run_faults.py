"""An end that is the fault of what is around the agent is retried and counts against nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import StartGateway
from fakes.engine import engine
from fakes.ports import steady_ports
from fakes.process import Gateway, vllms
from fakes.runs import PYTHON, enqueue, runs, when
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import AttemptStatus, RolloutStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.sidecar.run.attempt import FAULT_PAUSES, find_fault

ASKS = """
import json, os, sys, time, urllib.request
body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "hello"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
ask = lambda: urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""
ONCE = (PYTHON, "-c", ASKS + "ask()")
CRASHES = (PYTHON, "-c", ASKS + "ask(); sys.exit('no such city')")


@pytest.fixture
async def start_run(tmp_path: Path) -> None:
    """Each test has a gateway of its own."""


async def ends(client: Client) -> list[AttemptStatus]:
    return [attempt.status for attempt in (await client.rollout("r1")).attempts]


async def test_an_engine_that_is_away_is_waited_for(start_gateway: StartGateway, tmp_path: Path) -> None:
    (port,) = steady_ports(1)
    gateway = await start_gateway(vllms(f"http://127.0.0.1:{port}/v1", train=None))
    async with Client(gateway.url) as client, runs(gateway.url, tmp_path) as start:
        _ = await enqueue(client, None, max_attempts=1, reward_on_failure=-1.0)
        run = await start(agent=ONCE)
        _ = await when(client, "r1", lambda it: any(one.status == AttemptStatus.ENVIRONMENT for one in it.attempts))
        async with engine(port):
            assert await run.ended() == 0, run.stderr
        found = await client.rollout("r1")
        assert (found.status, found.reward) == (RolloutStatus.SUCCEEDED, None)
        assert (await ends(client))[-1] == AttemptStatus.SUCCEEDED
        assert set((await ends(client))[:-1]) == {AttemptStatus.ENVIRONMENT}
    assert "handed back" in run.stderr
    assert "call #1 (connect)" in run.stderr


async def test_a_gateway_that_goes_away_for_a_moment_costs_no_try(start_gateway: StartGateway, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    waits = f"open({str(begun)!r}, 'a').close()\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nask()"
    async with engine() as vllm:
        gateway: Gateway = await start_gateway(vllms(vllm.openai_url, train=None))
        async with Client(gateway.url) as client, runs(gateway.url, tmp_path) as start:
            _ = await enqueue(client, None, max_attempts=1)
            run = await start("--lease=60s", agent=(PYTHON, "-c", ASKS + waits))
            await until(begun.exists)
            port = gateway.port
            _ = await gateway.kill()
            go.touch()
            # The agent meets nobody and fails; its runner waits for the gateway to say so.
            await until(lambda: "waiting for the gateway" in run.stderr)
            await gateway.start(port)
            assert await run.ended() == 0, run.stderr
            assert await ends(client) == [AttemptStatus.ENVIRONMENT, AttemptStatus.SUCCEEDED]


async def test_a_failure_of_the_agent_counts(start_gateway: StartGateway, tmp_path: Path) -> None:
    async with engine() as vllm:
        gateway = await start_gateway(vllms(vllm.openai_url, train=None))
        async with Client(gateway.url) as client, runs(gateway.url, tmp_path) as start:
            _ = await enqueue(client, None, reward_on_failure=-1.0)
            run = await start(agent=CRASHES)
            assert await run.ended() == 1
            found = await client.rollout("r1")
            assert (found.status, found.reward) == (RolloutStatus.FAILED, -1.0)


def span(sequence: int, status: SpanStatus, error: str | None = None) -> Span:
    return Span(rollout="r", attempt="a", sequence=sequence, status=status, error=error)


@pytest.mark.parametrize(
    ("calls", "away", "why"),
    [
        ([], False, None),
        ([], True, "the gateway was away"),
        ([span(1, SpanStatus.OK)], False, None),
        ([span(1, SpanStatus.ERROR, "connect"), span(2, SpanStatus.OK)], False, None),
        ([span(1, SpanStatus.OK), span(2, SpanStatus.ERROR, "http_503")], False,
         "the engine did not answer call #2 (http_503)"),
        ([span(1, SpanStatus.ERROR, "http_400")], False, None),
        ([span(1, SpanStatus.ERROR, "http_500")], False, None),
        ([span(1, SpanStatus.CANCELLED)], False, None),
        ([span(1, SpanStatus.INTERRUPTED)], False, "the gateway went away during call #1"),
    ],
)  # fmt: skip
def test_what_counts_as_a_fault_of_others(calls: list[Span], away: bool, why: str | None) -> None:
    assert find_fault(calls, away) == why


def test_a_worker_waits_longer_each_time() -> None:
    assert [FAULT_PAUSES.after(times) for times in (1, 2, 3, 30, 5000)] == [0.5, 1, 2, 30, 30]
