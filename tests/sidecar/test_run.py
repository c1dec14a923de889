"""`penstock run` against a real gateway: what agents are given, and what becomes of their attempts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import waiting
from fakes.mistakes import tells
from fakes.process import Gateway
from fakes.runs import AGENTS, LEASE, PYTHON, StartRun, enqueue, events, only_attempt, said, when
from fakes.shell import Refused
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import AttemptStatus, Reward, RolloutStatus
from penstock.gateway.model.span import Span

REPORT = (PYTHON, str(AGENTS / "report.py"))
ASK = (PYTHON, str(AGENTS / "ask.py"))
SLEEP = (PYTHON, "-c", "import time; time.sleep(600)")


def rewards(spans: list[Span]) -> list[Reward]:
    """The rewards among spans."""
    return [Reward.of(span) for span in spans if span.kind == "reward"]


@pytest.mark.smoke
async def test_an_agent_finds_its_task_and_its_way(gateway: Gateway, client: Client, start_run: StartRun) -> None:
    task = {"question": "why?", "item": {"id": 7}, "text": "zwölf"}
    _ = await enqueue(client, task)
    words = ("--arg", "{question}", "--arg", "-c", "--arg", "id={item.id} at {openai_url}", "--env", "OPENAI_X={text}")
    run = await start_run(*words, agent=REPORT, env={"PENSTOCK_ADMIN_KEY": "secret", "ANTHROPIC_AUTH_TOKEN": "real"})
    assert await run.ended() == 0, run.stderr
    seen: dict[str, Any] = (await only_attempt(client)).outcome.output  # pyright: ignore[reportOptionalMemberAccess]
    env, base = seen["env"], gateway.url + "/rollout/r1/attempt/a1/mode/train"
    assert json.loads(seen["stdin"]) == json.loads(env["PENSTOCK_INPUT"]) == task
    assert seen["argv"] == ["why?", "-c", f"id=7 at {base}/v1"]
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == f"{base}/v1"
    assert env["ANTHROPIC_BASE_URL"] == env["PENSTOCK_URL"] == env["OTEL_EXPORTER_OTLP_ENDPOINT"] == base
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["PENSTOCK_TOKEN"]
    assert env["OPENAI_X"] == "zwölf"
    assert "PENSTOCK_ADMIN_KEY" not in env
    assert "ANTHROPIC_AUTH_TOKEN" not in env
    assert (env["PENSTOCK_ROLLOUT_ID"], env["PENSTOCK_ATTEMPT_ID"]) == ("r1", "a1")


async def test_what_is_too_large_for_a_variable_is_in_a_file(client: Client, start_run: StartRun) -> None:
    task = {"text": "x" * 200_000}
    _ = await enqueue(client, task)
    run = await start_run("--no-stdin", agent=REPORT)
    assert await run.ended() == 0, run.stderr
    outcome = (await only_attempt(client)).outcome
    assert outcome is not None
    assert outcome.output["file"] == len(json.dumps(task, separators=(",", ":")))
    assert "PENSTOCK_INPUT" not in outcome.output["env"]
    assert outcome.output["stdin"] == ""
    await until(lambda: not Path(outcome.output["env"]["PENSTOCK_INPUT_FILE"]).exists())


async def test_a_judge_sees_every_call(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, {"question": "how many", "calls": 3}, {"question": "how many", "calls": 1})
    run = await start_run("--workers", "2", "--reward", "functions:calls", agent=ASK)
    assert await run.ended() == 0, run.stderr
    for rollout, calls in (("r1", 3), ("r2", 1)):
        attempt = await only_attempt(client, rollout)
        assert (attempt.status, attempt.reward, attempt.totals.calls) == (AttemptStatus.SUCCEEDED, calls, calls)
        (reward,) = rewards(await events(client, rollout))
        assert (reward.source, reward.dimensions, reward.reason) == ("runner", {"agreement": 1.0}, "counted")
        assert not reward.late
    assert run.stdout == "2 succeeded, 0 failed, mean reward 2.000 of 2\n"


async def test_a_judge_of_two_arguments_needs_no_transcript(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, {"n": 21})
    run = await start_run("--callable", "functions:double", "--reward", "functions:answered", agent=())
    assert await run.ended() == 0, run.stderr
    assert (await only_attempt(client)).reward == 1.0
    assert run.stdout.startswith("1 succeeded, 0 failed, mean reward 1.000")


async def test_output_is_kept_in_its_order_with_its_end(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    script = "import sys\nfor n in range(200000): print(n)\nprint('bad end', file=sys.stderr); sys.exit(3)"
    run = await start_run(agent=(PYTHON, "-c", script))
    assert (await run.ended(), tells(run.stderr, "no attempt", "exit code 3: bad end")) == (1, True), run.stderr
    attempt, spans = await only_attempt(client), await events(client)
    assert attempt.outcome is not None
    assert (attempt.outcome.exit_code, attempt.outcome.reason) == (3, "exit code 3: bad end")
    assert attempt.outcome.duration_ns
    lines = list(map(int, said(spans, "stdout").split()))
    assert lines == sorted(lines)
    assert (lines[0], lines[-1]) == (0, 199_999)
    (dropped,) = (span.attributes or {} for span in spans if span.name == "output_dropped")
    kept = sum(len(str(line)) + 1 for line in lines)
    everything = sum(len(str(line)) + 1 for line in range(200_000)) + len("bad end\n")
    assert kept + len("bad end\n") + dropped["characters"] == everything
    assert kept <= 1 << 20
    assert said(spans, "stderr") == "bad end"
    pieces = [(span.attributes or {})["piece"] for span in spans]
    assert pieces == list(range(1, len(pieces) + 1))


@pytest.mark.parametrize(
    ("agent", "arg", "reason"),
    [
        (REPORT, "{answer}", "'{answer}' asks for 'answer', which the task does not have: its fields are question"),
        ((PYTHON, "-c", "import os; os.kill(os.getpid(), 9)"), "", "SIGKILL"),
        ((PYTHON, "-c", "raise SystemExit(7)"), "", "exit code 7"),
    ],
)
async def test_a_failure_says_why(
    client: Client, start_run: StartRun, agent: tuple[str, ...], arg: str, reason: str
) -> None:
    _ = await enqueue(client, {"question": "?"})
    run = await start_run("--arg", arg, agent=agent)
    assert await run.ended() == 1
    attempt = await only_attempt(client)
    assert attempt.status == AttemptStatus.FAILED
    assert attempt.outcome is not None
    assert attempt.outcome.reason == reason
    assert attempt.outcome.signal == ("SIGKILL" if reason == "SIGKILL" else None)


@pytest.mark.parametrize(
    ("printed", "output"), [(r'{"text": "\ud83d"}', {"text": "?"}), ("[" * 250 + "]" * 250, None)], ids=["cut", "deep"]
)
async def test_an_output_that_is_no_unicode_or_too_deep_costs_nothing_else(
    client: Client, start_run: StartRun, printed: str, output: Any
) -> None:
    _ = await enqueue(client, None, max_attempts=1)
    run = await start_run(agent=(PYTHON, "-c", f"print({printed!r})"))
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert attempt.status == AttemptStatus.SUCCEEDED
    assert attempt.outcome is not None
    assert attempt.outcome.output == output


async def test_an_echo_that_cannot_be_written_keeps_no_agent_waiting(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None, max_attempts=1)
    script = "import sys\nfor _ in range(3): sys.stdout.buffer.write('\u00e9'.encode() * (1 << 18) + b'\\n')"
    agent = (PYTHON, "-c", script)
    run = await start_run("--echo", agent=agent, env={"PYTHONIOENCODING": "ascii"})
    assert await run.ended() == 0, run.stderr
    assert run.stdout.count("?") == 3 << 18


async def test_what_fails_is_tried_again_when_it_is_to_be(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None, retry_on=["failed"], max_attempts=3)
    script = f"import sys; open({str(tmp_path / 'tries')!r}, 'a').write('x'); sys.exit(1)"
    run = await start_run(agent=(PYTHON, "-c", script))
    assert await run.ended() == 1
    assert (tmp_path / "tries").read_text() == "xxx"
    assert run.stdout == "0 succeeded, 3 failed\n"


async def test_printed_rewards(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    printed = 'print(\'{"reward": 0.5, "rewards": {"style": 1}, "answer": 4}\'); print(\'bye\')'
    run = await start_run(agent=(PYTHON, "-c", printed))
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert attempt.reward == 0.5
    assert attempt.outcome is not None
    assert attempt.outcome.output["answer"] == 4
    (reward,) = rewards(await events(client))
    assert (reward.source, reward.value, reward.dimensions) == ("runner", 0.5, {"style": 1.0})


HALVES = 'python3 -c \'import json,sys; t = json.load(sys.stdin); print(t["task"]["n"] * 0.5)\''


@pytest.mark.parametrize(
    ("judge", "source", "reward"),
    [("functions:judged", "judge", 0.75), (HALVES, "runner", 0.5)],
    ids=["function", "command"],
)
async def test_a_judge_has_the_word_over_what_the_agent_prints(
    client: Client, start_run: StartRun, judge: str, source: str, reward: float
) -> None:
    _ = await enqueue(client, {"n": 1})
    run = await start_run("--reward", judge, agent=(PYTHON, "-c", "print('{\"reward\": 100}')"))
    assert await run.ended() == 0, run.stderr
    found = {said.source: (said.value, said.trusted) for said in rewards(await events(client))}
    assert found == {"agent": (100.0, False), source: (reward, True)}
    assert (await only_attempt(client)).reward == reward


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        ("functions:nobody", "KeyError: 'answer'"),
        ("echo sorry; exit 4", "'echo sorry; exit 4': exit code 4"),
        ("echo much", "'echo much' printed no number and no JSON object"),
    ],
)
async def test_a_judge_that_fails_costs_the_reward_only(
    client: Client, start_run: StartRun, judge: str, reason: str
) -> None:
    _ = await enqueue(client, None)
    run = await start_run("--reward", judge, agent=("true",))
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert (attempt.status, attempt.reward) == (AttemptStatus.SUCCEEDED, None)
    (event,) = (span for span in await events(client) if span.name == "reward_error")
    assert (event.attributes or {})["reason"] == reason
    assert f"1 without a reward (1 got none: {reason.strip()})" in run.stdout


async def test_an_agent_may_have_folders_of_our_names(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    for name in ("gateway", "sidecar", "adapters", "trainer"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (folder / "agent.py").write_text(
        "import adapters, gateway, sidecar, trainer\n\n\n"
        "def main(task):\n"
        "    assert {one.WHOSE for one in (adapters, gateway, sidecar, trainer)} == {'theirs'}\n"
        "    return {'reward': task}\n"
    )
    _ = await enqueue(client, 0.5)
    run = await start_run("--callable", "agent:main", cwd=folder)
    assert await run.ended() == 0, run.stderr
    assert run.stdout.startswith("1 succeeded, 0 failed, mean reward 0.500")


@pytest.mark.parametrize("preload", [(), ("--preload",)], ids=["imported each time", "imported once"])
async def test_functions_are_agents_too(
    gateway: Gateway, client: Client, start_run: StartRun, preload: tuple[str, ...]
) -> None:
    _ = await enqueue(client, {"n": 21}, max_attempts=1)
    run = await start_run(*preload, "--callable", "functions:double")
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert attempt.outcome is not None
    url = gateway.url + "/rollout/r1/attempt/a1/mode/train/v1"
    assert attempt.outcome.output == {"twice": 42, "reward": 0.25, "url": url}
    assert attempt.reward == 0.25
    for function, output, reason in (
        ("functions:later", [21], None),
        ("functions:broken", None, "exit code 1: RuntimeError: cannot do 21"),
    ):
        _ = await client.requeue("r1")
        run = await start_run(*preload, "--callable", function)
        assert await run.ended() == (0 if reason is None else 1)
        newest = (await client.attempts("r1"))[-1]
        assert newest.outcome is not None
        assert (newest.outcome.output, newest.outcome.reason) == (output, reason)


async def test_a_runner_takes_what_it_is_told_to(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, *range(5))
    run = await start_run("--max", "2", "--workers", "4", agent=("true",))
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "2 succeeded, 0 failed\n"
    run = await start_run("--mode", "val,test", agent=("true",))
    assert await run.ended() == 0, run.stderr
    assert tells(run.stdout, "no attempt was made", "`penstock queue`")
    assert (await client.queue()).waiting == {"train": 3}


async def test_a_runner_that_watches_leaves_when_the_queue_is_drained(client: Client, start_run: StartRun) -> None:
    run = await start_run("--watch", agent=("true",))
    for name in ("one", "two"):
        _ = await enqueue(client, name) if name == "one" else await client.requeue("r1")
        _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.SUCCEEDED)
    _ = await client.set_queue("draining")
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "2 succeeded, 0 failed\n"


async def test_a_paused_queue_is_waited_for(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    _ = await client.set_queue("paused")
    run = await start_run(agent=("true",))
    _ = await when(client, "r1", lambda _: "waiting" not in run.stderr)
    _ = await client.set_queue("open")
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "1 succeeded, 0 failed\n"


async def test_workers_say_what_they_use(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    _ = smi.write_text("#!/bin/sh\necho '41, 1024'\necho '7, 512'\n")
    smi.chmod(0o755)
    script = "import time\nx = bytearray(50 << 20)\nwhile True: _ = sum(range(50_000)); time.sleep(0.02)"
    path = f"{smi.parent}:/usr/bin:/bin"
    run = await start_run(*LEASE, "--name", "w1", agent=(PYTHON, "-c", script), env={"PATH": path})

    async def all_is_known() -> bool:
        found = [one.figures for one in await client.workers() if one.figures.gpu_percent is not None]
        return any((one.cpu_percent or 0) > 1 and (one.memory_bytes or 0) > 50 << 20 for one in found)

    await waiting.until(all_is_known)
    (worker,) = await client.workers()
    assert (worker.id, worker.attempts) == ("w1", ["r1/a1"])
    assert (worker.figures.gpu_percent, worker.figures.gpu_memory_bytes) == (41.0, 1536 << 20)
    _ = await client.cancel("r1")
    assert await run.ended() == 1


async def test_the_first_signal_lets_agents_finish(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None, None)
    script = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)"
    run = await start_run(agent=(PYTHON, "-c", script))
    _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.RUNNING)
    run.process.send_signal(signal.SIGTERM)
    await until(lambda: "taking no more work" in run.stderr)
    (tmp_path / "go").touch()
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "1 succeeded, 0 failed\n"
    assert (await client.queue()).waiting == {"train": 1}


async def test_the_second_signal_gives_attempts_back(client: Client, start_run: StartRun) -> None:
    _ = await enqueue(client, None)
    run = await start_run(agent=SLEEP)
    _ = await when(client, "r1", lambda rollout: rollout.status == RolloutStatus.RUNNING)
    run.process.send_signal(signal.SIGINT)
    await until(lambda: "taking no more work" in run.stderr)
    run.process.send_signal(signal.SIGINT)
    assert await run.ended() == 130
    assert run.stdout == "0 succeeded, 0 failed, 1 given back\n"
    run = await start_run(agent=("true",))
    assert await run.ended() == 0, run.stderr
    assert [attempt.status for attempt in await client.attempts("r1")] == ["unresponsive", "succeeded"]


WRONG: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    ((), (), "say what to run, after --"),
    (("--callable", "functions:double"), ("true",), "--callable is run instead of a command"),
    (("--preload",), ("true",), "--preload imports the module of --callable"),
    (("--concurrency", "2"), ("true",), "--concurrency runs the function of --callable, on this machine"),
    (("--concurrency", "0", "--callable", "functions:double"), (), "--concurrency: 0 is not a number from 1"),
    (("--concurrency", "2", "--callable", "functions:double", "--preload"), (), "--preload does not go with"),
    (("--concurrency", "2", "--callable", "functions:double", "--env", "A=b"), (), "--env does not go with"),
    (("--workers", "0"), ("true",), "--workers: 0 is not a number from 1"),
    (("--timeout", "5 minutes"), ("true",), "--timeout: '5 minutes' is not a time"),
    (("--mode", "all"), ("true",), "--mode: 'all' is not a mode: use train, val, test, online"),
    (("--env", "X"), ("true",), "--env: 'X' is not NAME=VALUE"),
    (("--name", "a/b"), ("true",), "--name: 'a/b' is not valid"),
    (("--lease", "100ms"), ("true",), "--lease: 0.1 s is not between 1s and 1h"),
]


CANNOT: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    ((), ("no-such-command",), "there is no command 'no-such-command' on the PATH"),
    (("--reward", "functions:gone"), ("true",), "--reward: 'functions:gone': functions has no 'gone'"),
    (("--reward", "breaks:reward"), ("true",), "--reward: 'breaks:reward' cannot be imported: RuntimeError: not here"),
    (("--reward", "no-such-judge --fast"), ("true",), "--reward: there is no command 'no-such-judge'"),
    (("--reward", "if true; then"), ("true",), "--reward: 'if true; then': "),
    (("--callable", "functions:none"), (), "--callable: 'functions:none': functions has no 'none'"),
    (("--preload", "--callable", "functions:none"), (), "--callable: 'functions:none': functions has no 'none'"),
    (("--callable", "lacks:answer"), (), "--callable: 'lacks:answer': there is no module 'nowhere_to_be_found'"),
    (("--callable", "lacks.answer"), (), "--callable: 'lacks.answer' is not module:function"),
    ((), ("./report.py",), "'./report.py' cannot be executed: chmod +x report.py"),
    ((), ("./gone.py",), "there is no command './gone.py' in "),
]


@pytest.mark.parametrize(("words", "agent", "why"), WRONG)
def test_options_that_are_wrong(refused: Refused, words: tuple[str, ...], agent: tuple[str, ...], why: str) -> None:
    code, told = refused("run", *words, *(("--", *agent) if agent else ()))
    assert (code, why in told) == (2, True), told


async def test_agents_and_judges_that_cannot_work_are_told_before_anything_is_claimed(
    client: Client, start_run: StartRun
) -> None:
    _ = await enqueue(client, None)
    for words, agent, why in CANNOT:
        run = await start_run(*words, agent=agent)
        assert await run.ended() == 2
        assert why in run.stderr
    assert (await client.rollout("r1")).tries == 0
