"""The rows of a lake: the definitions of its tables, and the reader that makes rows of a tape's log.

The tables are the views of `penstock sql`, as far as a table that is only appended to can be one, so that a query of
one works on the other. Every row begins with a cursor, by which it is written exactly once, and the id of its rollout.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.gateway.followers.index.rows import (
    COLUMNS,
    PassageReader,
    Row,
    SpanRecord,
    attempt_row,
    rollout_row,
    span_row,
)
from penstock.gateway.followers.index.sql.views import VIEWS
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.turn import Passage
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.codec import DECODE_ERRORS, StoredBody
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.view import FORGOTTEN, TapeView

SCHEMA: Final = 1
"""The version of all tables. It stands in each table and in the metadata of each file; a newer one is refused."""
BODIES: Final = "bodies"
"""The one table that exists only on request."""
DAY_NS: Final = 86_400 * 10**9


class LakeColumn(NamedTuple):
    """A column of a table."""

    type: str
    """A type of `penstock sql`, `date` or `blob`. Timestamps are in UTC, to the microsecond."""
    help: str


class TableDefinition(NamedTuple):
    help: str
    columns: Mapping[str, LakeColumn]

    @property
    def key(self) -> str:
        """The column of the row's cursor, which is the first."""
        return next(iter(self.columns))


_DAY: Final = {"day": LakeColumn("date", "the day on which it began; the table is partitioned by it")}
_VERSION: Final = {"cursor": LakeColumn("bigint", "names this version of it: the last change of it that is in the row")}


def _of(view: str) -> dict[str, LakeColumn]:
    return {name: LakeColumn(column.type, column.help) for name, column in VIEWS[view].columns.items()}


_SPANS: Final = _of("spans")
_SPAN: Final = {name: _SPANS[name] for name in ("span", "rollout", "attempt", "sequence")}
TABLE_DEFINITIONS: Final[dict[str, TableDefinition]] = {
    "spans": TableDefinition(
        "A model call, a run of a tool, a reward or an event that has ended.",
        {
            **_SPANS,
            "status": LakeColumn("varchar", "ok, error, cancelled or interrupted"),
            "request_hash": LakeColumn(
                "varchar", "SHA-256, in hex, of the exact bytes that the tape has of the request"
            ),
            "response_hash": LakeColumn("varchar", "the same of the answer"),
            **_DAY,
        },
    ),
    "messages": TableDefinition(VIEWS["messages"].help, {**_of("messages"), **_DAY}),
    "tool_calls": TableDefinition(VIEWS["tool_calls"].help, {**_of("tool_calls"), **_DAY}),
    "rewards": TableDefinition(VIEWS["rewards"].help, {**_of("rewards"), **_DAY}),
    "rollouts": TableDefinition(
        "One task given to one agent: a row each time that it was found changed.",
        {**_VERSION, **_of("rollouts"), **_DAY},
    ),
    "attempts": TableDefinition(
        "One try at a rollout: a row each time that its rollout was found changed.",
        {**_VERSION, **_of("attempts"), **_DAY},
    ),
    BODIES: TableDefinition(
        "The bytes of a call, as the tape has them. Only with `--bodies`.",
        {
            **_SPAN,
            "request": LakeColumn("blob", "the body of the request"),
            "response": LakeColumn("blob", "the body of the answer"),
            **_DAY,
        },
    ),
}
ALWAYS: Final = tuple(name for name in TABLE_DEFINITIONS if name != BODIES)
"""The tables of every lake."""

Values = tuple[Any, ...]
"""A row of a table, without its day."""
_Get = Callable[[Row], Any]


def _getters(view: str) -> list[_Get]:
    """Functions that make a view's columns from a row of the index."""
    table = VIEWS[view].table
    at = {name: place for place, name in enumerate(COLUMNS[table])}
    return [_getter(column.source, at) for column in VIEWS[view].columns.values()]


def _getter(source: str, at: Mapping[str, int]) -> _Get:
    name = source.removeprefix("make_timestamp(").partition(" ")[0].strip('"')
    place = at[name]
    if source.startswith("make_timestamp("):
        return lambda row: None if row[place] is None else row[place] // 1000
    if source.endswith(" / 1e6"):
        return lambda row: None if row[place] is None else row[place] / 1e6
    return lambda row: row[place]


_GETTERS: Final = {view: _getters(view) for view in ("spans", "rewards", "rollouts", "attempts")}


