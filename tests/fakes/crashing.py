"""Writers that come to harm: what the crash tests run in processes of their own.

What a call holds follows from its number, so that a test can say what must be on the tape without having been told.
"""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import call, finish, running

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.backup import copy_tape
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.environment import Environment
from penstock.gateway.tape.store.records import SpanEntry

SMALL = 1 << 20
ROOM = 3 << 20


def request(number: int) -> bytes:
    """What call `number` asked: a conversation that goes on for 30 calls."""
    first = number - number % 30
    return b"system text " * 60 + b"".join(b"turn %d, " % turn for turn in range(first, number + 1))


def response(number: int) -> bytes:
    """What it was answered."""
    return b"answer %d" % number


def numbered(life: int, number: int) -> SpanEntry:
    """Call `number`, running; its start says which it is."""
    entry = running(f"r{life}", f"a{number % 3}", request(number))
    entry.start_ns = number
    return entry


def write_forever(report: Connection, path: Path, life: int) -> None:
    """Announces and finishes calls in batches of every size and reports the numbers that were committed as finished."""
    store = open_store(path, map_bytes=SMALL, memory_bytes=50_000)
    numbers = count(1)
    for batch in count():
        entries = [numbered(life, next(numbers)) for _ in range(1 + batch % 20)]
        if batch % 2:
            store.write(entries)
        store.write([finish(entry, response(entry.start_ns)) for entry in entries])
        report.send([entry.start_ns for entry in entries])


def noise(seed: int) -> bytes:
    """Bytes that cannot be compressed."""
    return random.Random(seed).randbytes(100_000)


def fill_and_go_on(path: Path, make_room: Callable[[], None]) -> None:
    """Writes until the disk is full, makes room and goes on; asserts that nothing is harmed at any point."""
    kept: list[SpanEntry] = []
    with open_store(path, map_bytes=SMALL) as store:
        refused = fill(store, kept)
        assert len(kept) > 5
        assert all(entry.sequence == 0 for entry in refused)
        assert_whole(store, kept)
        for _ in range(3):
            assert fill(store, []) != []
        make_room()
        store.write(refused)
        assert_whole(store, [*kept, *refused])
    with open_store(path) as store:
        assert_whole(store, [*kept, *refused])


def fill(store: Store, kept: list[SpanEntry]) -> list[SpanEntry]:
    """Writes batches of two until one is refused: returns that one."""
    for number in count(len(kept)):
        batch = [call(request=noise(number)), call(request=noise(-number - 1), response=b"x" * 999)]
        try:
            store.write(batch)
        except TapeError as error:
            if "free or remount the disk" in str(error):
                return batch
            raise
        kept += batch
    raise AssertionError("unreachable")


def assert_whole(store: Store, entries: list[SpanEntry]) -> None:
    """Everything of these is on the tape, byte for byte, and nothing else."""
    assert list(problems(store)) == []
    spans = list(store.spans("r1"))
    assert [span.sequence for span in spans] == [entry.sequence for entry in entries]
    for span, entry in zip(spans, entries, strict=True):
        exchange = store.exchange(span)
        assert exchange is not None
        assert entry.body is not None
        assert (exchange.request_body, exchange.response_body) == (entry.body.request, entry.body.response)


def fill_within_a_limit(path: Path) -> None:
    """The same where the disk is a limit on the size of files."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    fill_and_go_on(path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


def back_up_and_die(source: Path, target: Path, writes: int) -> None:
    """Copies a tape and is killed before it has put the copy in its place: after so many transactions, if it makes as
    many."""
    made, write = count(), Environment.write

    def counted(self: Environment, apply: Callable[[Any], Any]) -> Any:
        if next(made) == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, apply)

    Environment.write = counted
    with copy_tape(source, target):
        os.kill(os.getpid(), signal.SIGKILL)


def back_up_within_a_limit(source: Path, target: Path) -> None:
    """Copies a tape to a disk on which it has no room, which a limit on the size of files stands for."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    with pytest.raises(TapeError, match="free or remount the disk"), copy_tape(source, target):
        pass
