"""A run that learns nothing says why after the first step, and fails after a few; what can be known before is said
before the first step.

Real are the trainer, the gateway, the runner and its agents, each a process of its own; the vLLM is scripted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.mistakes import tells
from fakes.settings import Sections, merged
from fakes.staging import staged

from penstock.gateway.client.client import Client
from penstock.trainer.runs.grpo import MOST_IDLE

pytestmark = pytest.mark.timeout(300)

GROUPS, SIZE = 2, 3
ALL = GROUPS * SIZE


def run(agent: str = "agent", reward: str = "reward") -> list[str]:
    """What the trainer starts its runner with."""
    there = f"--callable=fakes.unteachable:{agent}"
    return ["--workers=6", there, "--preload", f"--reward=fakes.unteachable:{reward}"]


async def told(client: Client) -> list[str]:
    """How the run ended, and its warnings, newest first."""
    async with client:
        found = await client.run("run")
        warnings = [event.text async for event in client.run_events("run") if event.level == "warning"]
    return [f"{found.status}: {found.message}", *warnings]


@pytest.mark.parametrize(
    ("runner", "sections", "what", "fix"),
    [
        (
            run(reward="raises"),
            {},
            "succeeded and have no reward (run-train-1-0-0: RuntimeError: the key of the grader is missing)",
            "name a reward function in rollouts.run (--reward=module:function), or mend the one that is there",
        ),
        (
            run(reward="not_a_number"),
            {},
            "succeeded and have no reward (run-train-1-0-0: the reward is 'nan': a finite number is wanted)",
            "or mend the one that is there",
        ),
        (
            run(reward="always_one"),
            {},
            "are in groups whose rewards are all equal (mean 1)",
            "give partial credit, take tasks that are sometimes solved, or raise rollouts.group_size (3)",
        ),
        (
            run("crashes"),
            {},
            "failed (run-train-1-0-0: exit code 1: ValueError: the tool's answer has no field 'city')",
            "penstock show run-train-1-0-0 shows what the agent said; mend the agent or its task",
        ),
        (
            run("asks_another"),
            {},
            "asked for another model (run-train-1-0-0: it asked for base, not for policy)",
            "let the agent ask for 'policy', or set model.name to what it asks for and route that",
        ),
        (
            run(),
            {"engine": {"batch_tokens": 8}},
            "have only samples longer than engine.batch_tokens (8)",
            "raise it; the longest has 11 tokens",
        ),
        (
            run("is_short", "always_one"),
            {},
            "were cut off at the limit of tokens, and the rewards of each group are equal",
            "raise the max_tokens that the agent asks for, or vLLM's --max-model-len",
        ),
    ],
    ids=["reward-raises", "reward-nan", "rewards-equal", "agent-crashes", "other-model", "samples-long", "all-cut"],
)
async def test_a_run_that_learns_nothing_says_why_and_fails(
    tmp_path: Path, model: Path, runner: list[str], sections: Sections, what: str, fix: str
) -> None:
    own: Sections = {"model": {"rank": 4}, "rollouts": {"run": runner}}
    async with staged(tmp_path, model, 5, own | sections) as stage, stage.life() as life:
        assert await life.ended() == 1
        ended, *rest = await told(stage.client)
    ended = ended.replace(f"run-train-{MOST_IDLE}-", "run-train-1-")
    *again, first = [line for line in rest if "nothing was learnt" in line]
    assert len(again) == MOST_IDLE - 2
    assert f"nothing was learnt: {ALL} of {ALL} rollouts {what}" in first
    assert fix in first
    assert tells(ended, f"failed: {MOST_IDLE} steps in a row", f"{ALL} of {ALL}")
    assert what.partition("(")[0] in ended
    assert fix in ended
    assert "all 5 steps are done" not in life.text
    if "have no reward" in what:
        doubted(life.text, what.partition(": ")[2].removesuffix(")"))
    assert life.text.count("Traceback") == 0


def doubted(said: str, what: str) -> None:
    """The judge has failed on a stand-in, too, and that was told before the first step."""
    before = said.partition("step 1")[0]
    assert re.search(r"fakes\.unteachable:\w+ gave no reward", before)
    assert f"with a stand-in for the agent's answer: {what}; if it does so" in before


@pytest.mark.parametrize(
    ("train", "sections", "said"),
    [
        (None, {}, r"model.name: no [[route]] of the gateway is for 'policy' (it has none at all): add one with"),
        ("false", {}, "model.name: the gateway's [[route]] 'policy', which serves 'policy', says train = false: its"),
        (
            "true",
            {"model": {"name": "polcy"}},
            "model.name: no [[route]] of the gateway is for 'polcy' (it has 'policy'): add one with model = \"polcy\"",
        ),
        (
            "true",
            {"rollouts": {"run": run(reward="of_one")}},
            "rollouts.run: --reward: fakes.unteachable:of_one(task) is called with two arguments, task and output, or "
            "with the transcript as a third; it can take neither two nor three",
        ),
        (
            "true",
            {"rollouts": {"run": run(reward="nobody")}},
            "rollouts.run: --reward: 'fakes.unteachable:nobody': fakes.unteachable has no 'nobody'",
        ),
    ],
    ids=["not-routed", "not-trained", "model-name", "judge-of-one", "no-judge"],
)
async def test_what_is_wrong_is_said_before_the_first_step(
    tmp_path: Path, model: Path, train: str | None, sections: Sections, said: str
) -> None:
    own: Sections = {"model": {"rank": 4}, "rollouts": {"run": run()}}
    async with staged(tmp_path, model, 5, merged(own, sections), train=train) as stage, stage.life() as life:
        assert await life.ended() == 1
        async with stage.client as client:
            assert [one async for one in client.runs()] == []
            assert [one async for one in client.rollouts()] == []
    assert life.text.splitlines()[0].startswith(f"penstock: {said}"), life.text
    assert "Traceback" not in life.text
