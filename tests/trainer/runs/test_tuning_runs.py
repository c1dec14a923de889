"""`penstock train sft` and `dpo`: real rollouts of a real gateway move what is held out, and a run that is killed goes
on to the same weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes import interrupted_tuning
from fakes.engine import engine
from fakes.lives import fork
from fakes.process import Gateway, running, upstream
from fakes.provider import serving
from fakes.schooling import BAD, GOOD, PER_GROUP, school, script
from fakes.settings import Sections, merged, toml
from fakes.tiny_model import make_model, make_tokenizer
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.run import Point
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines import CheckpointError
from penstock.trainer.runs import supervision, tuning
from penstock.trainer.runs.tuning import Tuning
from penstock.trainer.serving.publisher import PublishError

# A guard against hanging only: several real processes and trainings on a machine that may be slow.
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
GROUPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("model"))
    make_tokenizer().save_pretrained(path)
    return path


@asynccontextmanager
async def teaching(home: Path) -> AsyncGenerator[Gateway]:
    """A gateway with groups on its tape, in which every other rollout is good."""
    async with serving() as provider, engine() as vllm:
        provider.script = script
        both = upstream("teacher", provider.openai_url, "openai") + upstream("vllm", vllm.openai_url, "openai")
        async with running(home, both) as gateway:
            await more(gateway, range(GROUPS))
            yield gateway


async def more(gateway: Gateway, groups: Iterable[int]) -> None:
    """So many groups more."""
    async with Client(gateway.url) as client, aiohttp.ClientSession() as http:
        await school(client, http, gateway.url, groups)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def taught(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    """Every run has a name of its own, and a model of that name."""
    async with teaching(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(taught: Gateway) -> AsyncGenerator[Client]:
    async with Client(taught.url) as made:
        yield made


def settings(path: Path, home: Path, name: str, **sections: dict[str, Any]) -> Sections:
    """What train.toml says."""
    given: Sections = {
        "run": {"name": name, "directory": str(home / name), "checkpoint_every": 2},
        "model": {"path": str(path), "rank": 4, "name": name},
        "engine": {"batch_tokens": 256},
        "optimiser": {"learning_rate": 0.03, "schedule": "cosine"},
        "data": {"held_out": 0.3, "batch": 4, "epochs": 4},
        "sft": {"reward": 0.5},
        "dpo": {"pairs": "all"},
        "evaluate": {"every": 4},
    }
    return merged(given, sections)


async def tuned(kind: Tuning, url: str, sections: Sections) -> None:
    await tuning._tune(kind, TrainConfig.model_validate(sections), url, None)


async def points(client: Client, run: str) -> list[Point]:
    return [point async for point in client.points(run)]


async def events(client: Client, run: str) -> list[str]:
    return [event.text async for event in client.run_events(run)]


def kept(home: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / name / "data" / "chats.jsonl").read_text().splitlines()]


async def test_good_answers_are_learnt(taught: Gateway, client: Client, model: Path, tmp_path: Path) -> None:
    await tuned("sft", taught.url, settings(model, tmp_path, "tuned", publish={"release": "canary"}))
    run = await client.run("tuned")
    assert (run.kind, run.status, run.steps) == ("sft", "succeeded", 8)
    assert [(one.name, one.version) for one in run.made] == [("tuned", "tuned.8")]
    first, *others = await points(client, "tuned")
    assert [point.step for point in others] == list(range(1, 9))
    # Of six groups two are held out; of four rollouts two are good.
    counted = {"rollouts": 24.0, "lessons": 8.0, "lessons/held_out": 4.0, "dropped/rollouts_reward": 12.0}
    assert counted.items() <= first.values.items()
    before, after = first.values["evaluation/loss"], others[-1].values["evaluation/loss"]
    assert before is not None
    assert after is not None
    assert after < 0.5 * before
    assert {"loss", "tokens", "epoch", "tokens_per_second", "grad_norm"} <= others[-1].values.keys()
    assert {point.step for point in others if "evaluation/loss" in point.values} == {4, 8}
    assert (tmp_path / "tuned" / "adapters" / "tuned.8" / "adapter_model.safetensors").exists()
    (release,) = await client.releases("tuned")
    assert (release.candidate, release.only.modes, release.policy.stages[-1].approval) == ("tuned.8", ["online"], True)
    said = await events(client, "tuned")
    assert any("computes on the CPU" in text for text in said)
    # Said again it is all there: nothing is trained, registered or released twice.
    await tuned("sft", taught.url, settings(model, tmp_path, "tuned", publish={"release": "canary"}))
    assert len(await client.releases("tuned")) == 1
    assert await points(client, "tuned") == [first, *others]


async def test_the_better_is_preferred(taught: Gateway, client: Client, model: Path, tmp_path: Path) -> None:
    await tuned("dpo", taught.url, settings(model, tmp_path, "prefers", data={"epochs": 3}))
    run = await client.run("prefers")
    assert (run.kind, run.status, run.steps) == ("dpo", "succeeded", 12)
    first, *others = await points(client, "prefers")
    # Two good and two bad rollouts are four pairs.
    assert {"rollouts": 24.0, "lessons": 16.0, "lessons/held_out": 8.0}.items() <= first.values.items()
    assert first.values["evaluation/loss"] == pytest.approx(0.693147, abs=1e-4)
    last = others[-1].values
    assert last["evaluation/accuracy"] == 1
    assert (last["evaluation/margin"] or 0) > 0.1
    assert {"loss", "accuracy", "margin", "chosen", "rejected", "tokens"} <= last.keys()
    assert not await client.releases("prefers")


async def test_weights_that_are_published_are_not_replaced(taught: Gateway, model: Path, tmp_path: Path) -> None:
    first = settings(model, tmp_path, "taken", data={"epochs": 1})
    await tuned("sft", taught.url, first)
    other = settings(model, tmp_path / "other", "taken", data={"epochs": 1}, optimiser={"learning_rate": 0.1})
    with pytest.raises(PublishError, match=r"run\.name: 'taken' has published taken@taken\.2 already"):
        await tuned("sft", taught.url, other)
    await tuned("sft", taught.url, first)


async def test_updates_that_change_nothing_are_told(
    taught: Gateway, client: Client, model: Path, tmp_path: Path
) -> None:
    await tuned("dpo", taught.url, settings(model, tmp_path, "wild", data={"epochs": 1}, dpo={"beta": 1e38}))
    assert sum("the gradient is not finite" in text for text in await events(client, "wild")) == 1


async def test_a_killed_run_goes_on_to_the_same_weights(model: Path, tmp_path: Path) -> None:
    steps: dict[Tuning, int] = {"sft": 8, "dpo": 12}
    broken: dict[Tuning, Sections] = {}
    async with teaching(tmp_path / "gateway") as gateway, Client(gateway.url) as client:
        for kind in steps:
            epochs = {"epochs": 4 if kind == "sft" else 3}
            whole, broken[kind] = (settings(model, tmp_path, f"{kind}-{name}", data=epochs) for name in "ab")
            await tuned(kind, gateway.url, whole)
            await killed(kind, gateway.url, broken[kind] | {"publish": {"release": "auto"}}, tmp_path)
            # `--release` is stronger than the file.
            assert (await client.run(f"{kind}-b")).config["publish"]["release"] == "none"
            assert sorted(path.name for path in (tmp_path / f"{kind}-b" / "checkpoints").iterdir()) == [
                ".step-00000004.partial", "step-00000002",
            ]  # fmt: skip
        # What comes after its start is not for this run, nor is a judgement that is revised.
        await more(gateway, [GROUPS])
        attempt = (await client.rollout("task-0-0")).attempts[0].id
        await client.reward("task-0-0", attempt, Judgement(value=-1.0, source="user"))
        for kind, last in steps.items():
            await tuned(kind, gateway.url, broken[kind])
            names = [f"{kind}-a", f"{kind}-b"]
            made = [tmp_path / name / "adapters" / f"{name}.{last}" for name in names]
            one, other = ((path / "adapter_model.safetensors").read_bytes() for path in made)
            assert one == other
            told = [await points(client, name) for name in names]
            assert [exact(point) for point in told[0]] == [exact(point) for point in told[1]]
            run = await client.run(f"{kind}-b")
            assert (run.resumed, run.since_step, run.status) == (1, 3, "succeeded")


def exact(point: Point) -> dict[str, float | None]:
    """What does not depend on the clock."""
    return {name: value for name, value in point.values.items() if "second" not in name}


async def killed(kind: Tuning, url: str, sections: Sections, home: Path) -> None:
    """A run in a process of its own, with `--release none`, killed while it saves step 4."""
    (home / "train.toml").write_text(toml(sections))
    words = ["train", kind, str(home / "train.toml"), "--release", "none", "--gateway", url]
    with fork(interrupted_tuning.run, 4, words) as (_, says):
        assert await asyncio.to_thread(says.recv) == "renaming"


async def test_of_a_group_the_best_are_taken(taught: Gateway, client: Client, model: Path, tmp_path: Path) -> None:
    wanted = settings(model, tmp_path, "best", sft={"reward": None, "best": 1}, data={"held_out": 0.0, "epochs": 1})
    await tuned("sft", taught.url, wanted)
    (first, *_) = await points(client, "best")
    assert (first.values["lessons"], first.values["dropped/rollouts_beaten"]) == (GROUPS, GROUPS * (PER_GROUP - 1))


async def test_all_weights_become_a_directory(taught: Gateway, client: Client, model: Path, tmp_path: Path) -> None:
    full = settings(
        model, tmp_path, "full", model={"weights": "full"}, data={"epochs": 1}, optimiser={"learning_rate": 1e-3}
    )
    await tuned("sft", taught.url, full)
    assert (await client.run("full")).made == []
    assert (tmp_path / "full" / "models" / "full.2" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match=r"publish.release: all weights need a server of their own"):
        await tuned("sft", taught.url, full | {"publish": {"release": "auto"}})


async def test_files_are_learnt_from_too(taught: Gateway, client: Client, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    question = [{"role": "user", "content": "water?"}]
    good, bad = [{"role": "assistant", "content": GOOD}], [{"role": "assistant", "content": BAD}]
    file.write_text("".join(json.dumps({"messages": [*question, *good]}) + "\n" for _ in range(3)))
    await tuned("sft", taught.url, settings(model, tmp_path, "f", data={"file": str(file)}, sft={"reward": None}))
    assert [(row["rollout"], row["messages"][1]["content"]) for row in kept(tmp_path, "f")] == [
        (f"line-{number}", GOOD) for number in (1, 2, 3)
    ]
    # A pair: what stands in the prompt is told and not trained on.
    file.write_text(json.dumps({"prompt": [*question, *good, *question], "chosen": good, "rejected": bad}) + "\n")
    await tuned(
        "dpo", taught.url, settings(model, tmp_path, "p", data={"file": str(file), "held_out": 0.0, "epochs": 3})
    )
    assert [[one.get("weight") for one in row["messages"]] for row in kept(tmp_path, "p")] == [
        [None, 0, None, None]
    ] * 2
    first, *others = await points(client, "p")
    assert (first.values["lessons"], len(others)) == (1, 3)
    assert others[-1].values["accuracy"] == 1


@pytest.mark.parametrize(
    ("kind", "line", "problem"),
    [
        ("sft", "{", r"data\.file: .*chats\.jsonl, line 2: not JSON"),
        ("sft", '{"messages": []}', r"line 2: messages: it has 0 items, not 1 or more"),
        ("sft", '{"messages": [{"content": "x"}]}', r"line 2: messages\.0: .*needs a role"),
        ("sft", '{"chosen": [{"role": "user"}], "rejected": [{"role": "user"}]}', "it is a preference, and sft"),
        ("dpo", '{"messages": [{"role": "user", "content": "x"}]}', r"nothing to learn from \(groups_alone 2\)"),
        ("sft", '{"messages": [{"role": "user", "content": "x"}]}', r"nothing to learn from \(chats_unmarked 2\)"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_a_file_is_said(
    kind: Tuning, line: str, problem: str, taught: Gateway, client: Client, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line)
    wanted = settings(model, tmp_path, "wrong", data={"file": str(file)}, sft={"reward": None})
    with pytest.raises(ConfigError, match=problem):
        await tuned(kind, taught.url, wanted)
    assert "wrong" not in [run.id async for run in client.runs()]


async def test_what_does_not_go_together_is_refused(taught: Gateway, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.rollouts: .*'colour'"):
        await tuned("sft", taught.url, settings(model, tmp_path, "x", data={"rollouts": "colour:red"}))
    with pytest.raises(ConfigError, match=r"nothing to learn from \(rollouts_reward 24\)"):
        await tuned("sft", taught.url, settings(model, tmp_path, "y", sft={"reward": 2.0}))
    with pytest.raises(ConfigError, match=r"model.path: .* holds no tokenizer"):
        await tuned("sft", taught.url, settings(tmp_path, tmp_path, "z"))
    short = settings(model, tmp_path, "one", data={"epochs": 1})
    await tuned("sft", taught.url, short)
    with pytest.raises(CheckpointError, match=r"is of a run of sft; give this one a run.directory of its own"):
        await tuned("dpo", taught.url, short)
    with pytest.raises(ConfigError, match=r"run.name: 'one' is a run of sft on the tape; choose another name"):
        await tuned("dpo", taught.url, short | {"run": {"name": "one", "directory": str(tmp_path / "other")}})
    chats = tmp_path / "one" / "data" / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in kept(tmp_path, "one")[1:]))
    with pytest.raises(CheckpointError, match=r"was made from other chats than .*data"):
        await tuned("sft", taught.url, short)
    chats.write_text('{"rollout": "r"\n')
    with pytest.raises(CheckpointError, match=r"data is not as the run has written it, .*JSONDecodeError"):
        await tuned("sft", taught.url, short)
    chats.unlink()
    with pytest.raises(CheckpointError, match=r"has learnt from cannot be read: .*chats\.jsonl"):
        await tuned("sft", taught.url, short)


async def test_before_the_first_checkpoint_it_begins_anew(
    taught: Gateway, client: Client, model: Path, tmp_path: Path
) -> None:
    """What a start that failed has read is not what the next one learns from."""
    with pytest.raises(ConfigError, match=r"nothing to learn from \(nothing was read\)"):
        await tuned("sft", taught.url, settings(model, tmp_path, "new", data={"rollouts": "group:none"}))
    await tuned("sft", taught.url, settings(model, tmp_path, "new", data={"epochs": 1}))
    assert (await client.run("new")).status == "succeeded"


async def test_where_the_gateway_knows_no_such_server_the_weights_are_there(
    taught: Gateway, client: Client, model: Path, tmp_path: Path
) -> None:
    nowhere = settings(model, tmp_path, "lost", data={"epochs": 1}, inference={"upstream": "nowhere"})
    await tuned("sft", taught.url, nowhere)
    assert (tmp_path / "lost" / "adapters" / "lost.2").is_dir()
    assert any("not registered: lost@base cannot be registered" in text for text in await events(client, "lost"))
    # Who wants a release is told before the training.
    late = settings(model, tmp_path, "late", publish={"release": "auto"}, inference={"upstream": "nowhere"})
    with pytest.raises(PublishError, match="cannot be registered"):
        await tuned("sft", taught.url, late)
    assert "late" not in [run.id async for run in client.runs()]


async def test_a_run_that_computes_for_long_is_not_taken_for_silent(
    taught: Gateway, client: Client, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def computes(run: tuning.TuningRun) -> None:
        begun.set()
        await goes_on.wait()

    monkeypatch.setattr(supervision, "ALIVE_S", 0.05)
    monkeypatch.setattr(tuning.TuningRun, "run", computes)
    training = asyncio.ensure_future(tuned("sft", taught.url, settings(model, tmp_path, "slow")))
    await begun.wait()
    before = (await client.run("slow")).last_seen_ns

    async def heard() -> bool:
        return (await client.run("slow")).last_seen_ns > before

    await until(heard)
    goes_on.set()
    await training
