"""Takes trainers' reports: operations on the tape, and the parts that reads of them need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from penstock.gateway.model.base import parse_record
from penstock.gateway.model.run import CandidateTree, Run, RunEvent, RunHead
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.reader import StoreReader, descending_slice
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.work.runs.curves import MetricBlock, MetricRow, Series, bounds, merge_rows, readable_block, series
from penstock.gateway.work.runs.operations import RunOperations, RunRecord

# Reading training runs. Each read copies records in one short transaction and decodes them after it.

_SLICE = 256
_HASH = 7
EventPosition = tuple[int, int]
"""The place of an event: its time in ns and a hash of its content."""


class RunReader:
    """The training runs of a tape."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    def run_heads(self, before: int | None = None) -> Iterator[tuple[int, RunHead]]:
        """Yield all runs, newest first, each with a position that `before` takes."""
        start = None if before is None else keys.number(before)
        while True:
            with self._tape.view() as view, view.cursor("run_order") as cursor:
                found = descending_slice(cursor, start, _SLICE)
                stored = [(keys.to_number(at), view.get("runs", run)) for at, run in found]
            yield from (
                (at, book.run) for at, record in stored if (book := parse_record(RunRecord, record)) is not None
            )
            if len(found) < _SLICE:
                return
            start = found[-1][0]

    def run_head(self, name: str) -> RunHead | None:
        """Return a run without its configuration; None when there is none."""
        with self._tape.view() as view:
            book = view.get("runs", keys.rollout_key(name))
        return None if book is None else RunRecord.model_validate_json(book).run

    def run(self, name: str) -> Run | None:
        """Return a run with its configuration and candidates; None when there is none."""
        with self._tape.view() as view:
            parts = ("runs", "run_configs", "run_trees")
            book, config, tree = (view.get(database, keys.rollout_key(name)) for database in parts)
        if book is None:
            return None
        candidates = None if tree is None else CandidateTree.model_validate_json(tree)
        return Run(
            **dict(RunRecord.model_validate_json(book).run), config=json.loads(config or b"null"), tree=candidates
        )

    def run_whole(self, key: bytes) -> tuple[RunRecord, list[tuple[int, MetricBlock]]]:
        """Return a stored run, and its blocks by number in the order of their writing, as of one moment."""
        with self._tape.view() as view:
            book = view.get("runs", key)
            stored = list(view.scan("run_metrics", key))
        blocks = [(int.from_bytes(at[len(key) :]), MetricBlock(record)) for at, record in stored]
        return RunRecord.model_validate_json(book or b"{}"), blocks

    def _records(self, name: str, since: int, until: int | None) -> list[bytes]:
        """Return its blocks that reach into these steps, in the order of their writing."""
        with self._tape.view() as view:
            found = (record for _, record in view.scan("run_metrics", keys.rollout_key(name)))
            return [it for it in found if bounds(it)[1] >= since and (until is None or bounds(it)[0] <= until)]

    def run_series(self, name: str, metrics: Sequence[str], since: int = 0, until: int | None = None) -> list[Series]:
        """Return metrics of a run, in this order, at every step from `since` to `until`, and at some others."""
        found = (readable_block(record, whole=False) for record in self._records(name, since, until))
        blocks = [block for block in found if block is not None]
        return [series(blocks, metric) for metric in metrics]

    def run_points(self, name: str, since: int, limit: int) -> list[MetricRow]:
        """Return points of a run from this step on, by step."""
        records = self._records(name, since, None)
        chosen: dict[int, MetricBlock] = {}
        steps: set[int] = set()
        for at in sorted(range(len(records)), key=lambda at: bounds(records[at])):
            if len(steps) >= limit and bounds(records[at])[0] > sorted(steps)[limit - 1]:
                break
            block = readable_block(records[at])
            if block is None:
                continue
            chosen[at] = block
            steps.update(step for step in chosen[at].steps if step >= since)
        rows = merge_rows(row for at in sorted(chosen) for row in chosen[at].rows())
        return [row for row in rows if row.step >= since][:limit]

    def run_events(self, name: str, before: EventPosition | None, limit: int) -> list[tuple[EventPosition, RunEvent]]:
        """Return events of a run, newest first, each with the place that `before` takes."""
        prefix = keys.rollout_key(name)
        start = prefix + (b"\xff" * 16 if before is None else keys.number(before[0]) + before[1].to_bytes(_HASH))
        with self._tape.view() as view, view.cursor("run_events") as cursor:
            found = descending_slice(cursor, start, limit)
        mine = [(key, value) for key, value in found if key.startswith(prefix)]
        return [
            ((keys.to_number(key[-15:]), int.from_bytes(key[-_HASH:])), event_of(key, value)) for key, value in mine
        ]


def event_of(key: bytes, value: bytes) -> RunEvent:
    """Return the event of a record."""
    said = json.loads(value)
    return RunEvent(time_ns=keys.to_number(key[-15:-7]), **said)


T = TypeVar("T")


class RunService:
    """The training runs of a gateway. A change is durable when it is answered; a refused one raises
    `OperationRefusedError`."""

    def __init__(self, tape: Store, recorder: Recorder, now_ns: Callable[[], int]) -> None:
        self.reader = RunReader(tape)
        self.now_ns = now_ns
        self._recorder = recorder

    async def do(self, operation: Callable[[RunOperations, int], T]) -> T:
        """Run an operation, which is called with the time."""
        now = self.now_ns()
        return await self._recorder.submit(lambda transaction: operation(RunOperations(transaction), now))
