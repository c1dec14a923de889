"""Every shell block of the documentation is run, in order, as it stands there; what pages show as output is compared.

The marks are explained in `fakes.pages`, the worlds in `fakes.worlds`. `UPDATE_GOLDENS=1` writes shown outputs anew.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from fakes.pages import PAGES, Block, Walk, walks
from fakes.process import ROOT
from fakes.shown import compare, steady
from fakes.terminal import Statement, statements
from fakes.worlds import WORLDS, world

pytestmark = pytest.mark.timeout(600)
WALKS = [walk for page in PAGES for walk in walks(page)]


def commands(block: Block) -> list[Statement]:
    """What is run of a block: its commands, or the whole of it as a program, in which one may await at the top."""
    if block.language != "python":
        return statements(block.text)
    body = textwrap.indent(block.text, "    ")
    program = f"import asyncio\n\nasync def main(key=None):\n{body}\nasyncio.run(main())\n"
    return [Statement(0, f"python - <<'PROGRAM'\n{program}PROGRAM\n")]


@pytest.mark.parametrize("said", ["now  ", "1 s ago", "2 m 10 s ago"])
def test_how_long_ago_something_was_is_not_compared(said: str) -> None:
    """A page may have been shown seconds after the call, and a quick machine looks within the first."""
    assert steady(f"first  0 s  {said}\nnow done in 3 ms\n") == "first TIME TIME\nnow done in TIME\n"


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
async def test_the_blocks_of_a_page_run(walk: Walk, tmp_path: Path) -> None:
    assert walk.world in WORLDS, f"{walk.name}: there is no world {walk.world!r}"
    printed = ""
    async with world(walk.world, tmp_path) as here:
        for block in walk.blocks:
            if block.mark is not None and block.mark.kind == "output":
                compare(block, printed)
                continue
            for statement in commands(block):
                try:
                    printed = await here.run(statement.text)
                    continue
                except (AssertionError, TimeoutError) as problem:
                    said = str(problem) or "it took too long"
                place = f"{block.page.relative_to(ROOT)}:{block.line + statement.line}"
                pytest.fail(f"{place}: {statement.text}{said}", pytrace=False)
