"""An index in the test's own process, which follows its tape when it is told to."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from fakes.process import PATIENCE

from penstock.gateway.index.follower import Index
from penstock.gateway.store import Store


def caught_up(index: Index) -> None:
    """It has all that is on the tape."""
    until = time.monotonic() + PATIENCE
    while not index.follow(until):
        assert time.monotonic() < until, "it does not catch up"


@contextmanager
def followed(store: Store, sealed: int) -> Generator[Index]:
    """The index of a tape, caught up; `sealed`: spans of a file."""
    index = Index(store, store.path / "index", sealed)
    try:
        caught_up(index)
        yield index
    finally:
        index.close()
