"""Every block of the documentation is marked, and what its mark says is so; commands in the text are real ones.

What is run is run by `test_blocks_run.py`. Commands of blocks that are not run, and those in the middle of sentences
and tables, are parsed by the real command line: a command or an option that is gone fails here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError
from fakes.pages import FENCE, MARK, PAGES, Block, blocks, prose
from fakes.process import ROOT
from fakes.terminal import statements

from penstock.gateway import config
from penstock.gateway.__main__ import app, with_usual
from penstock.gateway.cli.tables import COMMANDS, GROUPS, Command, Group, every
from penstock.gateway.client.console import Failure
from penstock.gateway.filters import query
from penstock.gateway.model.policy import Policy
from penstock.trainer import config as trainer_config
from penstock.trainer.apo import config as apo_config
from penstock.tui import settings

BLOCKS = [block for page in PAGES for block in blocks(page) if block.language != "mermaid"]
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that say what is, not what was."""
VLLM = '[[upstream]]\nname = "vllm"\nbase_url = "http://127.0.0.1:8000/v1"\n'
LANGUAGES = {"run": ("sh", "python"), "output": ("",), "config": ("toml",), "json": ("json",)}
"""What blocks of these marks are written in."""
BARE = ("run", "output", "json", "filter")
"""Marks that need say nothing more."""
LOADERS: Mapping[str, Callable[[Path], object]] = {
    "gateway": config.load,
    "gateway with an upstream vllm": lambda path: config.load(put_before(path, VLLM)),
    "release": lambda path: Policy.load(path.read_text()),
    "trainer": trainer_config.load,
    "apo": apo_config.load,
    "tui": lambda path: settings.load({"PENSTOCK_TUI": str(path)}),
}
EVERYTHING = Group("", {**COMMANDS, **GROUPS})
SPAN = re.compile(r"`((?:PENSTOCK_\w+=\S+ )?penstock [^`]+)`")
LOOSE = re.compile(r"\.\.\.|…|\||\[")
"""What stands for something else in a command, so that it is no command yet."""
INDENTED = re.compile(
    r"^    (\$ )?(\w+=\S+ )*(\S*/)?(penstock|python|make|pip|curl|docker|export|git) .*", re.MULTILINE
)


def put_before(path: Path, text: str) -> Path:
    """The file with more in front."""
    path.write_text(text + path.read_text())
    return path


def marked(*kinds: str) -> list[Block]:
    """Blocks with one of these marks."""
    return [block for block in BLOCKS if block.mark is not None and block.mark.kind in kinds]


