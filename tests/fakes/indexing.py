"""An index in the test's own process, which follows its tape when it is told to."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from fakes.process import PATIENCE

from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.tape.store import Store


def caught_up(index: TapeIndex) -> None:
    """It has all that is on the tape."""
    until = time.monotonic() + PATIENCE
    while not index.follow(until):
        assert time.monotonic() < until, "it does not catch up"


@contextmanager
def followed(store: Store, sealed: int) -> Generator[TapeIndex]:
    """The index of a tape, caught up; `sealed`: spans of a file."""
    index = TapeIndex(store, store.path / "index", sealed)
    try:
        caught_up(index)
        yield index
    finally:
        index.close()
