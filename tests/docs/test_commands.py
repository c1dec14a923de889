"""Commands that pages, messages, hints and docstrings name are commands, and helps say what each is.

A whole command is parsed by the real command line. Of one in which something stands for something else, as in
`penstock enqueue FILE [--repeat N] ...`, the words and the options are looked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import takewhile

import pytest
from cyclopts import App
from fakes.commands import EVERY, unparsed
from fakes.pages import PAGES, Block, blocks, prose
from fakes.process import ROOT
from fakes.source import GROUP, rendered
from fakes.terminal import statements

from bench.structure import sources
from penstock.console.commands.command_table import COMMANDS, GROUPS, SECTIONS, CommandEntry, CommandGroup
from penstock.console.main import app, main

pytestmark = GROUP
EVERYTHING = CommandGroup("", {**COMMANDS, **GROUPS})
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that say what is, not what was."""
NAMED = re.compile(r"`(?:PENSTOCK_\w+=\S+ )?penstock ([^`]+)`")
SKETCH = re.compile(r"\.\.\.|…|\||\[")
"""What stands for something else in a command, so that it is no command yet."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
KEYLESS = re.compile(
    "serve|lake|check|backup|restore|key|completion|masking try|prices update|import litellm-config|"
    "sidecar (bind|release|iptables)|train (merge|apo report)"
)
"""Commands that speak to no gateway."""


@pytest.mark.slow
def test_commands_that_pages_name_exist() -> None:
    faults: list[str] = []
    for page in NOW:
        text = prose(page)
        for found in NAMED.finditer(text):
            fault = wrong(found[1]) if SKETCH.search(found[1]) else unparsed(shlex.split(found[1]))
            if fault:
                line = text.count("\n", 0, found.start()) + 1
                faults.append(f"{page.name}:{line}: `penstock {found[1]}`: {fault}")
    faults += [fault for page in PAGES for block in blocks(page) for fault in not_run(block)]
    assert not faults, "\n".join(faults)


def test_commands_that_the_code_names_exist() -> None:
    found = [
        (f"{source.path}:{getattr(node, 'lineno', 0)}", said)
        for source in sources()
        for node in source.nodes
        for said in NAMED.findall(rendered(node))
    ]
    faults = [f"{place}: `penstock {said}`: {fault}" for place, said in found if (fault := wrong(said))]
    assert len(found) > 100
    assert not faults, "\n".join(faults)


def test_helps_say_what_each_command_and_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    """No option of a dataclass is called `--options.workers`, or makes an `--empty-...`; a command that speaks to a
    gateway names the key; what the table says of a command is the first sentence of its docstring."""
    faults = [f"{name}: it is a command and a group of commands" for name in COMMANDS.keys() & GROUPS.keys()]
    listed = {name for names in SECTIONS.values() for name in names}
    faults += [f"{name}: no section of the help lists it" for name in (COMMANDS.keys() | GROUPS.keys()) - listed]
    for words in EVERY:
        name, row = " ".join(words), EVERYTHING
        for word in words:
            assert isinstance(row, CommandGroup)
            row = row.commands[word]
        shown = [one for one in command(name).assemble_argument_collection(parse_docstring=True) if one.show]
        faults += [f"{name}: it has no options"] if not shown else []
        faults += [f"{name}: {one.names[0]} has no help" for one in shown if not one.parameter.help]
        options = [option for one in shown for option in (*one.names, *one.negatives)]
        faults += [f"{name}: {it} is no plain name" for it in options if "." in it or it.startswith("--empty-")]
        assert isinstance(row, CommandEntry)
        module, _, function = row.path.partition(":")
        said = " ".join((getattr(import_module(module), function).__doc__ or "").partition("\n\n")[0].split())
        if said != row.help:
            faults.append(f"{name}: console/commands/command_table.py says {row.help!r}, its docstring {said!r}")
        main([*words, "--help"])
        if "PENSTOCK_ADMIN_KEY" not in capsys.readouterr().out and not KEYLESS.fullmatch(name):
            faults.append(f"{name}: its help does not name PENSTOCK_ADMIN_KEY")
    assert not faults, "\n".join(faults)


def not_run(block: Block) -> Iterator[str]:
    """What is wrong with what is named in a block that is not run."""
    if block.mark is None or block.mark.kind != "not run":
        return
    made = (ROOT / "Makefile").read_text()
    gone = [path for path in re.findall(r"tests/[\w/]+(?:\.py)?", block.mark.what) if not (ROOT / path).exists()]
    for statement in statements(block.text) if block.language == "sh" else ():
        words = shlex.split(statement.text, comments=True)
        targets = words[words.index("make") + 1 :] if "make" in words else []
        gone += [f"make {it}" for it in targets if "=" not in it and not re.search(rf"^{it}:", made, re.MULTILINE)]
        gone += [it for it in re.findall(r"python -m (bench\S*|e2e\S*)", statement.text) if not runs(it)]
        at = next((number for number, word in enumerate(words) if word.rpartition("/")[2] == "penstock"), None)
        if words[:1] == ["claude"] and "--" in words:
            at = words.index("--") + 1  # what Claude Code is to start
        if at is not None and (fault := unparsed(words[at + 1 :])):
            yield f"{block.place}: {statement.text.strip()}: {fault}"
    yield from (f"{block.place}: there is no {it}" for it in gone)


def runs(module: str) -> bool:
    """Whether `python -m` finds it, here or with PYTHONPATH=tests."""
    path = module.replace(".", "/")
    return any((ROOT / top / f"{path}{end}.py").exists() for top in ("", "tests") for end in ("", "/__main__"))


def wrong(said: str) -> str:
    """What is wrong with what is said behind `penstock`, in which words may stand for others."""
    own = said.partition(" -- ")[0].replace("\\", "")
    words = list(takewhile(re.compile(r"[a-z][a-z|-]*").fullmatch, own.split()))
    found = list(meant(EVERYTHING, words))
    if "" in found:
        return "there is no such command"
    strange = [it for it in OPTION.findall(own) if it not in {"--help", "--version"}.union(*map(options, found))]
    return f"it has no option {strange[0]}" if strange else ""


def meant(row: CommandEntry | CommandGroup, words: list[str], path: str = "") -> Iterator[str]:
    """The commands that words name, several by `train grpo|sft`; the usual one of a group where none is named, and all
    of it where it has none; "" is none. Words behind a command are its own."""
    inside: Mapping[str, CommandEntry | CommandGroup] = row.commands if isinstance(row, CommandGroup) else {}
    usual = row.usual if isinstance(row, CommandGroup) else None
    named = [name for name in words[0].split("|") if name in inside] if words else []
    if isinstance(row, CommandEntry):
        yield path
    elif words and not named and usual is None:
        yield ""
    else:
        for name in named or ([usual] if usual is not None else inside):
            yield from meant(inside[name], words[1:] if named else words, f"{path} {name}".strip())


@cache
def options(path: str) -> frozenset[str]:
    return frozenset(name for one in command(path).assemble_argument_collection() for name in one.names)


def command(path: str) -> App:
    found = app
    for word in path.split():
        found = found[word]
    return found


def test_what_is_no_command_is_found() -> None:
    right = ["serve", "rollouts --limit 3", "enqueue FILE [--repeat N] ...", "train grpo|sft --gateway URL", "release"]
    right += ["train", "train apo --agent A", "train apo optimise --agent A", "train apo apo.toml --agent A", "--help"]
    right += [r"train grpo\|sft", "run -- python a.py --fast", "show …", ""]
    strange = [
        "enqueue FILE [--agent N]",
        "train grpo|sft --agent A",
        "train apo --repeat 3",
        "train apo report --seed 1",
    ]
    strange += ["train apo optimise --repeat N", "rollouts --bogus", "show … --bogus", "resource add NAME --text x"]
    absent = ["discover", "prompts discovered", "apo", "train optimise", "releases …"]
    assert {said: wrong(said) for said in right} == dict.fromkeys(right, "")
    assert {said: wrong(said).rpartition(" ")[0] for said in strange} == dict.fromkeys(strange, "it has no option")
    assert {said: wrong(said) for said in absent} == dict.fromkeys(absent, "there is no such command")


def test_what_cannot_be_parsed_is_found() -> None:
    right = ["serve", "train", "train grpo", "train apo", "train apo optimise", "train apo optimise apo.toml"]
    right += ["train apo apo.toml --agent 'python a.py'", "rollouts > file", "run --workers 2 -- python a.py --fast"]
    odd = ["rollout", "rollouts --nonesuch x", "release begin planner", "train apo apo.toml --nonesuch x", "apo"]
    odd += ["train apo optimise --agent x", "train optimise"]
    assert {said: unparsed(shlex.split(said)) for said in right} == dict.fromkeys(right, "")
    assert [said for said in odd if not unparsed(shlex.split(said))] == []
