"""Commands that messages, hints and docstrings name are commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from fakes.process import ROOT

from penstock.gateway.__main__ import app
from penstock.gateway.cli.tables import GROUPS, every

NAMED = re.compile(r"`penstock ([^`{]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
EVERY = frozenset(every())
FOLDERS = ("adapters", "gateway", "sidecar", "trainer", "tui")


def texts(path: Path) -> Iterator[str]:
    """All strings of a module; what stands in the place of a value in an f-string is `{}`."""
    tree = ast.parse(path.read_text())
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(it.value) if isinstance(it, ast.Constant) else "{}" for it in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.value


def wrong(named: str) -> str | None:
    """What is wrong with the words behind `penstock`; None where nothing is."""
    said = named.partition(" -- ")[0]
    words = list(takewhile(re.compile("[a-z]+").fullmatch, said.split()))
    starts = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
    if not starts or any(f"{command} ".startswith(f"{starts[0]} ") for command in EVERY if command not in starts):
        return None  # it stands for any command, or is a group of them
    command = next((start for start in starts if start in EVERY), None)
    if command is None:
        group = GROUPS.get(words[0])
        return None if group is not None and group.usual is not None else f"there is no such command as {starts[0]}"
    part = app
    for word in command.split():
        part = part[word]
    options = {"--help"}.union(*(argument.names for argument in part.assemble_argument_collection()))
    strange = [option for option in OPTION.findall(said) if option not in options]
    return f"{command} has no option {strange[0]}" if strange else None


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_command_that_is_named_is_one(folder: str) -> None:
    found = 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        for text in texts(path):
            for named in NAMED.findall(text):
                found += 1
                assert wrong(named) is None, f"{path}: `penstock {named}`: {wrong(named)}"
    assert found, folder


@pytest.mark.parametrize(
    "named", ["discover", "prompts discovered", "resource add NAME --text x", "release begin NAME", "rollouts --bogus"]
)
def test_what_is_none_is_found(named: str) -> None:
    assert wrong(named) is not None
