"""What tries the documentation finds what is wrong with it: commands that fail, outputs that are others, lost marks."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.pages import Block, Mark, blocks, walks
from fakes.shown import compare
from fakes.terminal import Terminal, runs, statements, terminal
from fakes.worlds import World

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


def test_a_block_is_split_into_commands() -> None:
    found = statements(SHELL)
    assert [statement.line for statement in found] == [2, 3, 7, 10]
    assert "".join(statement.text for statement in found) == SHELL.removeprefix("# a comment\n\n")


@pytest.mark.parametrize("odd", ["cat <<END\n", "for word in a b\n", "true \\\n", "echo 'a\n"])
def test_a_command_that_does_not_end_is_found(odd: str) -> None:
    with pytest.raises(AssertionError):
        statements(odd)


async def test_a_terminal_is_one_shell(bash: Terminal) -> None:
    assert (await bash.run("mkdir a && cd a && export WORD='two words'")).code == 0
    assert (await bash.run('pwd; echo "$WORD" >&2')).out.endswith("/folder/a\n")
    failed = await bash.run("echo out; ls nothing | cat")
    assert (failed.code, failed.out) == (2, "out\n")
    assert "nothing" in failed.err


async def test_what_goes_on_is_followed_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    async with terminal(tmp_path / "folder", tmp_path / "printed", os.environ) as bash:
        assert "2\n" in await bash.follow("WORD=2 sh -c 'echo 1; echo $WORD; exec sleep 1000'", r"^2$|\n2\n")
        pid = int((await bash.run("jobs -p")).out)
        assert runs(pid)
        with pytest.raises(AssertionError, match="ended before it printed 'three'"):
            _ = await bash.follow("echo two", "three")
    assert not runs(pid)


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
    for wrong, printed in (
        ("r1  ok\n", "r1  error\n"),
        ("first\n…\nlast\n", "first\nsecond\n"),
        ("4 calls\n", "5 calls\n"),
    ):
        with pytest.raises(AssertionError):
            compare(shown(wrong), printed)
