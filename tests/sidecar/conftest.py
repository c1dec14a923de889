"""Fixtures of the runner's tests: runners of the test's gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.process import Gateway
from fakes.runs import StartRun, runs
from fakes.shell import Refused

from penstock.console.main import main


@pytest.fixture
async def start_run(gateway: Gateway, tmp_path: Path) -> AsyncGenerator[StartRun]:
    """Starts runners of the test's gateway; those that still run at the end are killed."""
    async with runs(gateway.url, tmp_path) as start:
        yield start


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What `penstock` answers in this process to words that it does not take: (exit code, what it says)."""
    monkeypatch.setenv("PENSTOCK_GATEWAY", "http://127.0.0.1:1")

    def call(*words: str, **env: str) -> tuple[object, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return ended.value.code, capsys.readouterr().err

    return call