def place(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("block", BLOCKS, ids=place)
def test_every_block_is_marked(block: Block) -> None:
    assert block.mark is not None, f"{block.place}: say in front of it how it is tried (tests/fakes/pages.py)"
    languages = LANGUAGES.get(block.mark.kind)
    assert languages is None or block.language in languages
    assert block.mark.what or block.mark.kind in BARE, f"{block.place}: the mark says nothing more"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_comment_is_a_mark_of_a_block(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[:-1]):
        if "<!--" in line and "`<!--" not in line:
            assert MARK.fullmatch(line.strip()), f"{page.name}:{number + 1}: {line}"
            assert FENCE.fullmatch(lines[number + 1]), f"{page.name}:{number + 1}: no block follows"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_fenced_blocks(page: Path) -> None:
    assert [found[0] for found in INDENTED.finditer(prose(page))] == []


@pytest.mark.parametrize("block", marked("config"), ids=place)
def test_documented_configurations_load(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.mark is not None
    for name in re.findall(r'key_env = "(\w+)"', block.text):
        monkeypatch.setenv(name, "secret")
    path = tmp_path / "block.toml"
    path.write_text(block.text)
    assert LOADERS[block.mark.what](path)


@pytest.mark.parametrize("block", marked("json"), ids=place)
def test_documented_json_is_json(block: Block) -> None:
    assert json.loads(block.text)


@pytest.mark.parametrize("block", marked("filter"), ids=place)
def test_documented_filters_are_understood(block: Block) -> None:
    assert query.parse(block.text).terms


@pytest.mark.parametrize("block", marked("file"), ids=place)
def test_shown_files_are_the_files(block: Block) -> None:
    assert block.mark is not None
    assert block.text == (ROOT / block.mark.what).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", marked("tested"), ids=place)
def test_what_another_test_holds_is_named_there(block: Block) -> None:
    assert block.mark is not None
    assert f'"{block.page.name}"' in (ROOT / block.mark.what).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", marked("not run"), ids=place)
def test_commands_that_are_not_run_exist(block: Block) -> None:
    assert block.mark is not None
    for path in re.findall(r"tests/[\w/]+(?:\.py)?", block.mark.what):
        assert (ROOT / path).exists(), path
    for statement in statements(block.text) if block.language == "sh" else ():
        words = shlex.split(statement.text, comments=True)
        for target in words[words.index("make") + 1 :] if "make" in words else ():
            assert "=" in target or re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        for module in re.findall(r"python -m (bench\S*|e2e\S*)", statement.text):
            assert runs(module.replace(".", "/")), module
        if "penstock" in (word.rpartition("/")[2] for word in words):
            parse(words)


def runs(module: str) -> bool:
    """Whether `python -m` finds it, here or with PYTHONPATH=tests."""
    files = [ROOT / top / f"{module}{end}.py" for top in ("", "tests") for end in ("", "/__main__")]
    return any(file.exists() for file in files)


def parse(words: list[str]) -> None:
    """The command line understands it, up to where the shell takes over; raises AssertionError when it does not."""
    if words[0] == "claude" and "--" in words:
        words = words[words.index("--") + 1 :]  # what Claude Code is to start
    at = next(number for number, word in enumerate(words) if word.rpartition("/")[2] == "penstock")
    own = list(takewhile(lambda word: word not in (">", "|", "&&", ";"), words[at + 1 :]))
    agents = own[own.index("--") + 1 :] if "--" in own else []
    try:
        _, bound, _ = app.parse_args(with_usual(own), exit_on_error=False, print_error=False)
    except (CycloptsError, Failure) as problem:
        raise AssertionError(f"{' '.join(words)}: {problem}") from None
    for word in bound.args:
        assert word in agents or not str(word).startswith("--"), f"{' '.join(words)}: there is no option {word}"


@pytest.mark.parametrize("page", NOW, ids=lambda page: page.name)
def test_options_in_sketches_of_commands_exist(page: Path) -> None:
    """`penstock enqueue FILE [--repeat N] ...` cannot be parsed, but its options can be looked for."""
    for words in re.findall(r"`penstock ([^`]+)`", prose(page)):
        command = re.match(r"[a-z-]+(?: [a-z|\\-]+)*", words)
        if LOOSE.search(words) and command is not None:
            known = set(options(command[0].replace("\\", "").split()))
            assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", words)) <= known, f"{page.name}: {words}"


def options(path: list[str]) -> Iterator[str]:
    """Options of a command, or of all that are meant by `train grpo|sft`. Words behind a command are its own."""
    for found in meant(app, EVERYTHING, path):
        for argument in found.assemble_argument_collection():
            yield from argument.names


def meant(part: App, group: Command | Group, path: list[str]) -> Iterator[App]:
    """The commands that a path names; the usual one of a group where none is named."""
    inside: Mapping[str, Command | Group] = group.commands if isinstance(group, Group) else {}
    named = [name for name in path[0].split("|") if name in inside] if path else []
    usual = [group.usual] if isinstance(group, Group) and group.usual is not None else []
    for name in named or usual:
        yield from meant(part[name], inside[name], path[1:])
    if not (named or usual):
        yield part


def mentioned(page: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of the commands in the text of a page."""
    text = prose(page)
    for found in SPAN.finditer(text):
        if not LOOSE.search(found[1]):
            yield text.count("\n", 0, found.start()) + 1, shlex.split(found[1])


@pytest.mark.parametrize("page", NOW, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    problems: list[str] = []
    for line, words in mentioned(page):
        try:
            if not names_a_command(words[1:]):
                parse(words)
        except AssertionError as problem:
            problems.append(f"{page.name}:{line}: {problem}")
    assert problems == []


def names_a_command(words: list[str]) -> bool:
    """Whether it is a command or a group of commands without anything else."""
    commands = [words.split() for words in every()]
    return words in [command[:count] for command in commands for count in range(1, len(command) + 1)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("serve", True),
        ("train", True),
        ("train grpo", True),
        ("train apo", True),
        ("train apo optimise", True),
        ("train apo apo.toml", False),
        ("apo", False),
        ("train optimise", False),
        ("", False),
    ],
)
def test_groups_inside_of_groups_are_known(words: str, found: bool) -> None:
    assert names_a_command(words.split()) == found


@pytest.mark.parametrize(
    ("path", "there", "not_there"),
    [
        (["enqueue"], "--repeat", "--agent"),
        (["train", "grpo|sft"], "--gateway", "--agent"),
        (["train", "apo"], "--agent", "--repeat"),
        (["train", "apo", "optimise"], "--agent", "--repeat"),
        (["train", "apo", "apo"], "--agent", "--repeat"),
    ],
)
def test_options_of_commands_and_of_groups_inside_of_groups(path: list[str], there: str, not_there: str) -> None:
    known = set(options(path))
    assert there in known
    assert not_there not in known


def test_a_command_of_a_group_inside_of_a_group_is_parsed() -> None:
    for right in ("penstock train apo apo.toml --agent 'python a.py'", "penstock train apo optimise apo.toml"):
        parse(shlex.split(right))
    for wrong in ("penstock train apo apo.toml --nonesuch x", "penstock train apo optimise --agent x"):
        with pytest.raises(AssertionError):
            parse(shlex.split(wrong))


def test_a_command_that_is_not_there_is_found() -> None:
    for wrong in ("penstock rollout", "penstock rollouts --nonesuch x", "penstock release begin planner"):
        with pytest.raises(AssertionError):
            parse(shlex.split(wrong))
