"""Training runs: trainers' reports as operations inside a write transaction, and reads of them.

Each post of points is a small block (`gateway.work.curves`), so a step of training is one record of a few hundred
bytes. When the small blocks of a run have `FOLD` rows they are folded into one packed block, in the transaction of the
post that reached `FOLD`. A resume cuts off superseded points: blocks beyond the step go, and the block with the step is
rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import nan
from typing import TypeVar

from pydantic import BaseModel

from penstock.gateway.model.base import parse_record
from penstock.gateway.model.run import (
    MOST_CONFIG,
    MOST_METRICS,
    CandidateTree,
    NewRun,
    Point,
    PointsRequest,
    Run,
    RunChange,
    RunEnd,
    RunEvent,
    RunHead,
)
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.reader import StoreReader, descending_slice
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.work.curves import (
    MetricBlock,
    MetricRow,
    Series,
    bounds,
    encode_block,
    merge_rows,
    readable_block,
    series,
)

T = TypeVar("T")
FOLD = 256
"""Number of rows of small blocks at which they are folded."""


class RunRecord(BaseModel):
    """A stored run, without its configuration."""

    run: RunHead
    next: int = 1
    """Number of the next block."""
    small: int = 1
    """Number of the first block that is not folded."""
    rows: int = 0
    """Rows in the blocks that are not folded."""


class RunOperations:
    """The operations on training runs in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def start(self, new: NewRun, now: int) -> Run:
        """Start a run; starting an existing run with the same settings returns that one."""
        hidden = {"config": self._tape.secrets.json(new.config), "name": self._tape.secrets.text(new.name)}
        new = new.model_copy(update=hidden)
        config = json.dumps(new.config, ensure_ascii=False).encode()
        if len(config) > MOST_CONFIG:
            raise OperationRefusedError(
                "invalid", f"config: {len(config):,} bytes of JSON; at most {MOST_CONFIG:,}", "config"
            )
        name = new.id or self._free(new.kind)
        known = self._tape.get("runs", keys.rollout_key(name))
        if known is not None:
            return self._same(new, RunRecord.model_validate_json(known).run, config)
        head = RunHead(**new.model_dump(exclude={"id", "config"}), id=name, created_ns=now, last_seen_ns=now)
        self._tape.put("run_configs", keys.rollout_key(name), config)
        cursor = self._write(RunRecord(run=head))
        self._tape.put("run_order", keys.number(cursor), keys.rollout_key(name), append=True)
        return Run(**dict(head), config=new.config)

    def _same(self, new: NewRun, run: RunHead, config: bytes) -> Run:
        given = new.model_dump(exclude={"id", "config", "steps"})
        different = [name for name, value in given.items() if getattr(run, name) != value]
        if self._tape.get("run_configs", keys.rollout_key(run.id)) != config:
            different.append("config")
        if different:
            message = f"there is a run {run.id!r} with another {different[0]}; choose another id, or resume that one"
            raise OperationRefusedError("conflict", message, "id", run.id)
        return Run(**dict(run), config=new.config)

    def _free(self, kind: str) -> str:
        number = 1
        while self._tape.get("runs", keys.rollout_key(f"{kind}-{number}")) is not None:
            number += 1
        return f"{kind}-{number}"

    def change(self, name: str, said: RunChange, now: int) -> RunHead:
        """Apply a trainer's change of its run."""
        book = self._book(name)
        for made in said.made:
            if self._tape.get("resources", keys.attempt_key(made.name, made.version)) is None:
                message = f"made: there is no {made.name}@{made.version}; register it first"
                raise OperationRefusedError("invalid", message, "made", f"{made.name}@{made.version}")
        run = book.run
        for made in said.made:
            if made not in run.made:
                run.made.append(made)
        run.message = run.message if said.message is None else self._tape.secrets.text(said.message)
        run.steps = said.steps or run.steps
        if said.tree is not None:
            hidden = self._tape.secrets.text
            every = [one.model_copy(update={"claim": hidden(one.claim)}) for one in said.tree.candidates]
            tree = said.tree.model_copy(update={"candidates": every}).model_dump_json(exclude_defaults=True).encode()
            self._tape.put("run_trees", keys.rollout_key(name), tree)
        return self._heard(book, now)

    def finish(self, name: str, end: RunEnd, now: int) -> RunHead:
        """End a run; the same end may be repeated."""
        book = self._book(name)
        run = book.run
        _fence(run, end.resumed)
        if run.status != "running":
            if run.status == end.status:
                return run
            message = f"run {name!r} has {run.status} already"
            raise OperationRefusedError("conflict", message, "status", end.status)
        run.status, run.ended_ns = end.status, now
        run.message = run.message if end.message is None else self._tape.secrets.text(end.message)
        return self._heard(book, now)

    # -- points ------------------------------------------------------------------------------------------------------

    def add_points(self, name: str, asked: PointsRequest, now: int) -> RunHead:
        """Add points, after cutting off superseded ones."""
        book = self._book(name)
        resumes = self._resumes(book.run, asked)
        if book.run.status != "running" and not resumes:
            message = f"run {name!r} has {book.run.status}; since_step resumes it"
            raise OperationRefusedError("conflict", message, "run", name)
        rows = merge_rows(_rows(asked.points, now))
        self._name(book.run, asked.points)
        if resumes and asked.since_step is not None:
            self._resume(book, asked.since_step, asked.resumed, now)
        if rows:
            self._add(book, rows)
        return self._heard(book, now)

    def _resumes(self, run: RunHead, asked: PointsRequest) -> bool:
        """True if this request cuts points off; refuses a trainer that another one has replaced."""
        said, since = asked.resumed, asked.since_step
        if since is None or said is None:
            _fence(run, said)
            return since is not None
        if said > run.resumed:
            return True
        _fence(run, said)
        if since != run.since_step:
            message = f"resume {said} of run {run.id!r} went on from step {run.since_step}, not {since}"
            raise OperationRefusedError("conflict", message, "since_step", str(since))
        return False

    def _name(self, run: RunHead, points: Iterable[Point]) -> None:
        """Add the metrics that are new."""
        names = list(dict.fromkeys([*run.metrics, *(name for point in points for name in point.values)]))
        if len(names) > MOST_METRICS:
            message = f"points: {names[MOST_METRICS]!r} is one metric too many; a run has at most {MOST_METRICS}"
            raise OperationRefusedError("invalid", message, "points", names[MOST_METRICS])
        run.metrics = names

    def _resume(self, book: RunRecord, since: int, resumed: int | None, now: int) -> None:
        run = book.run
        run.step = self._cut(book, since)
        run.since_step, run.resumed = since, run.resumed + 1 if resumed is None else resumed
        run.status, run.ended_ns, run.message = "running", None, None
        self._put_event(run.id, RunEvent(step=since, text=f"resumed from step {since}"), now)

    def _cut(self, book: RunRecord, since: int) -> int | None:
        """Remove points of this step and later; return the highest step that is left."""
        highest, prefix = -1, keys.rollout_key(book.run.id)
        book.rows = 0
        for key, stored in list(self._tape.scan("run_metrics", prefix)):
            block, number = readable_block(stored), int.from_bytes(key[len(prefix) :])
            if block is None:
                continue
            left = [row for row in block.rows() if row.step < since] if block.last >= since else None
            if left == []:
                self._remove(key)
                continue
            if left is not None:
                self._tape.put("run_metrics", key, encode_block(left, packed=number < book.small))
            highest = max(highest, block.last if left is None else left[-1].step)
            if number >= book.small:
                book.rows += len(block.steps if left is None else left)
        return None if highest < 0 else highest

    def _add(self, book: RunRecord, rows: Sequence[MetricRow]) -> None:
        self._tape.put("run_metrics", keys.numbered_key(book.run.id, book.next), encode_block(rows, packed=False))
        book.next, book.rows = book.next + 1, book.rows + len(rows)
        book.run.step = max(rows[-1].step, -1 if book.run.step is None else book.run.step)
        if book.rows >= FOLD:
            self._fold(book)

    def _fold(self, book: RunRecord) -> None:
        """Fold the small blocks into one, in the place of the last of them."""
        wanted = [keys.numbered_key(book.run.id, number) for number in range(book.small, book.next)]
        found = [(key, readable_block(self._tape.get("run_metrics", key) or b"")) for key in wanted]
        # A damaged block stays as it is: `check` reports it.
        stored = [(key, block) for key, block in found if block is not None]
        rows = merge_rows(row for _, block in stored for row in block.rows())
        for key, _ in stored[:-1]:
            self._remove(key)
        self._tape.put("run_metrics", stored[-1][0], encode_block(rows, packed=True))
        book.small, book.rows = book.next, 0

    # -- events ------------------------------------------------------------------------------------------------------

    def add_events(self, name: str, events: Iterable[RunEvent], now: int) -> int:
        """Add events and return the number of new ones. An event that is there already, with its time, is not added
        again."""
        book = self._book(name)
        kept = sum([self._put_event(name, event, now) for event in events])
        self._heard(book, now)
        return kept

    def _put_event(self, run: str, event: RunEvent, now: int) -> bool:
        event = event.model_copy(update={"text": self._tape.secrets.text(event.text)})
        key = event_key(run, event, now)
        if self._tape.get("run_events", key) is not None:
            return False
        self._tape.put("run_events", key, event.model_dump_json(exclude={"time_ns"}, exclude_defaults=True).encode())
        return True

    # -- records -----------------------------------------------------------------------------------------------------

    def _book(self, name: str) -> RunRecord:
        stored = self._tape.get("runs", keys.rollout_key(name))
        if stored is None:
            raise OperationRefusedError(
                "not_found", f"there is no run {name!r}; `penstock runs list` lists them", "run", name
            )
        return RunRecord.model_validate_json(stored)

    def _heard(self, book: RunRecord, now: int) -> RunHead:
        book.run.last_seen_ns = max(now, book.run.last_seen_ns)
        self._write(book)
        return book.run

    def _write(self, book: RunRecord) -> int:
        """Write the run, and tell of it in the change feed; return the cursor."""
        self._tape.put("runs", keys.rollout_key(book.run.id), book.model_dump_json(exclude_defaults=True).encode())
        return self._tape.append(b"t" + keys.rollout_key(book.run.id))

    def _remove(self, key: bytes) -> None:
        self._tape.delete("run_metrics", key)


def _fence(run: RunHead, said: int | None) -> None:
    """Refuse a trainer that another one has replaced."""
    if said is not None and said != run.resumed:
        message = f"run {run.id!r} was resumed {run.resumed} times, not {said}: another trainer has taken it over"
        raise OperationRefusedError("conflict", message, "resumed", str(said))


def event_key(run: str, event: RunEvent, now: int) -> bytes:
    """Return the key of an event: its time, and a hash that tells it from others of that time."""
    said = json.dumps([event.step, event.level, event.text]).encode()
    at = now if event.time_ns is None else event.time_ns
    return keys.rollout_key(run) + keys.number(at) + blake2b(said, digest_size=7).digest()


def _rows(points: Iterable[Point], now: int) -> Iterable[MetricRow]:
    for point in points:
        values = {name: nan if value is None else value for name, value in point.values.items()}
        yield MetricRow(point.step, now if point.time_ns is None else point.time_ns, values)


# -- reads ------------------------------------------------------------------------------------------------------------

_SLICE = 256
_HASH = 7
EventPosition = tuple[int, int]
"""The place of an event: its time in ns and a hash of its content."""


class RunReader:
    """The training runs of a tape. Each read copies records in one short transaction and decodes them after it."""

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
