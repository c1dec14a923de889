"""Results of batches become calls: each is a span beside the call that has made its batch, kept once, however often it
is fetched.

What calls tell about batches and their files (`dialects.batches`) is noted with their spans. A call that fetches
results leaves a note that they are to be read (`record_batches`); `BatchResultService` reads them from the tape, some
at a time, and keeps the new ones (`store_results`). A file of results may be fetched, or its note written, before its
batch is known: then the note waits.

    batches     "b" name of a batch             its `BatchRecord`
                "f" name of a file              its `BatchFileRecord`
                "r" name of a batch NUL digest of a result's name (16)    key of its summary
                "t" key of the summary of a call that has fetched results    name of the batch
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from penstock.gateway.model.facts import BATCH, CUSTOM_ID, FETCHED
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.turns import IncompleteDecodeError, decoded_pieces, encoding
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.batches import (
    Batch,
    BatchFacts,
    BatchInput,
    BatchRequest,
    BatchResult,
    results,
    with_batch_tier,
)
from penstock.gateway.wire.dialects.tokens import estimate_usage, lacks_token_counts, usage_from_token_ids

DATABASE: Final = "batches"
KNOWN_NS: Final = 90 * 24 * 3600 * 10**9
"""Nanoseconds for which the kept results of a batch are known: longer than providers offer them."""
AT_ONCE, AT_ONCE_BYTES = 128, 1 << 20
"""Most results that are kept in one transaction, and about the most bytes of them."""
MOST_BYTES: Final = 1 << 30
"""Most bytes of results that are read of one answer, without its content encoding."""
LEFT_OUT: Final = "penstock.batch.left_out"
"""The event that records results which were not read; its attribute of the same name has their number, as far as is
known."""
_WAITING: Final = 16
"""Most calls that wait until the batch of a fetched file is known."""
_SWEPT: Final = 4096
"""Most records of an old batch that are deleted at once."""
_PIECE: Final = 1 << 20
_USUAL: Final = {"anthropic": "/v1/messages", "gemini": "/v1beta/models/unknown:generateContent"}
"""Path of the requests of a batch that was made elsewhere, by API."""
CallKey: TypeAlias = tuple[str, str, int]
ResultCounter: TypeAlias = Callable[[Transaction, str, Sequence[SpanEntry]], None]
"""Called with new results and the name of their batch."""


class BatchRecord(msgspec.Struct):
    """The record of a batch."""

    since_ns: int
    made: CallKey | None = None
    """The call that has made it."""
    requests: str | None = None
    """The file of its requests."""
    url: str = ""
    created: str = ""


class BatchFileRecord(msgspec.Struct):
    """The record of a file."""

    since_ns: int
    brought: CallKey | None = None
    """The call that has brought it."""
    of: str | None = None
    """The batch whose results it has."""
    waiting: list[CallKey] = []
    """Calls that have fetched it before its batch was known."""


_known, _file = msgspec.json.Decoder(BatchRecord).decode, msgspec.json.Decoder(BatchFileRecord).decode
_written = msgspec.json.Encoder().encode


# -- with the span of a call -----------------------------------------------------------------------------------------


def record_batches(tape: Transaction, entry: SpanEntry, told: BatchFacts) -> None:
    """Note what a call tells about batches, files and fetched results."""
    mine = (entry.rollout, entry.attempt, entry.sequence)
    for batch in told.batches:
        _note(tape, batch, mine, entry.start_ns)
    if told.uploaded is not None:
        _put(tape, b"f", told.uploaded, BatchFileRecord(entry.start_ns, mine))
    if told.fetched is None:
        return
    batch = told.fetched
    if told.is_file:
        file = _file_of(tape, told.fetched, entry.start_ns)
        if file.of is None:
            file.waiting = [*file.waiting, mine][:_WAITING]
            _put(tape, b"f", told.fetched, file)
            return
        batch = file.of
    _leave(tape, mine, batch)


def _note(tape: Transaction, batch: Batch, mine: CallKey, now: int) -> None:
    stored = tape.get(DATABASE, b"b" + batch.name.encode())
    known = BatchRecord(now) if stored is None else _known(stored)
    if batch.made and known.made is not None and known.created != batch.created:
        # A server that was set up anew gives the names of earlier batches to others.
        known = BatchRecord(now)
        for key in [key for key, _ in tape.scan(DATABASE, _kept(batch.name))]:
            tape.delete(DATABASE, key)
    made, created = known.made or (mine if batch.made else None), known.created or batch.created
    told = BatchRecord(known.since_ns, made, known.requests or batch.requests, known.url or batch.url, created)
    if stored is None or told != known:
        _put(tape, b"b", batch.name, told)
    for name in batch.results:
        file = _file_of(tape, name, now)
        if file.of != batch.name:
            for call in file.waiting:
                _leave(tape, call, batch.name)
            file.of, file.waiting = batch.name, []
            _put(tape, b"f", name, file)
    if batch.made:
        _sweep(tape, now)


def _kept(batch: str) -> bytes:
    """The prefix of the keys of a batch's results."""
    return b"r%b\0" % batch.encode()


