"""Every shell block of the documentation is run, in order, as it stands there; what pages show as output is compared.
What does so finds what is wrong: commands that fail, outputs that are others, lost marks.

The marks are explained in `fakes.pages`, the worlds in `fakes.worlds`. `UPDATE_GOLDENS=1` writes shown outputs anew.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.pages import PAGES, Block, Mark, Walk, blocks, walks
from fakes.process import ROOT, alive
from fakes.shown import compare, steady
from fakes.terminal import Statement, Terminal, statements, terminal
from fakes.worlds import WORLDS, World, world

pytestmark = pytest.mark.timeout(600)
WALKS = [walk for page in PAGES for walk in walks(page)]


def commands(block: Block) -> list[Statement]:
    """What is run of a block: its commands, or the whole of it as a program, in which one may await at the top."""
    if block.language != "python":
        return statements(block.text)
    body = textwrap.indent(block.text, "    ")
    program = f"import asyncio\n\nasync def main(key=None):\n{body}\nasyncio.run(main())\n"
    return [Statement(0, f"python - <<'PROGRAM'\n{program}PROGRAM\n")]


@pytest.mark.slow
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


# What tries them ------------------------------------------------------------------------------------------------------

PAGE = """# Page

<!-- run: new -->
```sh
true
```

<!-- output -->
```
1 call  2.5 ms
```

<!-- run -->
```sh
false
```

1. Indented and without a mark:

   ```toml
   a = 1
   ```
"""
SHELL = """# a comment

export A=1   # and another
cat > file <<'END'
# of the file
$A
END
for word in a b
do echo "$word"
done
penstock \\
    --version
"""


@pytest.fixture
async def bash(tmp_path: Path) -> AsyncGenerator[Terminal]:
    (tmp_path / "folder").mkdir()
    async with terminal(tmp_path / "folder", tmp_path / "printed", os.environ) as opened:
        yield opened


def shown(text: str) -> Block:
    return Block(Path(__file__).parents[2] / "docs" / "page.md", 1, "", text, Mark("output"))


def test_blocks_have_the_mark_in_front_of_them(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(PAGE)
    found = blocks(page)
    assert [block.mark for block in found] == [Mark("run", "new"), Mark("output"), Mark("run"), None]
    assert [(block.line, block.language, block.text) for block in found[::3]] == [
        (5, "sh", "true\n"),
        (21, "toml", "a = 1\n"),
    ]
    (walk,) = walks(page)
    assert (walk.world, walk.blocks) == ("new", found[:3])


def test_what_goes_on_must_have_begun(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("<!-- run -->\n```sh\ntrue\n```\n")
    with pytest.raises(AssertionError):
        walks(page)


@pytest.mark.slow
def test_a_block_is_split_into_commands() -> None:
    found = statements(SHELL)
    assert [statement.line for statement in found] == [2, 3, 7, 10]
    assert "".join(statement.text for statement in found) == SHELL.removeprefix("# a comment\n\n")
    for endless in ("cat <<END\n", "for word in a b\n", "true \\\n", "echo 'a\n"):
        with pytest.raises(AssertionError):
            statements(endless)


@pytest.mark.slow
async def test_a_terminal_is_one_shell(bash: Terminal) -> None:
    assert (await bash.run("mkdir a && cd a && export WORD='two words'")).code == 0
    assert (await bash.run('pwd; echo "$WORD" >&2')).out.endswith("/folder/a\n")
    failed = await bash.run("echo out; ls nothing | cat")
    assert (failed.code, failed.out) == (2, "out\n")
    assert "nothing" in failed.err


@pytest.mark.slow
async def test_what_goes_on_is_followed_and_stopped(tmp_path: Path) -> None:
    async with terminal(tmp_path, tmp_path / "printed", os.environ) as bash:
        assert "2\n" in await bash.follow("WORD=2 sh -c 'echo 1; echo $WORD; exec sleep 1000'", r"^2$|\n2\n")
        pid = int((await bash.run("jobs -p")).out)
        assert alive(pid)
        with pytest.raises(AssertionError, match="ended before it printed 'three'"):
            _ = await bash.follow("echo two", "three")
    assert not alive(pid)


@pytest.mark.slow
async def test_penstock_in_a_terminal_is_a_process_like_any_other(tmp_path: Path) -> None:
    async with world("bare", tmp_path) as here:
        failed = await here.terminal.run("echo '{}' | penstock enqueue - --repeat 0")
        assert (failed.code, failed.out) == (2, "")
        assert failed.err.startswith("penstock: --repeat: 0 ")
        assert "listening on" in await here.run("penstock serve")
        assert (await here.run("kill $!; wait $!; echo ended $?")) == "ended 0\n"


@pytest.mark.slow
async def test_a_command_that_fails_fails_the_page(bash: Terminal, tmp_path: Path) -> None:
    world = World(tmp_path, bash, {4747: 1234})
    assert (
        await world.run("echo http://127.0.0.1:4747/api 127.0.0.1:47471")
        == "http://127.0.0.1:4747/api 127.0.0.1:47471\n"
    )
    with pytest.raises(AssertionError, match=r"exit code 3 of: \(exit 3\)"):
        _ = await world.run("(exit 3)")


def test_outputs_are_compared_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPDATE_GOLDENS", raising=False)
    compare(shown("r1  ok  2.5 ms  3 s ago\n"), "r1  ok  1 m 12 s  15 s ago   \n")
    compare(shown("first\n…\nlast\n"), "first\nsecond\nthird\nlast\n")
    for said in ("now  ", "1 s ago", "2 m 10 s ago"):
        assert steady(f"first  0 s  {said}\nnow done in 3 ms\n") == "first TIME TIME\nnow done in TIME\n"
    for wrong, printed in (
        ("r1  ok\n", "r1  error\n"),
        ("first\n…\nlast\n", "first\nsecond\n"),
        ("4 calls\n", "5 calls\n"),
    ):
        with pytest.raises(AssertionError):
            compare(shown(wrong), printed)
