"""A tape to be indexed, by processes that no busy machine makes late."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from fakes.process import PATIENCE

from penstock.gateway.app import open_store
from penstock.gateway.followers.index import link
from penstock.gateway.model.times import Backoff
from penstock.gateway.tape.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with open_store(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE_S", PATIENCE)
    monkeypatch.setattr(link, "PAUSES", Backoff(0.01, 0.01))
