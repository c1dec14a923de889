"""The best weights by held-out evaluation are kept, named and released; the last ones are always published."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.mistakes import tells
from fakes.settings import Sections, merged
from fakes.staging import staged

from penstock.trainer.runs.evaluation import TrainingProgress, choose_release, link_best

pytestmark = pytest.mark.timeout(300)

AGENT = ["--callable=fakes.unteachable:agent", "--preload", "--reward=fakes.unteachable:peaks_at_two"]


def own(home: Path) -> Sections:
    """Held-out tasks, on which the weights of step 2 are the best."""
    (home / "policy.toml").write_text("margin_absolute = 0.1\n")
    (home / "held-out.jsonl").write_text('{"question": "h"}\n')
    return {
        "model": {"rank": 4},
        "rollouts": {"run": ["--workers=6", *AGENT]},
        "evaluate": {"suite": [{"tasks": home / "held-out.jsonl"}], "every": 1},
        "publish": {"keep": 1, "release": "auto", "policy": home / "policy.toml"},
    }


async def test_a_release_takes_the_best_weights_which_are_kept(tmp_path: Path, model: Path) -> None:
    async with staged(tmp_path, model, 4, own(tmp_path)) as stage:
        await stage.to_the_end()
        async with stage.client as client:
            points = {point.step: point.values async for point in client.points("run")}
            (found,) = [one for one in await client.releases("policy") if one.only.modes == ["online"]]
            said = [event.text async for event in client.run_events("run")]
    assert [points[step]["evaluation/held-out/reward"] for step in range(5)] == [0.25, 0.5, 1.0, 0.75, 0.75]
    assert found.candidate == "run.2"
    # One version is kept by `publish.keep`, and the best beside it.
    kept = sorted(path.name for path in (tmp_path / "run" / "adapters").iterdir() if not path.name.startswith("."))
    assert {"run.2", "run.4"} <= set(kept)
    assert "run.1" not in kept
    assert (tmp_path / "run" / "best").resolve() == tmp_path / "run" / "adapters" / "run.2"
    assert any(tells(one, "the best so far is run.2", "evaluation/held-out/reward 1") for one in said)
    assert not any("the best so far is run.3" in one for one in said)


async def test_the_last_weights_are_published_whatever_the_interval(tmp_path: Path, model: Path) -> None:
    sections = merged(own(tmp_path), {"publish": {"every": 2, "release": "none"}, "evaluate": {"every": 3}})
    async with staged(tmp_path, model, 3, sections) as stage:
        await stage.to_the_end()
        async with stage.client as client:
            versions = [one.version for one in (await client.resource("policy")).versions]
            point = [point async for point in client.points("run")][-1]
    assert versions == ["base", "run.0", "run.2", "run.3"]
    # And it is they that the last evaluation is of.
    assert point.values["evaluation/held-out/reward"] == 0.75


def test_what_is_published_when() -> None:
    assert not TrainingProgress(step=1).publish_due(last=True, every=1)
    assert TrainingProgress(step=3, trained=3, version=2).publish_due(last=True, every=2)
    assert not TrainingProgress(step=3, trained=3, version=2).publish_due(last=False, every=2)
    # A step that taught nothing publishes what the one before has left.
    assert TrainingProgress(step=4, trained=3, version=2).publish_due(last=False, every=2)


def test_the_best_is_the_first_of_equal_ones() -> None:
    place = TrainingProgress()
    assert choose_release(place) == (0, "the last weights")
    seen = [(0, 0.5), (1, 0.5), (2, 0.75), (3, 0.75), (4, 0.5)]
    best = [TrainingProgress.record_evaluation(place, reward) for place.version, reward in seen]
    assert best == [True, False, True, False, False]
    assert choose_release(place) == (2, "the best on the held-out tasks (reward 0.75)")
    worse = TrainingProgress(version=4, best=0, best_reward=0.5)
    version, why = choose_release(worse)
    assert (version, tells(why, "no later weights were better", "reward 0.5")) == (0, True), why


def test_the_link_leads_to_the_newest_best(tmp_path: Path) -> None:
    for name in ("run.1", "run.2"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        link_best(tmp_path, tmp_path / "adapters" / name)
        assert (tmp_path / "best").resolve().name == name
    assert not (tmp_path / "best").readlink().is_absolute()
