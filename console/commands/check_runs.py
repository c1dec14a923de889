"""The checks of `penstock check` for records of training runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.work.runs.blocks import MetricBlock
from penstock.gateway.work.runs.operations import RunRecord, event_key
from penstock.gateway.work.runs.reader import RunReader, event_of


def run(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a run's record agrees with its blocks, and that the versions it has made exist."""
    book, blocks = RunReader(tape).run_whole(key)
    with tape.view() as view:
        if view.get("run_configs", key) is None:
            yield "its configuration is missing"
        for made in book.run.made:
            if view.get("resources", keys.attempt_key(made.name, made.version)) is None:
                yield f"it has made {made.name}@{made.version}, which is missing"
    if keys.rollout_key(book.run.id) != key:
        yield "it is the record of another run"
    yield from _points(book, blocks)


def _points(book: RunRecord, blocks: list[tuple[int, MetricBlock]]) -> Iterator[str]:
    """Checks that a run's record counts the points in its blocks."""
    highest = max((block.last for _, block in blocks), default=None)
    if highest != book.run.step:
        yield f"its highest step is {book.run.step}, its points go to {highest}"
    rows = sum(len(block.steps) for number, block in blocks if number >= book.small)
    if rows != book.rows:
        yield f"it counts {book.rows} rows that are not folded, {rows} are there"
    if any(number >= book.next for number, _ in blocks):
        yield "it has a block with a number that was not given out"
    if strange := {name for _, block in blocks for name in block.names} - set(book.run.metrics):
        yield f"it does not name its metric {min(strange)!r}"


def run_order(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a record of the order names an existing run."""
    if RunReader(tape).run_head(value[:-1].decode("ascii")) is None:
        yield "it names a run that is missing"


def _of_run(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    if RunReader(tape).run_head(key.partition(b"\0")[0].decode("ascii")) is None:
        yield "its run is missing"


def run_json(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a record is JSON of an existing run."""
    json.loads(value)
    _ = RunReader(tape).run(key[:-1].decode("ascii"))
    yield from _of_run(tape, key, value)


def block(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a block of points can be read, and that its bounds are right."""
    block = MetricBlock(value)
    if any(later <= earlier for earlier, later in pairwise(block.steps)):
        yield "its steps do not rise"
    if (block.first, block.last) != (block.steps[0], block.steps[-1]):
        yield "its bounds are not those of its steps"
    for name in block.names:
        block.column(name)
    yield from _of_run(tape, key, value)


def run_event(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that the key of an event's record is its own."""
    event, run = event_of(key, value), key.partition(b"\0")[0].decode("ascii")
    if event_key(run, event, 0) != key:
        yield "it is the record of another event"
    yield from _of_run(tape, key, value)
