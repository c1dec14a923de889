"""Pages have their form, and name what there is: files, tests, modules, configurations. Each test lists all faults.

`tests/docs/test_commands.py` holds commands, `tests/docs/test_tables.py` tables; `tests/docs/test_blocks_run.py` runs
blocks.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import pytest
from fakes.pages import FENCE, MARK, PAGES, Block, blocks, prose
from fakes.process import ROOT

from bench import structure
from penstock.gateway import config
from penstock.gateway.model.codes import Extra
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.reading import filters
from penstock.trainer import config as trainer_config
from penstock.trainer.apo import config as apo_config
from penstock.tui import settings

VLLM = '[[upstream]]\nname = "vllm"\nbase_url = "http://127.0.0.1:8000/v1"\n'
LOADERS: Mapping[str, Callable[[Path], object]] = {
    "gateway": config.load,
    "gateway with an upstream vllm": lambda path: config.load(put_before(path, VLLM)),
    "release": lambda path: ReleasePolicy.load(path.read_text()),
    "trainer": trainer_config.load,
    "apo": apo_config.load,
    "tui": lambda path: settings.load({"PENSTOCK_TUI": str(path)}),
}
LANGUAGES = {"run": ("sh", "python"), "output": ("",), "config": ("toml",), "json": ("json",)}
"""What blocks of these marks are written in."""
BARE = ("run", "output", "json", "filter")
"""Marks that need say nothing more."""
INDENTED = re.compile(r"    (\$ )?(\w+=\S+ )*(\S*/)?(penstock|python|make|pip|curl|docker|export|git) ")
NAMED = re.compile(r"`([\w/]*test_\w+\.py)(?:::(test_\w+))?`")


def test_pages_have_their_form() -> None:
    """Links lead somewhere; every block is marked, and every comment is a mark."""
    faults = [fault for page in PAGES for fault in (*of_lines(page), *of_marks(page))]
    assert not faults, "\n".join(faults)


def of_lines(page: Path) -> Iterator[str]:
    """Fenced blocks and rows of tables may be wide."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, (line, said) in enumerate(zip(lines, prose(page).splitlines(), strict=True), 1):
        place = f"{page.relative_to(ROOT)}:{number}"
        if len(said) > 120 and not said.lstrip().startswith("|"):
            yield f"{place}: {len(said)} columns: wrap it at 120"
        if INDENTED.match(said):
            yield f"{place}: a command that is indented: put it into a fenced block"
        if "<!--" in line and "`<!--" not in line and number < len(lines):
            if not MARK.fullmatch(line.strip()):
                yield f"{place}: {line.strip()} is no mark: see tests/fakes/pages.py"
            elif not FENCE.fullmatch(lines[number]):
                yield f"{place}: no block follows the mark: put it on the line before the fence"
    text = "\n".join(lines)
    for found in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / found[1]).exists():
            number = text.count("\n", 0, found.start()) + 1
            yield f"{page.relative_to(ROOT)}:{number}: there is no {found[1]}"