def _leave(tape: Transaction, call: CallKey, batch: str) -> None:
    tape.put(DATABASE, b"t" + keys.summary_key(*call), batch.encode())


def _file_of(tape: Transaction, name: str, now: int) -> BatchFileRecord:
    stored = tape.get(DATABASE, b"f" + name.encode())
    return BatchFileRecord(now) if stored is None else _file(stored)


def _put(tape: Transaction, kind: bytes, name: str, said: BatchRecord | BatchFileRecord) -> None:
    tape.put(DATABASE, kind + name.encode(), _written(said))


def _sweep(tape: Transaction, now: int) -> None:
    """Forget old batches and files, some of their results at a time."""
    old = [key for key, stored in tape.scan(DATABASE, b"f") if now - _file(stored).since_ns > KNOWN_NS]
    for key, stored in list(tape.scan(DATABASE, b"b")):
        if now - _known(stored).since_ns > KNOWN_NS:
            kept = [one for one, _ in islice(tape.scan(DATABASE, _kept(key[1:].decode())), _SWEPT)]
            old += kept if len(kept) == _SWEPT else [*kept, key]
            tape.delete("guesses", key[1:])
    for key in old:
        tape.delete(DATABASE, key)


# -- reading, on a thread --------------------------------------------------------------------------------------------


class PendingBatchRead(NamedTuple):
    """Results that are to be read."""

    fetched: CallKey
    batch: str


def pending_reads(tape: StoreReader) -> list[PendingBatchRead]:
    """All results that were fetched and are not read yet."""
    with tape.view() as view:
        return [
            PendingBatchRead(keys.split_summary_key(key[1:]), batch.decode())
            for key, batch in view.scan(DATABASE, b"t")
        ]  # fmt: skip


