"""apo.toml is strict, says what is wrong and where, and needs no torch; the command line may name tasks and release."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.mistakes import unhelpful
from fakes.pages import disagreements
from fakes.process import ROOT

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ENGINES, ApoConfig, load, tasks_file, with_overrides

LEAST = '[texts]\nprompts = ["desk"]\n[reflection]\nmodel = "m"\n'


def read(home: Path, text: str) -> ApoConfig:
    path = home / "apo.toml"
    path.write_text(text)
    return load(path)


def sections() -> dict[str, Any]:
    return {name: field.annotation for name, field in ApoConfig.model_fields.items() if name != "engine"}


def keys() -> list[tuple[str, str]]:
    return [(section, key) for section, model in sections().items() for key in model.model_fields]


def test_only_a_text_and_the_reflecting_model_must_be_named(tmp_path: Path) -> None:
    config = read(tmp_path, LEAST)
    assert (config.engine, config.budget.rollouts, config.test.repeats) == ("ours", 500, 2)
    assert (config.reward.range, config.publish.release) == ((0.0, 1.0), "none")
    for left, missing in (('[texts]\nprompts = ["desk"]\n', "reflection"), ('[reflection]\nmodel = "m"\n', "texts")):
        with pytest.raises(ConfigError, match=rf"apo\.toml: {missing}: it is missing"):
            read(tmp_path, left)


def test_tool_texts_alone_can_be_optimised(tmp_path: Path) -> None:
    assert read(tmp_path, LEAST.replace("prompts", "tools")).texts.tools == ["desk"]


def test_a_misspelt_key_names_its_path_and_the_nearest(tmp_path: Path) -> None:
    misspelt: list[tuple[str, str, str]] = []
    for section, key in keys():
        head = f"[{section}]\n"
        text = LEAST.replace(head, f"{head}{key}q = 1\n") if head in LEAST else f"{LEAST}{head}{key}q = 1\n"
        misspelt.append((text, f"{section}.", key))
    faults = unhelpful(partial(read, tmp_path), misspelt)
    assert not faults, "\n".join(faults)


def test_every_setting_is_documented_and_exists() -> None:
    """By its section, and in the words of the code."""
    text = (ROOT / "docs" / "apo.md").read_text(encoding="utf-8").partition("\n## Settings\n")[2]
    told: dict[str, str] = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE):
        section = named[1] if (named := re.match(r"`\[(\w+)\]`\n", part)) else ""
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", part, re.MULTILINE)
        told |= {f"{section} {key}": meaning for key, meaning in rows}
    docs = {section: field_docs(model) for section, model in {"": ApoConfig, **sections()}.items()}
    known = {f"{section} {key}": docs[section][key] for section, key in [("", "engine"), *keys()]}
    faults = disagreements("apo.md", told, known)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[texts]\n[reflection]\nmodel = 'm'",
            r"texts: prompts: name the resources whose texts are optimised; `penstock",
        ),
        ("[texts]\nprompts = ['a b']\n[reflection]\nmodel = 'm'", r"texts\.prompts 1: 'a b' is not an id"),
        ("[texts]\nprompts = ['a']\ntools = ['a']\n[reflection]\nmodel = 'm'", r"texts: 'a' is named twice"),
        (f"[texts]\nprompts = {[f'p{at}' for at in range(21)]}\n[reflection]\nmodel = 'm'", r"at most 20"),
        ('engine = "mine"\n' + LEAST, r"engine: 'mine' is neither ours, beam, gepa, edits nor module:function"),
        ('engine = ":mine"\n' + LEAST, r"engine: ':mine' is neither"),
        ('engine = "mine:"\n' + LEAST, r"engine: 'mine:' is neither"),
        (LEAST + "[reward]\nrange = [1, 1]", r"reward\.range: \[1\.0, 1\.0\] does not rise from the worst reward"),
        (LEAST + "[reward]\nrange = [-inf, 1]", r"reward\.range"),
        (LEAST + "[budget]\nrollouts = 39", r"budget\.rollouts: 39 is not 40 or more"),
        (LEAST + "[budget]\nrollouts = 100.0", r"budget\.rollouts"),
        (LEAST + "[budget]\nmoney = nan", r"budget\.money"),
        (LEAST + "[budget]\ntokens = -1", r"budget\.tokens: -1 is not 0 or more"),
        (LEAST + "[rollouts]\nattempt_timeout = 1e10", r"rollouts\.attempt_timeout"),
        (LEAST + "[publish]\nrelease = 'now'", r"publish\.release"),
        (LEAST + "[run]\nname = 'a b'", r"run\.name"),
        (LEAST + "[run]\nname = '..'", r"run\.name"),
        (LEAST.replace("'m'", "''").replace('"m"', '""'), r"reflection\.model"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


@pytest.mark.parametrize("engine", [*ENGINES, "mine:engine", "a.b:C"])
def test_engines_are_ours_or_of_a_module(tmp_path: Path, engine: str) -> None:
    assert read(tmp_path, f'engine = "{engine}"\n{LEAST}').engine == engine


def test_the_command_line_names_tasks_and_release_instead(tmp_path: Path) -> None:
    config = read(tmp_path, LEAST + '[tasks]\nfile = "a.jsonl"\nkey = "customer"\n[publish]\nrelease = "auto"\n')
    assert with_overrides(config, None, None) == config
    found = with_overrides(config, Path("b.jsonl"), "canary")
    assert (found.tasks.file, found.tasks.key, found.publish.release) == (Path("b.jsonl"), "customer", "canary")
    assert tasks_file(found) == Path("b.jsonl")


def test_tasks_must_be_named_somewhere(tmp_path: Path) -> None:
    config = read(tmp_path, LEAST)
    with pytest.raises(ConfigError, match=r"tasks\.file: name a JSONL file .* or --tasks"):
        with_overrides(config, None, None)
    assert with_overrides(config, Path("b.jsonl"), None).tasks.file == Path("b.jsonl")


@pytest.mark.slow
def test_a_configuration_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, penstock.trainer.apo.config, penstock.trainer.commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not re.search(r"\b(torch|numpy|transformers|gepa)\b", done.stdout)
