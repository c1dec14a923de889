"""Each extra alone in a clean environment (`make test-extras`).

It takes minutes and a package index: `make test` leaves it out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import process
from fakes.clean import Clean, Install, build

HERE = Path(__file__).parent
made: list[str] = []
"""A line for each environment."""


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only where they are asked for by name."""
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(path.is_relative_to(HERE) for path in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each environment has cost."""
    if made:
        terminalreporter.section("clean environments")
    for line in made:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Python compiles what it imports for the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "PATIENCE", 600.0)
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Penstock as it would be published."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clean]:
    """The base install."""
    home = tmp_path_factory.mktemp("base")
    clean = Clean.made(home, wheel)
    note("base", clean)
    yield clean
    shutil.rmtree(home)


@pytest.fixture
def install(base: Clean, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Install]:
    """Makes environments, which go with the test: `install("ray")`."""
    homes: list[Path] = []

    def start(extra: str, *before: str) -> Clean:
        homes.append(tmp_path_factory.mktemp(extra))
        clean = base.with_extra(homes[-1], extra, *before)
        note(extra, clean)
        return clean

    yield start
    for home in homes:
        shutil.rmtree(home)


def note(name: str, clean: Clean) -> None:
    made.append(f"{name:16} {clean.seconds:6.0f} s {clean.cpu_seconds:6.0f} s CPU {clean.megabytes:6,} MB")