def view_row(view: str, row: Row) -> Values:
    """The view's row for a row of the index."""
    return tuple([get(row) for get in _GETTERS[view]])


def message_row(span: Values, position: int, passage: Passage) -> Values:
    """A row of `messages`; `span`: the columns that identify the span."""
    answer, role, kind, name, id, text = passage
    return (*span, position, answer, role, kind, name, id, text)


def tool_call_row(span: Values, position: int, passage: Passage) -> Values | None:
    """A row of `tool_calls`; None for a passage that is no tool call."""
    answer, role, kind, name, id, text = passage
    if kind != "tool_call" or not (answer or role == "client"):
        return None
    arguments = text[len(name or "") + 1 : len(text) - text.endswith(")")]
    return (*span, position, not answer, name, id, arguments)


# A chunk of the log becomes as many rows as fit into memory and into a file. It is read in short transactions, so that
# the gateway's pages are free again soon. A changed rollout is read once for each chunk, at its end; the cursor of its
# row is its last change in the chunk.

READ_S: Final = 0.2
"""Longest time of reading in one transaction, in seconds."""
PIECE: Final = 4096
"""Changes, or rollouts, that are read in one transaction."""
ROWS, BYTES = 100_000, 64 << 20
"""Size of a chunk, about: rows of all tables, and bytes of calls' texts and bodies."""
MARK_LOOKS: Final = 256
"""Most changes that are searched for a call that marks the state of a tape."""
_log: Final = logging.getLogger("penstock.lake")
_START: Final = list(COLUMNS["spans"]).index("start_ns")
_KIND: Final = list(COLUMNS["spans"]).index("kind")
_CREATED: Final = {table: list(COLUMNS[table]).index("created_ns") for table in ("rollouts", "attempts")}


