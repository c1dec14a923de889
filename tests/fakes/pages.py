"""The documentation as a test sees it: every fenced block, and the mark in front of it that says how it is tried.

A mark is an HTML comment on the line before the fence. Readers do not see it; `grep -rn '<!-- not run' docs` lists what
is not tried, with the reasons.

    <!-- run: WORLD -->         a shell block, run in a new world (`fakes.worlds`)
    <!-- run -->                a shell block that goes on where the one before it on the page ended
    <!-- output -->             what the last command of the block before it printed
    <!-- not run: REASON -->    nobody runs it
    <!-- config: LOADER -->     a configuration that the loader of `gateway`, `trainer`, `apo` or `release` accepts
    <!-- json -->               JSON
    <!-- filter -->             terms of a filter
    <!-- file: PATH -->         the content of a file of this repository
    <!-- tested: PATH -->       another test, in PATH, holds it

Mermaid is drawn from the tables of states, which other tests hold, and needs no mark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fakes.process import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MARK = re.compile(r"<!-- (run|output|not run|config|json|filter|file|tested)(?:: (.+?))? -->")
FENCE = re.compile(r"( *)```(\S*)\s*")


@dataclass(frozen=True, slots=True)
class Mark:
    """How a block is tried."""

    kind: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    """Of its first line of text, from 1."""
    language: str
    text: str
    mark: Mark | None

    @property
    def place(self) -> str:
        """PAGE:LINE, as editors open it."""
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


@dataclass(slots=True)
class Walk:
    """Shell blocks of a page that are run one after the other in one world, with the outputs that are shown of them."""

    world: str
    blocks: list[Block] = field(default_factory=list[Block])

    @property
    def name(self) -> str:
        """Its first block."""
        return self.blocks[0].place


@cache
def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        fence = FENCE.fullmatch(lines[number])
        if fence is None:
            number += 1
            continue
        end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == "```")
        indent = len(fence[1])
        text = "".join(line[indent:] + "\n" for line in lines[number + 1 : end])
        yield Block(page, number + 2, fence[2], text, _mark(lines[number - 1] if number else ""))
        number = end + 1


def _mark(line: str) -> Mark | None:
    found = MARK.fullmatch(line.strip())
    return None if found is None else Mark(found[1], found[2] or "")


def walks(page: Path) -> list[Walk]:
    """What of a page is run."""
    made: list[Walk] = []
    for block in blocks(page):
        if block.mark is None or block.mark.kind not in ("run", "output"):
            continue
        if block.mark.kind == "run" and block.mark.what:
            made.append(Walk(block.mark.what))
        assert made, f"{block.place}: there is no block before it that names a world"
        made[-1].blocks.append(block)
    return made


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks, lines kept."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"(?ms)^ *```.*?^ *```[ \t]*$", lambda found: "\n" * found[0].count("\n"), text)


def disagreements(place: str, told: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """What a page says of names, and what the code says of them."""
    faults = [f"{place}: {name!r} is missing: write it" for name in known if name not in told]
    faults += [f"{place}: {name!r} is not in the code: take it out" for name in told if name not in known]
    both = [(name, told[name], known[name]) for name in known if name in told]
    return faults + [
        f"{place}: {name}: the code says {it!r}, the page {said!r}" for name, said, it in both if said != it
    ]
