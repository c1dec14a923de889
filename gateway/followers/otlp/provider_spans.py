"""Spans that a provider itself reports of the calls that it served.

Claude's API sends them (`service.name` claude-platform). They name no rollout. Each is led to its call by the id of the
response or of the request, or to the home of its session (`tape.hosted_sessions`); the others of its trace go with it.
The first of them is a call's, seen from the other side: `model.span.span_tree` shows it below the call, and its tokens
are the call's own. A span may come before its call is recorded, and only some of an organisation's calls pass this
gateway. So a span without a call waits on the tape, for an hour at most, and is then dropped.

OpenAI's agent sessions have a list of traces, as OTLP JSON. What calls have read of it waits on the tape until it is
read here; each span is taken once, and shown below its turn.

    hosted      "w" time (u64) digest       a span that waits, as JSON
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.signals import (
    JSON,
    TRACES,
    ItemRejectedError,
    OtlpRequestError,
    items,
    tree_of,
)
from penstock.gateway.followers.otlp.span_import import entry_of, source_of
from penstock.gateway.tape.hosted_sessions import DATABASE, TurnTrace, session_home, take_trace, waiting_traces
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.operations import SpanOperations

WAITS_NS: Final = 3600 * 10**9
MOST_WAITING: Final = 4096
"""Most spans that wait; beyond, the oldest are dropped."""
LOOKUPS: Final = 32
"""Most ids that are looked for at once: one that is not on the tape takes a search of all of it."""
FIRST_S, LAST_S = 1.0, 60.0
"""Seconds until waiting spans are looked at again: twice as many each time."""
_KEPT: Final = ("kind", "name", "status", "start_ns", "end_ns", "trace_id", "span_id", "parent_id", "agent", "error")
Name = tuple[str, str]
_log = logging.getLogger("penstock.otlp")


class PlacedSpan(NamedTuple):
    """A span and the rollout and attempt that it belongs to."""

    entry: SpanEntry
    name: Name


class ProviderSpans:
    """Finds the calls of a provider's spans."""

    def __init__(self, tape: Store, dispatcher: Dispatcher, received: Counter[tuple[str, ...]]) -> None:
        """`received`: number of spans by outcome."""
        self._tape, self._dispatcher, self._received = tape, dispatcher, received
        self._task: asyncio.Task[None] | None = None
        self._newest, self._turn = b"", 0
        """The newest waiting span that was looked at; the place among the others where the next look begins."""
        self._reading: asyncio.Task[None] | None = None
        self._news = False

    def notify(self) -> None:
        """Read traces of hosted sessions soon: a call may have fetched some."""
        self._news = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_traces())

    async def _read_traces(self) -> None:
        while self._news:
            self._news = False
            with suppress(TapeError):  # the recorder has reported it
                for trace in await asyncio.to_thread(self._waiting_traces):
                    await self._take(trace)

    def _waiting_traces(self) -> list[TurnTrace]:
        with self._tape.view() as view:
            return waiting_traces(view)

    async def _take(self, trace: TurnTrace) -> None:
        spans, wrong = await asyncio.to_thread(_spans_of, trace.otlp)
        now = self._dispatcher.now_ns()

        def write(tape: Transaction) -> int:
            new = take_trace(tape, trace, spans)
            SpanOperations(tape).add(new, now)
            return len(new)

        self._received["accepted",] += await self._dispatcher.run(write)
        self._received["invalid",] += wrong

    async def place(self, entries: Sequence[SpanEntry]) -> tuple[list[PlacedSpan], list[SpanEntry]]:
        """(spans whose attempts are known, spans whose attempts are not known yet)."""
        await self._dispatcher.wait_until_recorded()
        return await asyncio.to_thread(self._placed, entries)

    def _placed(self, entries: Sequence[SpanEntry]) -> tuple[list[PlacedSpan], list[SpanEntry]]:
        ids = dict.fromkeys(it for entry in entries for it in _said(entry, semconv.RESPONSE_ID, semconv.REQUEST_ID))
        found = self._tape.find_calls([*ids][:LOOKUPS])
        calls = {id: (call.rollout, call.attempt) for id, call in found.items()}
        own = {id(entry): self._named(entry, calls) for entry in entries}
        by_span = {entry.span_id: entry for entry in entries}
        traces = dict[str | None, set[Name]]()
        for entry in entries:
            if (name := own[id(entry)]) is not None:
                traces.setdefault(entry.trace_id, set()).add(name)
        placed, waiting = list[PlacedSpan](), list[SpanEntry]()
        for entry in entries:
            above, seen = entry, {entry.span_id}
            while (name := own[id(above)]) is None and above.parent_id in by_span and above.parent_id not in seen:
                above = by_span[above.parent_id]
                seen.add(above.span_id)
            one = traces.get(entry.trace_id, set())
            name = name or (next(iter(one)) if len(one) == 1 else None)
            placed += [] if name is None else [PlacedSpan(entry, name)]
            waiting += [entry] if name is None else []
        return placed, waiting

    def _named(self, entry: SpanEntry, calls: Mapping[str, Name]) -> Name | None:
        """The attempt that a span's own attributes name. `calls`: those that were found, by id."""
        for value in _said(entry, semconv.RESPONSE_ID, semconv.REQUEST_ID):
            if (name := calls.get(value)) is not None:
                return name
        for value in _said(entry, semconv.SESSION_ID):
            with self._tape.view() as view:
                return session_home(view, f"anthropic/{value}")
        return None

    async def wait(self, entries: Sequence[SpanEntry]) -> None:
        """Let spans wait for their calls; raises `TapeError`."""
        now = self._dispatcher.now_ns()
        await self._dispatcher.run(lambda tape: _keep(tape, entries, now))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._retry())

    async def _retry(self) -> None:
        pause = FIRST_S
        try:
            while True:
                await asyncio.sleep(pause)
                pause = min(LAST_S, 2 * pause)
                if not await self.retry():
                    return
        except TapeError:
            pass  # the recorder has reported it
        except Exception:
            _log.exception("spans of a provider could not be joined with their calls")

    async def retry(self) -> int:
        """Place waiting spans whose calls have come since; returns the number of those that still wait."""
        waiting = self._in_turn(await asyncio.to_thread(self._waiting))
        placed, _ = await self.place([entry for _, entry in waiting])
        placed_ids, now = {id(one.entry) for one in placed}, self._dispatcher.now_ns()
        late = [key for key, entry in waiting if _is_late(key, now) and id(entry) not in placed_ids]
        done = [key for key, entry in waiting if id(entry) in placed_ids]
        if done or late:
            await self._dispatcher.run(lambda tape: _finish(tape, placed, [*done, *late], now))
        if late:
            self._received["unjoined",] += len(late)
        return len(waiting) - len(done) - len(late)

    def _in_turn(self, waiting: list[tuple[bytes, SpanEntry]]) -> list[tuple[bytes, SpanEntry]]:
        """New spans first, whose calls end soon, then the others in turn: many are of calls that never pass here."""
        new = [one for one in waiting if one[0] > self._newest]
        old = waiting[: len(waiting) - len(new)]
        self._newest = waiting[-1][0] if waiting else b""
        at = self._turn % len(old) if old else 0
        self._turn = at + LOOKUPS
        return [*new, *old[at:], *old[:at]]

    def _waiting(self) -> list[tuple[bytes, SpanEntry]]:
        with self._tape.view() as view:
            return [(key, SpanEntry("", "", **msgspec.json.decode(it))) for key, it in view.scan(DATABASE, b"w")]

    async def stop(self) -> None:
        """Stop looking; what waits is looked at when the next spans come."""
        for task in (self._task, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _said(entry: SpanEntry, *names: str) -> list[str]:
    """The texts of these attributes, as far as it has them."""
    said = entry.attributes or {}
    return [value for name in names if isinstance(value := said.get(name), str) and value]


def _spans_of(otlp: bytes) -> tuple[list[SpanEntry], int]:
    """(the spans in a request of OTLP, the number of those that cannot be read)."""
    found, wrong, source = list[SpanEntry](), 0, None
    try:
        for item in items(TRACES, tree_of(TRACES, JSON, otlp)):
            try:
                if item.message is None:
                    source = None
                elif isinstance(item.message, ItemRejectedError):
                    raise item.message
                else:
                    source = source or source_of(item)
                    found.append(entry_of(item.message, source.resource, source.instrumentation))
            except ItemRejectedError:
                wrong += 1
    except OtlpRequestError as error:
        _log.warning("a trace of a hosted session cannot be read: %s", error)
        wrong += 1
    return found, wrong


def _keep(tape: Transaction, entries: Sequence[SpanEntry], now: int) -> None:
    """Keep spans that wait. An exporter that heard no answer sends them again: they wait once."""
    there = {key[9:]: key for key, _ in tape.scan(DATABASE, b"w")}
    for entry in map(SpanOperations(tape).masked, entries):
        digest = blake2b(f"{entry.trace_id}{entry.span_id}".encode(), digest_size=16).digest()
        said = asdict(entry)
        record: dict[str, Any] = {name: said[name] for name in _KEPT} | {"method": "", "attributes": entry.attributes}
        key = there.setdefault(digest, b"w" + keys.number(now) + digest)
        tape.put(DATABASE, key, msgspec.json.encode(record))
    for key in sorted(there.values())[: max(0, len(there) - MOST_WAITING)]:
        tape.delete(DATABASE, key)


def _finish(tape: Transaction, placed: Sequence[PlacedSpan], done: Iterable[bytes], now: int) -> None:
    """Write spans whose attempts are known, and delete those that wait no more. Another process may have done so."""
    gone = [key for key in done if tape.get(DATABASE, key) is not None]
    if gone:
        for one in placed:
            one.entry.rollout, one.entry.attempt = one.name
        SpanOperations(tape).add([one.entry for one in placed], now)
    for key in gone:
        tape.delete(DATABASE, key)


def _is_late(key: bytes, now: int) -> bool:
    return now - keys.to_number(key[1:9]) > WAITS_NS
