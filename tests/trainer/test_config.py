"""train.toml is strict, says what is wrong and where, needs no torch, and is documented in both directions."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.mistakes import unhelpful
from fakes.pages import disagreements
from fakes.process import ROOT
from fakes.settings import documented, read

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import SuiteSettings, TrainConfig

DOCS = ROOT / "docs" / "training-settings.md"
MODEL = '[model]\npath = "model"\n'


def sections() -> dict[str, Any]:
    """The tables of the file by their headings."""
    return {f"[{name}]": field.annotation for name, field in TrainConfig.model_fields.items()} | {
        "[[evaluate.suite]]": SuiteSettings
    }


def keys() -> list[tuple[str, str]]:
    """What can be written below each heading; a list of tables has a heading of its own."""
    every = [(section, key) for section, model in sections().items() for key in model.model_fields]
    return [one for one in every if one != ("[evaluate]", "suite")]


def test_only_the_model_must_be_named(tmp_path: Path) -> None:
    config = read(tmp_path, MODEL)
    assert (config.advantage.estimator, config.loss.effective_correction) == ("dr_grpo", "token")
    assert config.learning_rate == 1e-4
    assert read(tmp_path, MODEL + 'weights = "full"\n').learning_rate == 1e-6
    with pytest.raises(ConfigError, match=r"train\.toml: model: it is missing"):
        read(tmp_path, "")


def test_a_misspelt_key_names_its_path_and_the_nearest(tmp_path: Path) -> None:
    misspelt: list[tuple[str, str, str]] = []
    for section, key in keys():
        head = MODEL if section == "[model]" else f"{MODEL}{section}\n"
        table = {"[[evaluate.suite]]": "evaluate.suite 1: "}.get(section, section.strip("[]") + ".")
        misspelt.append((f"{head}{key}q = 1\n", table, key))
    faults = unhelpful(partial(read, tmp_path), misspelt)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (MODEL + '[loss]\nkind = "ppg"', r"loss.kind: 'ppg' is not 'ppo', 'gspo', 'cispo' or 'pg'"),
        (MODEL + "[loss]\nclip = [0.2, 0.28]", "loss.clip: unknown key; known keys: kind, kl, correction, aggregate"),
        (MODEL + "[loss]\naggregate = 0", r"loss\.aggregate: 0 is not .*; loss\.aggregate: 0 is not 1 or more"),
        (
            MODEL + '[advantage]\noverlong = "punish"',
            r"advantage.overlong: 'punish' is not 'keep' or 'mask'; advantage.overlong: 'p",
        ),
        (MODEL + 'weights = "full"\nadapter = "x"', 'model: adapter: it goes with weights = "lora"'),
        (MODEL + "[engine]\nbatch_tokens = 1", "engine.batch_tokens: 1 is not 2 or more"),
        (MODEL + "[rollouts]\ngroup_size = 1", "rollouts.group_size: in a group of 1 dr_grpo has nothing"),
        (MODEL + "[run]\nsteps = 0", "run.steps: 0 is not 1 or more"),
        (MODEL + "[engine]\ndtype = 16", "engine.dtype"),
        (MODEL + "[[evaluate.suite]]\nsamples = 2", r"evaluate\.suite 1: tasks: it is missing"),
        (MODEL + 2 * '[[evaluate.suite]]\ntasks = "t"\n', r"evaluate\.suite: two suites are called 't'"),
        (MODEL + '[[evaluate.suite]]\ntasks = "a b.jsonl"', r"evaluate\.suite 1: tasks: figures are called 'a b' then"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


def test_a_group_of_one_is_fine_where_the_batch_is_compared(tmp_path: Path) -> None:
    assert read(tmp_path, MODEL + '[rollouts]\ngroup_size = 1\n[advantage]\nestimator = "reinforce++"\n')


def test_every_setting_is_documented_and_exists() -> None:
    text = DOCS.read_text(encoding="utf-8")
    told: dict[str, str] = {}
    for section, body in re.findall(r"^### `(\[+[\w.]+\]+)`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", body, re.MULTILINE)
        told |= {f"{section} {key}": meaning for key, meaning in rows}
    docs = {section: field_docs(model) for section, model in sections().items()}
    faults = disagreements(DOCS.name, told, {f"{section} {key}": docs[section][key] for section, key in keys()})
    assert not faults, "\n".join(faults)


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    assert read(tmp_path, documented(DOCS)).loss.kind == "ppo"


@pytest.mark.slow
def test_a_wrong_configuration_is_refused_without_torch() -> None:
    heavy = "torch transformers peft"
    code = f"import sys, trainer.config, trainer.commands; sys.exit(any(m in sys.modules for m in {heavy.split()}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_cannot_be_trained_with_prompts_is_refused(tmp_path: Path) -> None:
    from penstock.gateway.client.console import CommandError
    from penstock.trainer.apo.config import load
    from penstock.trainer.commands import _prompts
    from penstock.trainer.runs.prompt_rounds import settings_of

    path = tmp_path / "apo.toml"
    path.write_text('[texts]\nprompts = ["policy"]\n[reflection]\nmodel = "m"\n')
    lora = read(tmp_path, MODEL)
    assert _prompts(path, lora, online=False).texts.prompts == ["policy"]
    with pytest.raises(CommandError, match="--prompts and --online do not go together"):
        _ = _prompts(path, lora, online=True)
    with pytest.raises(CommandError, match=r'model\.weights: "full" cannot serve the first weights and the last ones'):
        _ = _prompts(path, read(tmp_path, f'{MODEL}weights = "full"\n'), online=False)
    with pytest.raises(ConfigError, match=r"model\.name: 'policy' is the name of a text too"):
        _ = settings_of(load(path), lora)
