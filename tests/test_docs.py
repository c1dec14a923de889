"""The documentation and the code name the same things: whatever only one of them knows is an error, both ways.

Settings are held by `tests/gateway/test_config.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fakes.diagrams import diagram
from fakes.pages import prose

from penstock.gateway.api.routes import ROUTES
from penstock.gateway.cli.sections import SECTIONS
from penstock.gateway.filters.query import FIELDS
from penstock.gateway.metrics import METRICS
from penstock.gateway.model import lifecycle

ROOT = Path(__file__).parent.parent
READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def section(title: str) -> str:
    """The text below a heading of docs/reading.md."""
    return READING.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[tuple[str, str]]:
    """(the whole line, its first cell) of the table below a heading."""
    return re.findall(r"^(\| `([^`]+)` \|.*)$", section(title), re.MULTILINE)


def names(title: str) -> list[str]:
    """First cells of the table below a heading."""
    return [name for _, name in rows(title)]


def test_every_metric_is_documented_and_exists() -> None:
    assert names("Metrics") == list(METRICS)
    for line, name in rows("Metrics"):
        assert METRICS[name].help in line
        assert METRICS[name].kind in line


def test_the_documented_states_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "queue.md").read_text(encoding="utf-8")
    for title, moves in (("Rollout", lifecycle.ROLLOUT_MOVES), ("Attempt", lifecycle.ATTEMPT_MOVES)):
        assert f"{title}:\n\n{diagram(next(iter(moves)), moves)}" in page


def test_every_route_is_documented_and_exists() -> None:
    assert names("The control API") == [f"{route.method} {route.path}" for route in ROUTES]


def test_every_filter_field_is_documented_and_exists() -> None:
    assert names("Filters") == list(FIELDS["spans"])


def test_every_command_is_documented_and_exists() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    listed = re.findall(r"^│ ([a-z][a-z-]*)  +\S", shown, re.MULTILINE)
    assert sorted(listed) == sorted(name for names in SECTIONS.values() for name in names)
    documented = [name.split()[1] for name in names("Commands")]
    assert sorted(documented) == sorted(set(listed))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped_at_120_columns(page: Path) -> None:
    """Fenced blocks and rows of tables may be wider."""
    lines = [line for line in prose(page).splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


def test_the_architecture_is_a_short_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_layers_of_the_architecture_are_those_of_the_contract() -> None:
    picture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```\n")[1]
    drawn = [line[:30].split() for line in picture.splitlines()]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    assert drawn == [layer.split(" | ") for layer in contract["layers"]]


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(?:penstock\.)?((?:gateway|sidecar|trainer|adapters|tui)\.[a-z_.]+)`", text))
    assert len(names) > 40
    for name in names:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_the_distribution_is_called_by_its_name() -> None:
    """`penstock` on the index is a stranger's."""
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    read = [ROOT / name for name in files if name.endswith((".py", ".md", ".toml", ".sh")) or name == "Makefile"]
    assert len(read) > 500
    old = re.compile(r"penstock" + r"\[|pip install '?penstock(?!-gateway)")
    assert [str(path) for path in read if old.search(path.read_text(encoding="utf-8"))] == []
