"""Splits are sealed, and so are the settings once the test was opened; files are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.laboratory import tasks

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import SEARCHES, ApoConfig, digest
from penstock.trainer.apo.search import split
from penstock.trainer.apo.session import RunDirectory

SPLITS = split(tasks(40), 0)
GIVEN: dict[str, Any] = {"texts": {"prompts": ["desk"]}, "tasks": {"file": "tasks.jsonl"}, "reflection": {"model": "m"}}
OTHER: dict[str, Any] = {
    "run": {"name": "other"},
    "texts": {"prompts": ["desk", "door"]},
    "tasks": {"file": "tasks.jsonl", "key": "customer"},
    "reward": {"range": (0.0, 2.0)},
    "engine": "beam",
    "budget": {"rollouts": 900},
    "reflection": {"model": "m", "most_tokens": 100},
}
"""Another value of each section that decides what a search comes to."""


def config(**more: Any) -> ApoConfig:
    return ApoConfig.model_validate(GIVEN | more)


def test_a_run_goes_on_with_the_tasks_that_it_began_with(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.seal_splits(SPLITS, config())
    noted = json.loads((tmp_path / "run" / "splits.json").read_text())
    assert noted["seal"] == SPLITS.seal
    assert noted["tasks"]["test"] == [task.id for task in SPLITS.test]
    assert "question" not in json.dumps(noted), "inputs of tasks stay where they are"
    RunDirectory(tmp_path / "run").seal_splits(SPLITS, config())
    for changed in (split(tasks(40), 1), split(tasks(41), 0)):
        with pytest.raises(
            ConfigError, match=r"tasks: they, their key or the seed .* 'apo' began with, see .*splits\.json"
        ):
            directory.seal_splits(changed, config())


@pytest.mark.parametrize("section", OTHER)
def test_settings_of_a_search_are_fixed_once_its_test_was_opened(tmp_path: Path, section: str) -> None:
    directory, changed = RunDirectory(tmp_path), config(**{section: OTHER[section]})
    directory.seal_splits(SPLITS, config())
    directory.seal_splits(SPLITS, changed)
    directory.open_test(config(), "winner")
    directory.seal_splits(SPLITS, config())
    with pytest.raises(ConfigError, match=r"the test of '\w+' was opened with other settings, see .*test\.json"):
        directory.seal_splits(SPLITS, changed)


def test_every_section_that_decides_is_tried() -> None:
    assert OTHER.keys() == set(SEARCHES)


@pytest.mark.parametrize(
    "more",
    [
        {"rollouts": {"run": ["--workers=9"], "attempt_timeout": 60.0}},
        {"publish": {"release": "auto"}},
        {"test": {"repeats": 5}},
        {"run": {"directory": "elsewhere"}},
    ],
)
def test_settings_that_decide_nothing_of_the_search_may_change(more: dict[str, Any]) -> None:
    assert digest(config(**more)) == digest(config())


def test_what_the_test_was_opened_for_first_stays(tmp_path: Path) -> None:
    for winner in ("first", "second"):
        RunDirectory(tmp_path).open_test(config(), winner)
    assert json.loads((tmp_path / "test.json").read_text()) == {"settings": digest(config()), "winner": "first"}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"seal": '])
@pytest.mark.parametrize("name", ["splits.json", "test.json"])
def test_a_file_that_is_no_longer_what_it_was_is_named(tmp_path: Path, name: str, text: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.seal_splits(SPLITS, config())
    directory.open_test(config(), "winner")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.directory: .*{name} cannot be read"):
        directory.seal_splits(SPLITS, config())


def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run\.directory: .*run"):
        RunDirectory(tmp_path / "run").seal_splits(SPLITS, config())


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "run")
    assert directory.write("report.html", "é\n") == tmp_path / "deep" / "run" / "report.html"
    directory.write("report.html", "second\n")
    assert [path.name for path in (tmp_path / "deep" / "run").iterdir()] == ["report.html"]
    assert (tmp_path / "deep" / "run" / "report.html").read_text(encoding="utf-8") == "second\n"


def test_a_full_disk_is_said_and_the_file_before_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write("note.txt", "first")
    # A device that is always full.
    (tmp_path / ".note.txt").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"run\.directory: .*note\.txt cannot be written: No space left on device"):
        directory.write("note.txt", "second")
    assert (tmp_path / "note.txt").read_text() == "first"
