"""`penstock masking try`: a body as it would be kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.goldens import check_text
from fakes.mistakes import tells
from fakes.process import ROOT
from fakes.shell import Shell

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "secrets.md").read_text()
(RULES,) = re.findall(r"```toml\n(\[\[masking\]\].*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"```sh\npenstock (masking try .*)\n```", PAGE)
ANSWER = "".join(
    f'data: {{"choices":[{{"index":0,"delta":{{"content":"{piece}"}}}}]}}\n\n'
    for piece in ("my card is 41", "11 1111 ", "1111 1111.")
)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "penstock.toml").write_text(RULES)
    (tmp_path / "answer.sse").write_text(ANSWER)
    (tmp_path / "broken.json").write_text('{"ssn": 1')
    (tmp_path / "page.html").write_text("<p>ssn</p>")
    return Shell("http://127.0.0.1:9", tmp_path)


async def test_a_body_is_shown_as_it_would_be_kept(shell: Shell) -> None:
    done = await shell.run(*COMMAND.split())
    assert (done.code, done.err) == (0, "card numbers: 1\n")
    check_text("masking-try.txt", done.text)


async def test_a_body_that_would_not_be_kept_ends_with_1(shell: Shell) -> None:
    done = await shell.run("masking", "try", "page.html")
    why = "customers: it is not the JSON that a path needs, and ssn stands in it"
    assert (done.code, done.text) == (1, "*" * 10)
    assert done.err == f"penstock: it would not be kept: {why}\n"


async def test_what_cannot_be_tried_ends_with_2(shell: Shell, tmp_path: Path) -> None:
    gone = await shell.run("masking", "try", "gone.json")
    assert (gone.code, tells(gone.err, "gone.json", "No such file")) == (2, True), gone.err
    (tmp_path / "penstock.toml").write_text("port = 1\n")
    none = await shell.run("masking", "try", "answer.sse")
    assert (none.code, "penstock.toml has no [[masking]]: add a rule" in none.err) == (2, True), none.err
    (tmp_path / "penstock.toml").write_text('[[masking]]\nname = "r"\npattern = "("\n')
    wrong = await shell.run("masking", "try", "answer.sse")
    assert (wrong.code, tells(wrong.err, "masking rule 'r'", "pattern '('", "RE2 (missing )")) == (2, True), wrong.err
