"""`penstock run --check`: agents and judge are looked at, nothing is claimed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.mistakes import tells
from fakes.runs import AGENTS, PYTHON, StartRun, enqueue

from penstock.gateway.client.client import Client
from penstock.sidecar.run.reward_judge import ANSWER, RewardError, RewardJudge, dry_run_judge, first_task, stand_in
from penstock.sidecar.run.settings import JudgeSettings, UsageError

HERE = "fakes.judges"


@pytest.mark.parametrize(
    ("judge", "tried"),
    [
        (f"{HERE}:right", f"{HERE}:right was tried with {ANSWER} and gave a reward"),
        (
            f"{HERE}:reads_the_output",
            f"{HERE}:reads_the_output was tried with {ANSWER} and raised KeyError: 'city' (judges.py, ",
        ),
        (f"{HERE}:waits", f"{HERE}:waits was tried with"),
        pytest.param("true", "the command 'true' of --reward was found, and not run", marks=pytest.mark.slow),
        (None, "no --reward was given"),
    ],
)
async def test_a_judge_that_may_work_is_not_doubted(judge: str | None, tried: str) -> None:
    found = await dry_run_judge(JudgeSettings(judge), {"city": "Ulm"})
    assert (found.doubt, found.tried.startswith(tried)) == (None, True), found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "it returned nothing"),
        ("broken", "OSError: no grader at port 9"),
        ("infinite", "the reward is 'inf': a finite number is wanted"),
    ],
)
async def test_a_judge_that_fails_whatever_it_is_given_is_doubted(name: str, why: str) -> None:
    found = await dry_run_judge(JudgeSettings(f"{HERE}:{name}"), None)
    assert found.doubt is not None
    assert tells(found.doubt, f"--reward: {HERE}:{name}", ANSWER, f"{why};")


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        (f"{HERE}:of_one", "fakes.judges:of_one(task) is called with two arguments, task"),
        ("penstock.graders:judge", "penstock.graders:judge needs model and rubric: write `from functools import"),
        ("penstock.graders:numerik", "penstock.graders has no 'numerik'; did you mean 'numeric'?"),
    ],
)
def test_a_judge_that_cannot_be_called_is_refused_with_a_way_out(judge: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        _ = RewardJudge(JudgeSettings(judge))


@pytest.mark.parametrize(("name", "reads"), [("right", True), ("infinite", True), ("of_two", False)])
def test_a_transcript_is_made_for_who_takes_it(name: str, reads: bool) -> None:
    assert RewardJudge(JudgeSettings(f"{HERE}:{name}")).reads_calls == reads


async def test_a_judge_of_two_arguments_works() -> None:
    judge, task = RewardJudge(JudgeSettings(f"{HERE}:of_two")), {"city": "Ulm"}
    assert [one.value for one in await judge.judge(task, task, None)] == [1.0]
    assert (await dry_run_judge(JudgeSettings(f"{HERE}:of_two"), task)).doubt is None


async def test_a_judge_that_takes_too_long_gives_no_reward() -> None:
    with pytest.raises(RewardError, match=r"it took longer than 0\.1 s"):
        _ = await RewardJudge(JudgeSettings(f"{HERE}:slow", timeout_s=0.1)).judge(None, None, stand_in(None))


def test_the_first_task_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"city": "Ulm"}\nnot read\n')
    assert first_task(path) == ({"city": "Ulm"}, 2)
    path.write_text("{\n")
    with pytest.raises(UsageError, match=r"--check: .*tasks.jsonl has no task that can be read in its first line"):
        _ = first_task(path)


async def test_nothing_is_claimed(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None)
    (tmp_path / "tasks.jsonl").write_text("1\n2\n")
    run = await start_run("--check", str(tmp_path / "tasks.jsonl"), agent=(PYTHON, str(AGENTS / "family.py")))
    assert await run.ended() == 0, run.stderr
    assert "that can be seen. On the first of 2 tasks: no --reward was given" in run.stdout
    assert (await client.queue()).waiting == {"train": 1}
    missing = await start_run("--check", str(tmp_path / "tasks.jsonl"), agent=("no-such-agent",))
    assert (await missing.ended(), tells(missing.stderr, "no command 'no-such-agent'", "PATH")) == (2, True)
