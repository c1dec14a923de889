"""Hooks around attempts of `penstock run`, and a worker's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import waiting
from fakes.mistakes import tells
from fakes.process import Gateway
from fakes.runs import AGENTS, LEASE, PYTHON, StartRun, enqueue, events, only_attempt
from fakes.shell import Refused

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import AttemptStatus, RolloutStatus
from penstock.sidecar.run.engines.local import LocalEngine
from penstock.sidecar.run.hooks import Hooks
from penstock.sidecar.run.progress import LineProgress
from penstock.sidecar.run.runner import Runner
from penstock.sidecar.run.settings import AgentSettings, HookSettings, RunnerSettings

AROUND = ("on_rollout_start", "on_attempt_start", "on_reward", "on_attempt_end", "on_rollout_end")
REWARDED = (PYTHON, "-c", "import penstock; penstock.reward(0.5); print('{\"reward\": 0.75}')")


async def test_hooks_are_told_what_happens(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, {"n": 1}, max_attempts=2, retry_on=["failed"])
    notes, again = tmp_path / "notes", tmp_path / "again"
    words = [word for event in AROUND for word in ("--hook", f"{event}=hooked:note")]
    words += ["--hook", f"on_attempt_end=cat >> {tmp_path}/stdin; echo >> {tmp_path}/stdin"]
    script = f"from pathlib import Path\nif not Path({str(again)!r}).exists(): Path({str(again)!r}).touch(); exit(3)\n"
    agent = (*REWARDED[:2], script + REWARDED[2])
    run = await start_run(*words, "--name", "w1", agent=agent, env={"NOTES": str(notes)})
    assert await run.ended() == 0, run.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [one["event"] for one in told] == [*AROUND[:2], "on_attempt_end", *AROUND[1:]]
    assert [one["attempt"]["id"] for one in told] == ["a1"] * 3 + ["a2"] * 4
    assert {(one["worker"], one["rollout"]["id"], one["rollout"]["input"]["n"]) for one in told} == {("w1", "r1", 1)}
    assert [(one["end"], one["outcome"], one["rewards"]) for one in told[:2]] == [(None, None, [])] * 2
    assert (told[2]["end"], told[2]["outcome"]["exit_code"], told[2]["rewards"]) == ("failed", 3, [])
    for one in told[4:]:
        assert (one["end"], one["outcome"]["output"]) == ("succeeded", {"reward": 0.75})
        assert {(reward["source"], reward["value"], reward["trusted"]) for reward in one["rewards"]} == {
            ("agent", 0.5, False),
            ("runner", 0.75, True),
        }
    assert (told[-1]["rollout"]["status"], told[-1]["attempt"]["reward"]) == ("succeeded", 0.75)
    on_stdin = [json.loads(line) for line in (tmp_path / "stdin").read_text().splitlines()]
    assert on_stdin == [told[2], told[5]]


async def test_a_hook_that_fails_is_seen_and_stops_nothing(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    words = ("--hook", "on_attempt_start=hooked:fails", "--hook", "on_rollout_end=echo oh >&2; exit 7")
    run = await start_run(*words, agent=REWARDED)
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert (attempt.status, attempt.reward) == (AttemptStatus.SUCCEEDED, 0.75)
    reasons = ["KeyError: 'on_attempt_start'", "'echo oh >&2; exit 7': exit code 7: oh"]
    seen = [span.attributes or {} for span in await events(client) if span.name == "hook_error"]
    assert [one["reason"] for one in seen] == reasons
    for one in seen:
        assert tells(run.stderr, f"r1/a1: --hook {one['hook']}: {one['reason']}")


@pytest.mark.parametrize("code", ["hooked:waits", "exec sleep 600"])
async def test_a_slow_hook_is_not_waited_for(
    gateway: Gateway, client: Client, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(AGENTS)
    _ = await enqueue(client, None)
    hooks = HookSettings((("on_attempt_start", code), ("on_heartbeat", code)), timeout_s=0.2)
    settings = RunnerSettings(gateway.url, "w1", agents=AgentSettings(("true",)), hooks=hooks)
    async with LocalEngine(settings) as engine:
        tally = await Runner(settings, engine, LineProgress(echo=False)).run()
    assert tally.ends == {"succeeded": 1}
    (seen,) = [span.attributes or {} for span in await events(client) if span.name == "hook_error"]
    assert seen["reason"] == "it took longer than 0.2 s"


async def test_a_worker_reports_figures_of_its_own(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    words = ("--hook", "on_heartbeat=hooked:Figures.read", "--hook", "on_heartbeat=echo '{\"queue/depth\": 3}'")
    run = await start_run(*LEASE, *words, "--name", "w1", agent=(PYTHON, "-c", "import time; time.sleep(600)"))
    wanted = {"gpu.temperature": 61.0, "loss": 0.25, "queue/depth": 3.0}

    async def reported() -> bool:
        return [one.figures.own for one in await client.workers()] == [wanted]

    await waiting.until(reported)
    _ = await client.cancel("r1")
    assert await run.ended() == 1
    assert (await client.rollout("r1")).status == RolloutStatus.CANCELLED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"a b": 1}', "a b: 'a b': "),
        ('{"a": "x"}', "a: 'x': "),
        ("[1]", "its answer: '[1]': "),
        (json.dumps({f"n{n}": n for n in range(33)}), "its answer: "),
    ],
)
async def test_figures_that_are_none_are_told_once(said: str, reason: str) -> None:
    shown: list[str] = []
    hooks = Hooks(
        RunnerSettings("http://none", "w", hooks=HookSettings((("on_heartbeat", f"echo '{said}'"),))), shown.append
    )
    for _ in range(2):
        _ = await waiting.when(hooks.figures, lambda found: found == {} and shown != [])
    assert len(shown) == 1
    assert shown[0].startswith(f"--hook on_heartbeat: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("on_end=true", "--hook: 'on_end' is no event: use on_rollout_start, "),
        ("on_reward", "--hook: 'on_reward' is not EVENT=module:function or EVENT=COMMAND"),
        ("on_reward=hooked:nothing", "--hook on_reward: 'hooked:nothing': hooked has no 'nothing'"),
        ("on_reward=no-such-command x", "--hook on_reward: there is no command 'no-such-command'"),
        ("on_reward=os:getcwd", "--hook on_reward: os:getcwd cannot take one argument"),
    ],
)
def test_a_hook_that_cannot_work_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    monkeypatch.chdir(AGENTS)
    code, told = refused("run", "--hook", word, "--", "true")
    assert (code, said in told) == (2, True), told