class BatchResultReader:
    """The results that a call has fetched, as entries. Holds its answer, and the call or the file with the requests; of
    each body at most what is recorded."""

    def __init__(self, tape: StoreReader, todo: PendingBatchRead) -> None:
        self.batch, self.left_out, self.why = todo.batch, 0, ""
        """Number of results that are left out, and why."""
        self._of = todo.batch.partition("/")[0]
        with tape.view() as view:
            stored = view.get(DATABASE, b"b" + todo.batch.encode())
            known = BatchRecord(0) if stored is None else _known(stored)
            stored = None if known.requests is None else view.get(DATABASE, b"f" + known.requests.encode())
            file = None if stored is None else _file(stored)
        self._url = known.url or _USUAL.get(self._of, "")
        self._by = tape.span(*todo.fetched)
        made = None if known.made is None else tape.span(*known.made)
        brought = None if file is None or file.brought is None else tape.span(*file.brought)
        self._beside = made or brought
        self.rollout = (self._beside or self._by).rollout if self._by is not None else ""
        """Rollout of the results; empty if the call that has fetched them was forgotten."""
        asked = brought if self._of == "openai" else made
        self._requests = _requests(self._of, None if asked is None else tape.exchange(asked))
        fetched = None if self._by is None else tape.exchange(self._by)
        self._found = iter(()) if fetched is None else results(self._of, self._pieces(fetched))
        if fetched is None:
            self._leave_out("the answer was not kept")
        elif self._by is not None and self._by.truncated:
            self._leave_out("the answer is larger than limits.recorded_bytes")
        elif self._by is not None and self._by.status != "ok":
            self._leave_out("the answer broke off")

    def next_entries(self) -> list[SpanEntry]:
        """The next entries; empty after the last ones."""
        made, size = list[SpanEntry](), 0
        while len(made) < AT_ONCE and size < AT_ONCE_BYTES:
            try:
                found = next(self._found)
            except StopIteration:
                break
            except IncompleteDecodeError:
                self._leave_out("the answer's content encoding cannot be undone")
                break
            if found is None:
                self._leave_out("a line is no result that can be read")
                continue
            made.append(self._entry(found))
            size += len(found.body)
        return made

    def _leave_out(self, why: str) -> None:
        self.left_out, self.why = self.left_out + 1, self.why or why

    def _pieces(self, fetched: Exchange) -> Iterator[bytes]:
        body, packed = fetched.response_body, encoding(fetched.response_headers)
        if packed in ("", "identity"):
            yield from (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))
            return
        size = 0
        for piece in decoded_pieces(body, packed, MOST_BYTES):
            size += len(piece)
            if size > MOST_BYTES:
                self._leave_out(f"the answer has more than {MOST_BYTES} bytes")
                return
            yield piece

    def _entry(self, found: BatchResult) -> SpanEntry:
        assert self._by is not None
        beside, by = self._beside or self._by, self._by
        request = self._requests.of(found.name)
        entry = SpanEntry(beside.rollout, beside.attempt, status="ok" if found.error is None else "error")
        entry.path, entry.error, entry.http_status = request.url or self._url, found.error, found.status
        entry.dialect = find("POST", entry.path.partition("?")[0]).name
        # A request that no model has seen has used nothing.
        entry.upstream = None if found.status is None else beside.upstream or by.upstream
        entry.agent, entry.arm = beside.agent, beside.arm
        entry.trace_id = beside.trace_id
        entry.parent_id = None if self._beside is None else beside.span_id
        entry.start_ns, entry.end_ns = beside.start_ns, max(by.end_ns or by.start_ns, beside.start_ns)
        entry.first_byte_ns = entry.end_ns - entry.start_ns
        whose = f"{by.rollout}/{by.attempt}#{by.sequence}"
        entry.attributes = {BATCH: self.batch, CUSTOM_ID: found.name, FETCHED: whose}
        entry.request_bytes, entry.response_bytes = len(request.body), len(found.body)
        marks = [entry.first_byte_ns // 1000, len(found.body)]
        entry.body = StoredBody("", b"", request.body, b"", found.body, b"", marks)
        _read(entry, request, found)
        return entry


def _requests(of: str, asked: Exchange | None) -> BatchInput:
    if asked is None:
        return BatchInput(of, b"", "")
    body, packed = asked.request_body, encoding(asked.request_headers)
    if packed not in ("", "identity"):
        body = b"".join(decoded_pieces(body, packed, MOST_BYTES))
    kind = next((value for name, value in asked.request_headers if name.lower() == "content-type"), "")
    return BatchInput(of, body, kind)


def _read(entry: SpanEntry, request: BatchRequest, found: BatchResult) -> None:
    """Read the facts of the summary from the bodies, with the prices of batches."""
    dialect = by_name(entry.dialect)
    facts = dialect.facts(request.body, found.body, False) if found.error is None else Facts()
    entry.model = facts.model or dialect.model(request.body, entry.path)
    entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
    entry.tool_calls, entry.choices, entry.usage = facts.tool_calls, facts.choices, facts.usage
    if facts.failed is not None:
        entry.status, entry.error = "error", facts.failed
    entry.usage = usage_from_token_ids(entry.usage, found.body, False, entry.status == "ok")
    if found.error is None and lacks_token_counts(entry, dialect):
        guess = estimate_usage(entry.usage, request.body, found.body, dialect.answer_text_pattern(False))
        entry.estimate = [guess.input_tokens, guess.output_tokens]
    entry.usage = with_batch_tier(entry.usage)


# -- keeping what was read -------------------------------------------------------------------------------------------


def store_results(tape: Transaction, batch: str, entries: Sequence[SpanEntry], count: ResultCounter) -> int | None:
    """Keep the new entries and return how many they are. None if their rollout was forgotten since they were read."""
    if entries and tape.rollout(entries[0].rollout) is None:
        return None
    kept = list[SpanEntry]()
    for entry in entries:
        name: Any = (entry.attributes or {})[CUSTOM_ID]
        key = _kept(batch) + blake2b(name.encode(), digest_size=16).digest()
        if tape.get(DATABASE, key) is None:
            # If this transaction fails, the same entry may be written in another one.
            kept.append(made := replace(entry, sequence=0))
            tape.record(made, 0)
            tape.put(DATABASE, key, keys.summary_key(made.rollout, made.attempt, made.sequence))
    if kept:
        count(tape, batch, kept)
    return len(kept)


def finish_read(tape: Transaction, todo: PendingBatchRead, left: tuple[int, str] | None, now: int) -> None:
    """Delete the note of an answer that was read. `left`: number of results that were left out, and why."""
    key = b"t" + keys.summary_key(*todo.fetched)
    if tape.get(DATABASE, key) is None:
        return  # another process has read it at the same time
    tape.delete(DATABASE, key)
    rollout, attempt, _ = todo.fetched
    if left is not None and tape.rollout(rollout) is not None:
        entry = SpanEntry(
            rollout, attempt, kind="event", name=LEFT_OUT, method="", status="ok", start_ns=now, end_ns=now
        )
        entry.attributes = {BATCH: todo.batch, LEFT_OUT: left[0], f"{LEFT_OUT}.why": left[1]}
        tape.record(entry, 0)


# Reads results of batches from the tape after they were fetched: a few at a time, on a thread.
#
# It works in the process whose call has fetched them, and takes over work that another process has left: at the
# start, with the next results, and every ten minutes. Two processes that read the same results keep each result once.

EVERY_S: Final = 600.0
"""Seconds between two searches for results that other processes have left."""
_log = logging.getLogger("penstock.batches")


class BatchResultService:
    """The service that reads fetched results. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self, tape: StoreReader, recorder: Recorder, metrics: Metrics, now_ns: Callable[[], int], count: ResultCounter,
        counted: Callable[[], None],
    ) -> None:  # fmt: skip
        """`count`: called with new results in their transaction; `counted`: called after that."""
        self._tape, self._recorder, self._metrics, self._now_ns = tape, recorder, metrics, now_ns
        self._count, self._counted = count, counted
        self._news, self._stopping = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        """Look for results soon: a call may have fetched some."""
        self._news.set()

    async def start(self) -> None:
        """Begin, with the results that were left unread."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Finish the current transaction; the rest is read later."""
        self._stopping = True
        self.notify()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopping:
            self._news.clear()
            with suppress(TapeError):  # the recorder has reported it
                for todo in await asyncio.to_thread(pending_reads, self._tape):
                    await self._safely(todo)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()

    async def _safely(self, todo: PendingBatchRead) -> None:
        try:
            await self._read(todo)
        except TapeError:
            raise
        except Exception:
            _log.exception("results of batch %s cannot be read", todo.batch)
            await self._finish(todo, (1, "they could not be read; the gateway's log says why"))

    async def _read(self, todo: PendingBatchRead) -> None:
        # The call that has made the batch may still be queued for the tape, here or in another worker.
        await self._recorder.flush_all()
        found = await asyncio.to_thread(BatchResultReader, self._tape, todo)
        while entries := [] if self._stopping or not found.rollout else await asyncio.to_thread(found.next_entries):
            kept = await self._recorder.submit(
                partial(store_results, batch=found.batch, entries=entries, count=self._count)
            )
            if kept is None:
                # Their rollout was forgotten: they belong to the call that has fetched them now, or to none.
                found = await asyncio.to_thread(BatchResultReader, self._tape, todo)
                continue
            self._metrics.batch_results[("kept",)] += kept
            self._metrics.batch_results[("again",)] += len(entries) - kept
            self._counted()
        if not self._stopping:
            await self._finish(todo, (found.left_out, found.why) if found.left_out else None)

    async def _finish(self, todo: PendingBatchRead, left: tuple[int, str] | None) -> None:
        if left is not None:
            self._metrics.batch_results[("left_out",)] += left[0]
            _log.warning("of batch %s, %d results or more are left out: %s", todo.batch, *left)
        await self._recorder.submit(partial(finish_read, todo=todo, left=left, now=self._now_ns()))
