"""`penstock train apo advise` as people run it: a real gateway, a real agent, scripted models."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.ports import steady_ports
from fakes.process import PATHS, Gateway
from fakes.provider import Provider
from fakes.shell import Shell

from examples import shop
from examples.shop_model import Models
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion
from penstock.trainer.apo.advice.session import TapeObservationReader
from penstock.trainer.apo.config import load, with_overrides
from penstock.trainer.apo.gateway_laboratory import seed_versions
from penstock.trainer.apo.session import splits_of

pytestmark = pytest.mark.timeout(240)
APO = """\
[run]
name = "shop"
directory = "{home}/run"
[texts]
prompts = ["shop"]
[tasks]
file = "{home}/tasks.jsonl"
key = "customer"
[reflection]
model = "thinker"
price = [1000, 0]
"""
RUNNER = '[rollouts]\nrun = ["--workers=8", "--callable=fakes.light_shop:agent", "--preload", "--reward={judge}"]\n'
JUDGE = """\
from fakes.light_shop import reward
def silent(task, output, transcript):
    return None
"""


@pytest.fixture
async def home(gateway: Gateway, provider: Provider, tmp_path: Path) -> AsyncGenerator[Path]:
    """A folder with tasks and a judge; the gateway knows the agent's prompt, and the models are scripted."""
    provider.script = Models().answer
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shop.tasks()))
    (tmp_path / "judges.py").write_text(JUDGE)
    async with Client(gateway.url) as client:
        await client.add_version("shop", NewVersion(kind="prompt", content={"text": shop.PROMPT, "sent": True}))
        yield tmp_path


def shell(gateway: Gateway, home: Path) -> Shell:
    made = Shell(gateway.url, home)
    made.patience = 120.0
    made.env["PYTHONPATH"] = PATHS
    return made


def config(home: Path, judge: str = "judges:reward", more: str = "", name: str = "apo") -> str:
    path = home / f"{name}.toml"
    path.write_text(APO.format(home=home) + RUNNER.format(judge=judge) + more)
    return str(path)


async def test_it_says_that_prompts_are_worth_it_and_costs_nothing_twice(
    gateway: Gateway, home: Path, provider: Provider
) -> None:
    path = config(home)
    done = await shell(gateway, home).run("train", "apo", "advise", path, "--rollouts", "30", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["verdict"] == "prompts"
    assert found["variance"]["judgements"] >= 10
    # This grader says the same again.
    assert found["variance"]["grader"] < 0.2 * found["variance"]["within"] + 1e-9
    assert found["spent"]["rollouts"] <= 30
    assert found["spent"]["money"] > 0
    assert "the answer has no" in found["failures"][0]
    async with Client(gateway.url) as client:
        names = [rollout.id async for rollout in client.rollouts("metadata.penstock.run=shop.advise")]
    assert len(names) == found["spent"]["rollouts"]
    calls = len(provider.log)
    again = await shell(gateway, home).run("train", "apo", "advise", path, "--rollouts", "30", COLUMNS="80")
    assert again.code == 0, again.err
    assert len(provider.log) == calls
    assert again.text.startswith("shop  advise:  prompts")
    assert max(map(len, again.text.splitlines())) <= 80
    assert again.err.startswith("8 rollouts of ")


async def test_what_steps_cost_is_no_noise_of_the_grader(gateway: Gateway, home: Path) -> None:
    path = config(home, more="[reward]\nstep_cost = 0.3\n")
    done = await shell(gateway, home).run("train", "apo", "advise", path, "--rollouts", "30", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["variance"]["judgements"] >= 10
    assert found["variance"]["grader"] < 1e-9


async def test_without_a_reward_it_says_so(gateway: Gateway, home: Path) -> None:
    done = await shell(gateway, home).run(
        "train", "apo", "advise", config(home, "judges:silent"), "--rollouts", "24", "--json"
    )
    assert (done.code, done.out, "the first 8 rollouts has a reward" in done.err) == (1, b"", True), done.err


async def test_earlier_rollouts_count_where_they_are_of_a_task_of_the_train_split(gateway: Gateway, home: Path) -> None:
    loaded = with_overrides(load(Path(config(home))), None, None)
    splits = splits_of(loaded)
    async with Client(gateway.url) as client:
        given = {"train": splits.train[0], "test": splits.test[0]}
        specs = [RolloutSpec(id=f"old-{name}", input=task.input, mode="online") for name, task in given.items()]
        await client.enqueue(specs)
        words = ["run", "--mode", "online", "--callable", "fakes.light_shop:agent", "--reward", "judges:reward"]
        done = await shell(gateway, home).run(*words)
        assert done.code == 0, done.err
        tape = TapeObservationReader(client, loaded.reward, None)
        (found,) = await tape.earlier_observations(await seed_versions(client, loaded), splits.train, "seed")
        assert (found.rollout, found.task, found.prompt) == ("old-train", splits.train[0].id, "seed")
        assert found.reward == (await client.rollout("old-train")).reward
        assert found.output
        assert found.tokens


async def test_without_a_runner_it_says_so(gateway: Gateway, home: Path) -> None:
    path = home / "apo.toml"
    path.write_text(APO.format(home=home) + "[rollouts]\nattempt_timeout = 0.1\n")
    done = await shell(gateway, home).run("train", "apo", "advise", str(path))
    assert (done.code, "is there a runner?" in done.err) == (1, True), done.err
    assert "Traceback" not in done.err


async def test_without_a_gateway_it_says_so_at_once(home: Path) -> None:
    alone = Shell(f"http://127.0.0.1:{steady_ports(1)[0]}", home)
    done = await alone.run("train", "apo", "advise", config(home))
    assert done.code == 1
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) == 1


async def test_wrong_arguments_and_a_judge_that_is_not_there_are_named(gateway: Gateway, home: Path) -> None:
    good, bad = config(home), config(home, "judges:nobody", name="nobody")
    for words, said in (
        ([good, "--rollouts", "5"], "--rollouts"),
        ([good, "--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        ([good, "--agent"], "--agent"),
        ([bad], "rollouts.run: --reward: "),
    ):
        done = await shell(gateway, home).run("train", "apo", "advise", *words)
        assert done.code != 0, words
        assert said in done.err + done.text
        assert "Traceback" not in done.err