def of_marks(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "mermaid":
            continue
        if block.mark is None:
            yield f"{block.place}: no mark: say in front of it how it is tried (tests/fakes/pages.py)"
            continue
        languages = LANGUAGES.get(block.mark.kind, (block.language,))
        if block.language not in languages:
            yield f"{block.place}: {block.mark.kind!r} of {block.language!r}: it is for {' or '.join(languages)!r}"
        if not (block.mark.what or block.mark.kind in BARE):
            yield f"{block.place}: {block.mark.kind!r} says nothing more: give its reason or its path"


def test_blocks_are_what_their_marks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[str] = Counter()
    faults: list[str] = []
    for block in (block for page in PAGES for block in blocks(page) if block.mark is not None):
        assert block.mark is not None
        for name in re.findall(r'key_env = "(\w+)"', block.text):
            monkeypatch.setenv(name, "secret")
        found[block.mark.kind] += 1
        try:
            fault = claimed(block, block.mark.kind, block.mark.what, tmp_path / "block.toml")
        except Exception as problem:
            fault = str(problem) or repr(problem)
        faults += [f"{block.place}: {block.mark.kind}: {fault}"] if fault else []
    assert not faults, "\n".join(faults)
    assert all(found[kind] for kind in ("config", "json", "filter", "file", "tested")), found


def claimed(block: Block, kind: str, what: str, path: Path) -> str:
    """What is wrong with what a mark says of its block; a block that is not read raises. `path`: where a configuration
    is put."""
    if kind == "config":
        path.write_text(block.text)
        return "" if LOADERS[what](path) else "it says nothing"
    if kind == "json":
        return "" if json.loads(block.text) else "it says nothing"
    if kind == "filter":
        return "" if filters.parse(block.text).terms else "it has no terms"
    if kind == "file":
        return "" if block.text == (ROOT / what).read_text(encoding="utf-8") else f"{what} is another: copy it anew"
    if kind == "tested":
        named = f'"{block.page.name}"' in (ROOT / what).read_text(encoding="utf-8")
        return "" if named else f"{what} does not name the page: name the test that does"
    return ""


def put_before(path: Path, text: str) -> Path:
    """The file with more in front."""
    path.write_text(text + path.read_text())
    return path


def test_tests_that_promises_name_exist() -> None:
    """A name may leave folders out, and is then of one file only. Each promise of security.md has tests, not files
    alone, and nothing else stands in their cell."""
    there = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    faults: list[str] = []
    named = 0
    for page in ("reliability.md", "security.md"):
        for number, line in enumerate((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines(), 1):
            for file, test in NAMED.findall(line):
                named += bool(test)
                tail = Path(file.removeprefix("tests/")).parts
                texts = [text for path, text in there.items() if path.parts[-len(tail) :] == tail]
                if len(texts) != 1:
                    faults.append(f"{page}:{number}: there are {len(texts)} files {file}: name the one that is meant")
                elif test and not re.search(rf"^(async )?def {test}\(", texts[0], re.MULTILINE):
                    faults.append(f"{page}:{number}: {file} has no {test}: name the test that holds it")
    faults += unkept((ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    assert not faults, "\n".join(faults)
    assert named > 20


def unkept(text: str) -> Iterator[str]:
    """Promises without tests."""
    section = text.partition("\n## What is promised\n")[2].partition("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert head == ["promise", "tests"]
    assert len(rows) > 25
    for promise, *cells in rows:
        tests = cells[0].split(", ") if len(cells) == 1 else []
        if not promise.endswith(".") or not tests or not all(NAMED.fullmatch(it) and "::" in it for it in tests):
            yield f"security.md: {promise!r}: a row is a sentence, and tests as `file.py::test_name`"


def test_the_architecture_is_that_of_the_code() -> None:
    """A short page."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    layers = [line[:30].rstrip() for line in text.split("```\n")[1].splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    # By the ends of their paths.
    named = set(re.findall(r"`((?:[a-z_]+\.)+(?!toml)[a-z_]+)`", text))
    modules = {f".{source.module}" for source in structure.sources()}
    modules |= {module.rpartition(".")[0] for module in modules}
    gone = [name for name in sorted(named) if not any(module.endswith(f".{name}") for module in modules)]
    faults = [f"there is no module {name}" for name in gone]
    faults += [f"layer {one!r}: the contract has {two!r}" for one, two in pairs(layers, contracts[0]["layers"])]
    faults += ["it has more than 150 lines: shorten it"] if text.count("\n") > 150 else []
    assert not faults, "\n".join(f"ARCHITECTURE.md: {fault}" for fault in faults)
    assert len(named) > 40


OTHER_WORDS = {"open", "interrupted", "ours"}
"""Words of packages' docstrings that are states, methods and settings."""


def test_packages_name_modules_that_there_are() -> None:
    """Each says where to begin."""
    found = structure.sources("bench", *structure.PACKAGES)
    modules = {f".{part}" for source in found for part in (source.module, source.module.rpartition(".")[0])}
    packages = [source for source in found if source.path.endswith("__init__.py")]
    gone = [
        f"{source.path}: there is no module {name}"
        for source in packages
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", ast.get_docstring(structure.parsed(source.text)) or "")
        if name not in OTHER_WORDS and not any(module.endswith(f".{name}") for module in modules)
    ]
    gone += [
        f"{source.path}: there is no {name}"
        for source in found
        for name in re.findall(r"`((?:gateway|console|tui|sidecar|trainer|adapters)(?:\.[a-z_]+)+)[.`]", source.text)
        if f".{name}" not in modules and not any(module.endswith(f".{name.rpartition('.')[0]}") for module in modules)
    ]
    assert len(packages) > 40
    assert not gone, "\n".join(gone)


def pairs(ones: list[str], others: list[str]) -> list[tuple[str, str]]:
    """What is not alike, line by line."""
    return [(one, other) for one, other in zip_longest(ones, others, fillvalue="nothing") if one != other]


@pytest.mark.slow
def test_what_is_installed_is_named_by_the_checkout() -> None:
    """`penstock` on the index is a stranger's, and `penstock-gateway` is on none."""
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    read = [name for name in files if name.endswith((".py", ".md", ".toml", ".sh")) or name == "Makefile"]
    assert len(read) > 500
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras.keys() >= {*get_args(Extra)}
    old = re.compile(r"penstock" + r"\[|pip install[^`#]* '?penstock")
    faults: list[str] = []
    for name in read:
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if old.search(line):
                faults.append(f"{name}:{number}: no index has it: name the checkout: {line.strip()}")
            named = {extra for found in re.findall(r"'\.\[([a-z,]+)\]'", line) for extra in found.split(",")}
            faults += [f"{name}:{number}: there is no extra {extra}" for extra in sorted(named - extras.keys())]
    assert not faults, "\n".join(faults)
