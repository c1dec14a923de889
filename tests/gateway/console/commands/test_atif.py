"""`penstock export --format atif` and `penstock import atif` with a gateway process: there and back, once, masked."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes import vllm_wire
from fakes.process import running, vllms
from fakes.provider import serving
from fakes.shell import Shell
from fakes.waiting import until
from openai import AsyncOpenAI

from penstock.gateway.client.client import Client

Json = dict[str, Any]
KEY = "sk-ant-api03-" + "abcdEFGH12345678" * 5
PRICES = 'as_of = 2026-01-01\n[[price]]\nmodel = "policy"\nsince = 2026-01-01\ninput = 1.0\noutput = 2.0\n'
pytestmark = pytest.mark.slow


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncGenerator[Shell]:
    """A shell, and a gateway with a rollout `r1` of two calls whose tokens are known."""
    (tmp_path / "prices.toml").write_text(PRICES)
    config = f'prices = "{tmp_path / "prices.toml"}"\n'
    async with serving() as vllm, running(tmp_path, config + vllms(vllm.openai_url)) as gateway:
        vllm.formats = vllm_wire.FORMATS
        async with AsyncOpenAI(base_url=gateway.openai("r1"), api_key="none") as client:
            said: list[Any] = [{"role": "user", "content": "2 and 2?"}]
            for _ in range(2):
                made = await client.chat.completions.create(model="policy", messages=said)
                answer = made.choices[0].message.content
                said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thanks."}]
        async with Client(gateway.url) as client:
            await until(lambda: recorded(client))
        yield Shell(gateway.url, tmp_path)


async def recorded(client: Client) -> bool:
    return len([span async for span in client.recent_spans()]) == 2


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def exported(shell: Shell, filter: str) -> list[Json]:
    done = await shell.run("export", "--format", "atif", filter, "-o", "out.jsonl")
    assert done.code == 0, done.err
    return lines(shell.folder / "out.jsonl")


def trajectory(**about: Any) -> Json:
    steps = [
        {"step_id": 1, "source": "user", "message": "Mend it.", "timestamp": "2026-01-02T03:04:05"},
        {"step_id": 2, "source": "agent", "message": "Done.", "metrics": {"prompt_tokens": 10, "cost_usd": 0.5}},
    ]
    return {
        "schema_version": "ATIF-v1.6",
        "agent": {"name": "pi", "version": "2", "model_name": "m"},
        "steps": steps,
    } | about


async def test_there_and_back(shell: Shell) -> None:
    """A gateway that has the rollout refuses it; with a prefix it is taken, once, and is exported as it was."""
    [whole] = await exported(shell, "rollout:r1")
    metrics = [step["metrics"] for step in whole["steps"] if step["source"] == "agent"]
    assert all(len(one["completion_token_ids"]) == len(one["logprobs"]) > 0 for one in metrics)
    assert metrics[1]["prompt_token_ids"]
    assert whole["final_metrics"]["total_cost_usd"] == sum(one["cost_usd"] for one in metrics) > 0
    (shell.folder / "r1.jsonl").write_text(json.dumps(whole) + "\n")
    done = await shell.run("import", "atif", "r1.jsonl")
    assert (done.code, "r1/a1 is on the tape, and was not imported; --prefix" in done.err) == (1, True)
    for expected in (
        "1 rollout, 4 steps, 0 rewards, 5 new spans.",
        "1 rollout (1 there already), 4 steps, 0 rewards, 0 new",
    ):
        done = await shell.run("import", "atif", "r1.jsonl", "--prefix", "i-")
        assert (done.code, expected in done.err) == (0, True), done.err
    assert await exported(shell, "rollout:i-r1") == [whole]
    shown = (await shell.run("show", "i-r1")).text
    assert "2 calls told by telemetry alone" in shown
    assert "user  input Thanks." in shown
    whole["steps"][0]["message"] = "Another"
    (shell.folder / "r1.jsonl").write_text(json.dumps(whole))
    done = await shell.run("import", "atif", "r1.jsonl", "--prefix", "i-")
    assert (done.code, "was imported from another document" in done.err) == (1, True)


async def test_a_job_of_harbor(shell: Shell) -> None:
    """Its trials become rollouts with their rewards; what is long or secret comes back whole, or masked."""
    for trial, result in {
        "good__1": {"task_name": "good", "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}}},
        "bad__2": {"exception_info": {"exception_type": "AgentTimeoutError", "exception_message": "900 s"}},
    }.items():
        agent = shell.folder / "job" / trial / "agent"
        agent.mkdir(parents=True)
        made = trajectory(session_id="s")
        if trial == "bad__2":
            # Many harnesses count the whole run only.
            made |= {"final_metrics": {"total_prompt_tokens": 7, "total_cost_usd": 0.125}}
            del made["steps"][1]["metrics"]
        (agent / "trajectory.json").write_text(json.dumps(made))
        (agent.parent / "result.json").write_text(json.dumps(result))
    ids = {"prompt_token_ids": list(range(100_000)), "completion_token_ids": [1], "logprobs": [-0.5]}
    long: list[Json] = [{"step_id": 1, "source": "user", "message": f"{'words ' * 1400}{KEY}{' words' * 20_000}"}]
    long += [{"step_id": 2, "source": "agent", "message": "x" * 100_000, "metrics": ids, "is_copied_context": True}]
    inner = trajectory(trajectory_id="inner")
    call = {"tool_call_id": "t", "function_name": "log_in", "arguments": {"password": KEY, "like": 'say "hi"'}}
    long += [{"step_id": 3, "source": "agent", "message": f'{{"token": "{KEY}"}}', "tool_calls": [call]}]
    more = trajectory(steps=long, subagent_trajectories=[inner])
    (shell.folder / "job" / "good__1" / "agent" / "trajectory.cont-1.json").write_text(json.dumps(more))
    done = await shell.run("import", "atif", "job")
    assert (done.code, "3 rollouts, 7 steps, 1 reward" in done.err) == (0, True), done.err
    found = {row["id"]: row for row in (await shell.run("rollouts", "--json")).rows}
    assert (found["good__1"]["status"], found["good__1"]["reward"]) == ("succeeded", 1.0)
    assert (found["good__1"]["totals"]["told"], found["good__1"]["totals"]["cost"]) == (1, 0.5)
    assert (found["bad__2"]["totals"]["input_tokens"], found["bad__2"]["totals"]["cost"]) == (7, 0.125)
    assert (found["bad__2"]["status"], found["bad__2"].get("reward")) == ("failed", None)
    assert (found["bad__2"]["attempts"][0]["outcome"]["reason"]) == "AgentTimeoutError: 900 s"
    [back] = await exported(shell, "rollout:good__1.cont-1")
    assert back["steps"][1] == long[1]
    assert back["steps"][2] == json.loads(json.dumps(long[2]).replace(KEY, "***"))
    assert KEY not in json.dumps((await shell.run("spans", "good__1.cont-1", "--json")).rows)
    assert back["subagent_trajectories"] == [inner]
    said = back["steps"][0]["message"]
    assert KEY not in said
    assert (said[:8000], said[-8000:]) == (long[0]["message"][:8000], long[0]["message"][-8000:])
    [rewarded] = await exported(shell, "rollout:good__1")
    assert rewarded["extra"]["penstock"] == {"reward": 1.0, "rewards": {"style": 0.5}}


async def test_what_is_no_trajectory_is_left_out_and_named(shell: Shell) -> None:
    odd = [b"{", b"[1]", json.dumps(trajectory(more=1)).encode(), b'{"a": NaN}', b"\xff", b"[" * 100_000]
    good = json.dumps(trajectory(session_id="../a b" + "x" * 200)).encode()
    (shell.folder / "odd.jsonl").write_bytes(b"\n".join([*odd, b"", good]))
    done = await shell.run("import", "atif", "odd.jsonl")
    said = [line for line in done.err.splitlines() if line.startswith("Left out: ")]
    assert (done.code, len(said)) == (1, len(odd)), done.err
    assert [line.partition("line ")[2].partition(":")[0] for line in said] == list("123456")
    assert "1 rollout, 2 steps" in done.err
    [name] = [row["id"] for row in (await shell.run("rollouts", "--json", "rollout:-a*")).rows]
    assert len(name) == 128
    for arguments, wanted in {
        ("import", "atif", "nothing.json"): "nothing.json",
        ("export", "--format", "atif", "--what", "spans"): "--what spans",
    }.items():
        done = await shell.run(*arguments)
        assert (done.code != 0, wanted in done.err) == (True, True), done.err


async def test_a_folder_is_laid_out_as_harbor_looks_for_it(shell: Shell) -> None:
    done = await shell.run("export", "--format", "atif", "-o", "job")
    assert done.err.startswith("1 trajectory, 4 steps, 2 answers, 2 of them with token ids"), done.err
    assert [str(it.relative_to(shell.folder)) for it in (shell.folder / "job").rglob("*.json")] == [
        "job/r1.a1/agent/trajectory.json"
    ]
