"""Keeps an index in step with a tape, and finds rows by it. Runs in the process of the index, on one thread.

Following reads the log in pieces, each in one short transaction. A rollout that something happened to is read anew when
somebody asks, or with the next piece: so the calls of one rollout cost one reading, however many they are.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.gateway.filters import sql
from penstock.gateway.filters.query import parse
from penstock.gateway.index.questions import Find, Found, State
from penstock.gateway.index.rows import Rollouts, Row, attempt_row, input_row, rollout_row, span_row
from penstock.gateway.index.segments import SEALED, Manifest, Segments
from penstock.gateway.index.tables import Tables
from penstock.gateway.store import Store, codec, keys
from penstock.gateway.store.view import View

PIECE: Final = 4096
"""Changes that are read in one transaction."""
_log = logging.getLogger("penstock.index")


class Index:
    """A tape's index. Everything it raises of DuckDB means that it is damaged: `rebuild`."""

    def __init__(self, store: Store, path: Path, sealed: int = SEALED) -> None:
        """Opens what is there, where it is whole and of this tape. Raises `Held`."""
        self._store, self._sealed = store, sealed
        self._segments = Segments(path)
        manifest = self._segments.load()
        if not self._of_this_tape(manifest):
            _log.info("the index in %s is of another tape, or of an older state of it: it is made anew", path)
            manifest = Manifest()
        self._open(manifest)

    def _of_this_tape(self, manifest: Manifest) -> bool:
        if not manifest.cursor:
            return True
        with self._store.view() as view:
            return manifest.cursor <= view.last("log") and _mark(view, manifest.cursor) == manifest.mark

    def _open(self, manifest: Manifest) -> None:
        self._segments.clean(manifest.files)
        self.cursor, self._sealed_cursor = manifest.cursor, manifest.cursor
        self._tables = Tables(self._segments, manifest.files)
        self._rollouts = Rollouts()
        self._running = {bytes.fromhex(key): at for at, key in manifest.running}
        self._running_changed = bool(self._running)
        self._dirty = dict[str, None]()
        self._inputs = set[int]()
        self._fresh = 0
        self._changed = 0

    def rebuild(self) -> None:
        """Deletes it and begins anew."""
        self._tables.close()
        self._segments.commit(Manifest())
        self._open(Manifest())

    def close(self) -> None:
        """Closes it; nothing is lost that a manifest does not name, because the tape has it."""
        self._tables.close()
        self._segments.close()

    # -- following ---------------------------------------------------------------------------------------------------

    def follow(self, until: float) -> bool:
        """Reads on, until it has caught up, or until then (of `time.monotonic`). Whether it has caught up."""
        while self._read_piece():
            if self._fresh >= self._sealed or self._changed + len(self._dirty) >= self._sealed:
                self._refresh()
                self._seal()
            if time.monotonic() >= until:
                return False
        return True

    def _read_piece(self) -> bool:
        """Reads the next changes; False when there was none."""
        spans: list[Row] = []
        with self._store.view() as view:
            newest = min(view.last("log"), self.cursor + PIECE)
            if newest <= self.cursor:
                return False
            for at, record in _records(view, self.cursor + 1, newest):
                self._take(view, at, record, spans)
        self._tables.add("spans", spans)
        self._fresh += len(spans)
        self.cursor = newest
        return True

    def _take(self, view: View, at: int, record: bytes, spans: list[Row]) -> None:
        kind = record[:1]
        if kind not in b"soar":
            return
        key = record[1:]
        if kind == b"s":
            length = keys.summary_key_length(key)
            row = span_row(view, self._rollouts, at, key[:length], key[length:])
            spans.append(row)
            if self._running.pop(key[:length], None) is not None:
                self._running_changed = True
            self._dirty[row[2]] = None
            return
        if kind == b"o":
            self._running[key] = at
            self._running_changed = True
        self._dirty[key[: key.index(0)].decode("ascii")] = None

    def _refresh(self) -> None:
        """Reads anew what is not as it was: rollouts with their attempts, and calls that run."""
        if self._dirty:
            rollouts: list[Row] = []
            attempts: list[Row] = []
            inputs: list[Row] = []
            names = list(self._dirty)
            for start in range(0, len(names), PIECE):
                with self._store.view() as view:
                    for name in names[start : start + PIECE]:
                        self._read_rollout(view, name, rollouts, attempts, inputs)
            self._tables.change("rollouts", rollouts)
            self._tables.change("attempts", attempts)
            self._tables.add("inputs", inputs)
            self._changed += len(rollouts)
            self._dirty.clear()
        if self._running_changed:
            self._tables.run(self._running_rows())
            self._running_changed = False

    def _read_rollout(self, view: View, name: str, rollouts: list[Row], attempts: list[Row], inputs: list[Row]) -> None:
        found = view.numbered_rollout(name)
        if found is None:
            return
        number, rollout = found
        tries = view.attempts(name)
        rollouts.append(rollout_row(number, rollout, tries))
        attempts += [attempt_row(number, attempt) for attempt in tries]
        # What was given to do never changes, so that it is kept once: what was there before the last seal is sealed.
        if rollout.input is not None and number > self._sealed_cursor and number not in self._inputs:
            self._inputs.add(number)
            inputs.append(input_row(number, rollout))

    def _running_rows(self) -> list[Row]:
        rows: list[Row] = []
        with self._store.view() as view:
            for key, at in self._running.items():
                stored = view.get("open", key)
                if stored is not None:
                    rows.append(span_row(view, self._rollouts, at, key, codec.unpack_open(stored)[0]))
        return rows

    def _seal(self) -> None:
        with self._store.view() as view:
            mark = _mark(view, self.cursor)
        files = self._tables.seal(self.cursor)
        running = tuple((at, key.hex()) for key, at in self._running.items())
        self._segments.commit(Manifest(self.cursor, mark, running, (*self._tables.files, *files)))
        self._tables.sealed(files)
        self._sealed_cursor = self.cursor
        self._inputs.clear()
        self._fresh = self._changed = 0

    # -- asking ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """How far it is, and how large."""
        files = self._tables.files
        return State(self.cursor, self._store.cursor(), len(files), sum(file.bytes for file in files), self._fresh)

    def find(self, asked: Find) -> Found:
        """Where the rows of a page are, newest first. It must have caught up."""
        self._refresh()
        query = parse(asked.filter, asked.target, asked.now_ns)
        condition = sql.where(query, asked.target, self._tables.words)
        rows = (self._find_spans if asked.target == "spans" else self._find_rollouts)(condition, asked)
        return Found(rows[: asked.limit], len(rows) <= asked.limit)

    def _find_rollouts(self, condition: sql.Sql, asked: Find) -> list[int]:
        return self._numbers("r.number", "rollouts r", condition, asked)

    def _find_spans(self, condition: sql.Sql, asked: Find) -> list[int]:
        """The newest files first: a page is often full before the others are read."""
        found = self._numbers("s.cursor", "running s", condition, asked)
        for source in ("fresh", self._tables.newest_file, self._tables.older_files):
            if source is not None and (missing := asked.limit + 1 - len(found)) > 0:
                more = self._numbers("s.cursor", f"{source} s", condition, asked, missing)
                found = sorted([*found, *more], reverse=True)
        return found

    def _numbers(self, column: str, table: str, condition: sql.Sql, asked: Find, limit: int | None = None) -> list[int]:
        before = "" if asked.before is None else f"{column} < ? and "
        values: Sequence[Any] = () if asked.before is None else (asked.before,)
        rows = self._tables.ask(
            f"select {column} from {table} where {before}({condition.text}) order by {column} desc limit ?",
            (*values, *condition.values, limit or asked.limit + 1),
        )
        return [number for (number,) in rows]


def _records(view: View, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """The records of the log with these cursors, both included."""
    while first <= last:
        begins, records = view.log_segment(first)
        yield from enumerate(records[first - begins : last + 1 - begins], first)
        first = begins + len(records)


def _mark(view: View, cursor: int) -> str:
    return hashlib.blake2b(view.log_record(cursor), digest_size=16).hexdigest()
