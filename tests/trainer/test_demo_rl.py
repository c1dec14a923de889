"""`make demo-rl` around its training: what it says, where its results go, what it asks. The training is in
`test_learns`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.lookup import CITIES, TOPICS, fact
from examples.lookup_rl import KEPT, ROOT, TRAIN, new_folder, write_tasks
from examples.lookup_summary import Results, summary
from penstock.trainer.config import TrainConfig


def test_no_run_takes_the_folder_of_another(tmp_path: Path) -> None:
    made: list[str] = []
    for _ in range(3):
        folder = new_folder(tmp_path, 0)
        folder.mkdir()
        made.append(folder.name)
    assert made == ["seed-0", "seed-0.2", "seed-0.3"]
    assert new_folder(tmp_path, 1).name == "seed-1"


def test_git_ignores_the_results() -> None:
    assert f"/{KEPT.relative_to(ROOT).parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_hundred_questions_are_held_out_and_asked_greedily(tmp_path: Path) -> None:
    """Each has one right answer, which no other tool gives."""
    write_tasks(tmp_path, 0)
    parts = [
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("held-out", "train")
    ]
    held_out, trained = ({one["question"]: one["temperature"] for one in part} for part in parts)
    assert len(held_out) >= 100
    assert not held_out.keys() & trained.keys()
    assert (set(held_out.values()), set(trained.values())) == ({0.0}, {1.0})
    assert {one["topic"] for one in parts[1]} == set(TOPICS)
    assert all(len({fact(topic, city) for topic in TOPICS}) == len(TOPICS) for city in CITIES)


def test_its_settings_load(tmp_path: Path) -> None:
    import tomllib

    words = {"home": tmp_path, "steps": 20, "seed": 0, "python": "python", "vllm": 8000}
    config = TrainConfig.model_validate(tomllib.loads(TRAIN.format(**words)))
    assert [suite.tasks.name for suite in config.evaluate.suite] == ["held-out.jsonl"]


def test_it_closes_with_before_and_after_and_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").symlink_to("adapters/lookup.5")
    found = Results({0: 2 / 104, 5: 103 / 104, 10: 103 / 104, 20: 100 / 104}, 104, "http://127.0.0.1:4747")
    told = list(summary(found, tmp_path, "/env/bin/python", 61.4, 422))
    text = "\n".join(told)
    assert "answered rightly: 104 " in text
    assert "  before the first step     2 of 104  0.02 [0.01, 0.07]" in told
    assert "  after step 5            103 of 104  0.99 [0.95, 1.00]  best" in told
    assert "  after step 20           100 of 104  0.96 [0.91, 0.98]" in told
    assert sum(line.endswith("best") for line in told) == 1
    assert "The model took 1 min 1 s, 20 steps with vLLM's start 7 min 2 s." in told
    for path in ("run.html", "run.jsonl", "run/best -> adapters/lookup.5"):
        assert f"{tmp_path}/{path}" in text
    assert f"  /env/bin/penstock serve --config {tmp_path}/penstock.toml" in told
    assert "  /env/bin/penstock runs show lookup --gateway http://127.0.0.1:4747" in told


def test_its_lines_are_no_wider_than_a_terminal() -> None:
    """But for paths, which nobody can make shorter."""
    found = Results({step: 1.0 for step in range(0, 25, 5)}, 104, "http://127.0.0.1:47470")
    for line in summary(found, Path("/"), "/bin/python", 600, 600):
        assert len(line) <= 80, line


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_run_without_a_link_says_so(share: float, tmp_path: Path) -> None:
    lines = list(summary(Results({0: share}, 104, "http://x"), tmp_path, "/env/bin/python", 0, 0))
    assert any(line.endswith("best weights  none") for line in lines)
