"""A receiver, and a tape with releases that it is told of."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.hook import SECRET, Hook, hooked
from fakes.releasing import Bench, bench, counting


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER_SECRET", SECRET)


@pytest.fixture
async def hook() -> AsyncGenerator[Hook]:
    async with hooked() as made:
        yield made


@pytest.fixture
async def made(tmp_path: Path) -> AsyncGenerator[Bench]:
    async with counting() as provider, bench(tmp_path, provider) as bench_:
        yield bench_
