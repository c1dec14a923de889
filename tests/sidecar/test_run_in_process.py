"""Attempts in this process, whose agents a debugger can stop."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from bdb import BdbQuit
from pathlib import Path
from typing import Any

import pytest
from fakes.process import Gateway
from fakes.runs import AGENTS, enqueue, events, only_attempt, said, when

import penstock
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.rollout import AttemptStatus, RolloutStatus
from penstock.sidecar.run.in_process import InProcessWorker
from penstock.sidecar.run.progress import AttemptResult
from penstock.sidecar.run.settings import AgentSettings, HookSettings, JudgeSettings, RunnerSettings, UsageError


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "real")
    monkeypatch.chdir(AGENTS)


def settings(gateway: Gateway, **more: Any) -> RunnerSettings:
    return RunnerSettings(gateway.url, "desk", lease_s=10, **more)


def asks(task: Any, address: penstock.Address) -> dict[str, Any]:
    """An agent that is a function: asks the model, reports, and says where it is."""
    assert json.loads(os.environ["PENSTOCK_INPUT"]) == task
    assert os.environ["OPENAI_BASE_URL"] == address.openai_url
    assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": task["question"]}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{address.openai_url}/chat/completions", body, headers)) as it:
        answer = json.load(it)["choices"][0]["message"]["content"]
    penstock.event("asked", {"pid": os.getpid()})
    return {"answers": [answer], "rollout": address.rollout}


async def test_a_step_is_an_attempt_like_any_other(
    gateway: Gateway, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    _ = await enqueue(client, {"question": "why?"})
    hooks = HookSettings((("on_rollout_end", "hooked:note"),))
    worker = InProcessWorker(settings(gateway, judging=JudgeSettings("functions:calls"), hooks=hooks))
    before = dict(os.environ)
    result = await asyncio.to_thread(worker.step, asks)
    assert dict(os.environ) == before
    assert result is not None
    assert (result.name, result.worker, result.end, result.reward, result.calls) == ("r1/a1", "desk", "succeeded", 1, 1)
    attempt = await only_attempt(client)
    assert (attempt.status, attempt.worker, attempt.reward) == (AttemptStatus.SUCCEEDED, "desk", 1)
    assert attempt.outcome is not None
    assert (attempt.outcome.exit_code, attempt.outcome.output["rollout"]) == (0, "r1")
    assert [(span.attributes or {})["pid"] for span in await events(client) if span.name == "asked"] == [os.getpid()]
    assert json.loads((tmp_path / "notes").read_text())["end"] == "succeeded"
    assert [worker.attempts for worker in await client.workers()] == [[]]
    assert await asyncio.to_thread(worker.step, asks) is None


async def test_heartbeats_go_on_while_the_agent_stands_still(gateway: Gateway, client: Client) -> None:
    """The thread of the loop stands at a breakpoint, which the gateway and the worker do not notice."""
    _ = await enqueue(client, None, {"large": "x" * 200_000})
    worker, results, files = InProcessWorker(settings(gateway)), list[AttemptResult | None](), list[int]()

    def stands_still() -> None:
        with penstock.SyncClient(gateway.url) as own:
            ((first,), (now,)) = own.workers(), own.workers()
            while now.last_seen_ns == first.last_seen_ns:
                (now,) = own.workers()
            assert (now.figures.memory_bytes or 0) > 10 << 20

    async for attempt in worker.iter():
        async with attempt:
            if attempt.task is None:
                stands_still()
            else:
                files.append(os.path.getsize(os.environ["PENSTOCK_INPUT_FILE"]))  # noqa: ASYNC240 - a local file
            attempt.output = {"reward": 0.5}
        results.append(attempt.result)
    assert [(one.end, one.reward) for one in results if one is not None] == [("succeeded", 0.5)] * 2
    assert files[0] > 200_000


async def test_an_error_is_the_agents_and_a_quit_is_not(gateway: Gateway, client: Client) -> None:
    _ = await enqueue(client, "bad", max_attempts=1)
    worker = InProcessWorker(settings(gateway))

    def quits(task: Any) -> None:
        raise BdbQuit

    with pytest.raises(BdbQuit):
        await asyncio.to_thread(worker.step, quits)
    found = await client.rollout("r1")
    assert (found.status, found.tries, found.attempts[0].status) == (
        RolloutStatus.REQUEUING,
        0,
        AttemptStatus.ENVIRONMENT,
    )
    assert found.attempts[0].outcome is not None
    assert found.attempts[0].outcome.reason == "its user stopped it"


async def test_a_failure_says_where(gateway: Gateway, client: Client) -> None:
    _ = await enqueue(client, "no such city", "two", max_attempts=1)
    worker = InProcessWorker(settings(gateway))
    with pytest.raises(ValueError, match="no such city"):
        await asyncio.to_thread(worker.step, int)
    attempt = await only_attempt(client)
    assert attempt.outcome is not None
    assert (attempt.status, attempt.outcome.exit_code) == (AttemptStatus.FAILED, 1)
    assert str(attempt.outcome.reason).startswith("exit code 1: ValueError: invalid literal")
    assert "Traceback" in said(await events(client), "stderr")
    result = await asyncio.to_thread(worker.step, set)
    assert result is not None
    assert "is not JSON serializable" in str(result.reason)


async def test_an_attempt_that_is_cancelled_ends_and_its_code_goes_on(gateway: Gateway, client: Client) -> None:
    _ = await enqueue(client, None)
    async for attempt in InProcessWorker(settings(gateway)).iter():
        async with attempt:
            _ = await client.cancel("r1")
            _ = await when(client, "r1", lambda one: one.attempts[0].status == AttemptStatus.CANCELLED)
        assert attempt.result is not None
        assert attempt.result.end == "lost"


async def test_what_is_not_run_is_an_error(gateway: Gateway, client: Client) -> None:
    _ = await enqueue(client, None)
    with pytest.raises(RuntimeError, match="r1 was not run: use `async with attempt:`"):
        async for _ in InProcessWorker(settings(gateway)).iter():
            pass
    with pytest.raises(UsageError, match="no command"):
        _ = InProcessWorker(settings(gateway, agents=AgentSettings(("true",))))
    with pytest.raises(UsageError, match="use `iter`"):
        _ = InProcessWorker(settings(gateway)).step(asyncio.sleep)
    with pytest.raises(ClientError):
        _ = InProcessWorker(RunnerSettings("http://127.0.0.1:1", "desk")).step(print)