@dataclass(slots=True)
class RowChunk:
    """The rows of some changes."""

    cursor: int = 0
    """The last of the changes."""
    mark: int = 0
    """Identifies the state of the tape (`mark_of`)."""
    rows: dict[str, dict[int, list[Values]]] = field(default_factory=dict[str, dict[int, list[Values]]])
    """Rows by table and day, in days since 1970."""
    forgotten: dict[str, int] = field(default_factory=dict[str, int])
    """Rollouts, with the change that forgot each: rows of earlier changes must be deleted."""
    count: int = 0
    size: int = 0

    def add(self, table: str, start_ns: int, row: Values) -> None:
        """Adds a row to the day of its beginning."""
        self.rows.setdefault(table, {}).setdefault(start_ns // DAY_NS, []).append(row)
        self.count += 1

    def is_gone(self, row: Values) -> bool:
        """True if the rollout of a row was forgotten later."""
        forgotten = self.forgotten.get(row[1])
        return forgotten is not None and row[0] < forgotten

    def after(self, table: str, cursor: int) -> dict[int, list[Values]]:
        """The rows of a table after a cursor by day, without those of forgotten rollouts."""
        days = self.rows.get(table, {})
        kept = {day: [row for row in rows if row[0] > cursor and not self.is_gone(row)] for day, rows in days.items()}
        return {day: rows for day, rows in kept.items() if rows}


class ChunkReader:
    """Reads one tape, from any change on."""

    def __init__(self, store: Store, prices: Prices, rows: int = ROWS, size: int = BYTES) -> None:
        self._store, self._prices, self._most_rows, self._most_bytes = store, prices, rows, size
        self._passages = PassageReader()

    def read(self, after: int, bodies: bool) -> RowChunk | None:
        """The chunk after a change; None if there is none. `bodies`: True to read the bytes of calls, too."""
        chunk, changed = RowChunk(after), dict[str, int]()
        end = self._store.cursor()
        while chunk.cursor < end and chunk.count < self._most_rows and chunk.size < self._most_bytes:
            self._read_piece(chunk, changed, min(end, chunk.cursor + PIECE), bodies)
        if chunk.cursor == after:
            return None
        names = list(changed)
        for first in range(0, len(names), PIECE):
            with self._store.view() as view:
                for name in names[first : first + PIECE]:
                    with _isolated(f"rollout {name}"):
                        _read_rollout(view, name, changed[name], chunk)
        with self._store.view() as view:
            chunk.mark = mark_of(view, chunk.cursor)
        return chunk

    def _read_piece(self, chunk: RowChunk, changed: dict[str, int], end: int, bodies: bool) -> None:
        until = time.monotonic() + READ_S
        with self._store.view() as view:
            if (hole := view.hole("log", chunk.cursor + 1)) is not None:
                chunk.cursor = hole[1]
                # If the beginning of the log was swept, the records that rollouts were forgotten may be gone, too.
                for key, _ in view.scan("forgotten") if hole[0] == 1 else ():
                    name = key[:-1].decode("ascii")
                    again = view.origins(name)
                    chunk.forgotten[name] = hole[1] + 1 if again is None else min(hole[1] + 1, again.number)
                return
            for at, record in enumerate(view.log_records(chunk.cursor, end), chunk.cursor + 1):
                with _isolated(f"change {at}"):
                    self._take(view, at, record, chunk, changed, bodies)
                chunk.cursor = at
                if time.monotonic() > until or chunk.size >= self._most_bytes:
                    return

    def _take(
        self, view: TapeView, at: int, record: bytes, chunk: RowChunk, changed: dict[str, int], bodies: bool
    ) -> None:  # fmt: skip
        kind = record[:1]
        if kind == b"f":  # a rollout was forgotten
            name = _name(record)
            chunk.forgotten[name] = at
            changed.pop(name, None)
        elif kind in (b"s", b"o", b"a", b"r"):
            name = _name(record)
            changed.pop(name, None)
            changed[name] = at
            if kind == b"s":
                self._take_span(view, at, record[1:], chunk, bodies)

    def _take_span(self, view: TapeView, at: int, key: bytes, chunk: RowChunk, bodies: bool) -> None:
        length = keys.summary_key_length(key)
        head = SpanRecord(view, key[:length], key[length:])
        passages, body = self._passages.read_call(view, head)
        row = span_row(head, at, 0, head.tools(passages), self._prices)
        start, span = row[_START], (at, head.rollout, head.attempt, head.sequence)
        chunk.add("spans", start, (*view_row("spans", row), *_hashes(body)))
        if row[_KIND] == "reward":
            chunk.add("rewards", start, view_row("rewards", row))
        for position, passage in enumerate(passages):
            chunk.add("messages", start, message_row(span, position, passage))
            chunk.size += len(passage.text)
            if (call := tool_call_row(span, position, passage)) is not None:
                chunk.add("tool_calls", start, call)
        if bodies and body is not None:
            chunk.add(BODIES, start, (*span, body.request, body.response))
            chunk.size += len(body.request) + len(body.response)


@contextmanager
def _isolated(what: str) -> Generator[None]:
    """Logs damage and continues behind it, so that it does not stop all later changes."""
    try:
        yield
    except (DamagedRecordError, *DECODE_ERRORS) as error:
        _log.error("%s is not in the lake, it cannot be read: %s; run `penstock check`", what, error)


def _read_rollout(view: TapeView, name: str, at: int, chunk: RowChunk) -> None:
    found = view.numbered_rollout(name)
    if found is None:
        return  # it was forgotten meanwhile: the next chunk has that record
    tries = view.attempts(name)
    _add_version("rollouts", at, rollout_row(*found, tries), chunk)
    for attempt in tries:
        _add_version("attempts", at, attempt_row(found[0], attempt), chunk)


def _add_version(table: str, at: int, row: Row, chunk: RowChunk) -> None:
    chunk.add(table, row[_CREATED[table]], (at, *view_row(table, row)))


def _hashes(body: StoredBody | None) -> tuple[str | None, str | None]:
    if body is None:
        return None, None
    return hashlib.sha256(body.request).hexdigest(), hashlib.sha256(body.response).hexdigest()


def _name(record: bytes) -> str:
    return record[1 : record.index(0)].decode("ascii")


def mark_of(view: TapeView, cursor: int) -> int:
    """Identifies the state of a tape at a change: a hash of the last call that had ended, which contains its times; the
    lowest eight bits hold how many changes back it is. Without such a call, the hash of the change itself."""
    for back in range(min(MARK_LOOKS, cursor)):
        record = view.log_record(cursor - back)
        if record[:1] == b"s":
            return _hash(record) << 8 | back
    return _hash(view.log_record(cursor)) << 8


def is_marked(view: TapeView, cursor: int, mark: int) -> bool:
    """True if a tape has this mark at a change. A record that was forgotten since counts as equal."""
    record = view.log_record(cursor - (mark & 0xFF))
    return record == FORGOTTEN or _hash(record) == mark >> 8


def _hash(record: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(record, digest_size=6).digest(), "big")
