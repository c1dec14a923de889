"""What a writer remembers of a tape, held against what the tape has."""

from __future__ import annotations

from penstock.gateway.releases.operations import LiveReleases
from penstock.gateway.tape.store import keys, records
from penstock.gateway.tape.store.cache import CachedAttempt, WriterCache
from penstock.gateway.tape.store.codec import DeltaBase
from penstock.gateway.tape.store.tables import TapeTables
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction, Writer
from penstock.gateway.tape.store.view import TapeView, last_block
from penstock.gateway.work.queue import MemoryQueue

_NUMBERS = ("_styles", "_last_style", "_body", "_untold")
_SPANS, _SEEN = map(records.ATTEMPT.index, ("spans", "last_seen_ns"))


def compare(writer: Writer) -> None:
    """Has the writer catch up, and looks at everything that it remembers; nothing is written."""
    writer.write([QueuedOperation(lambda transaction: _compare(writer, transaction))])


def _compare(writer: Writer, transaction: Transaction) -> None:
    batch, tables = transaction._batch, transaction._tables
    view, fresh = batch.view, TapeTables(tables.dbs, 1 << 20, None, "fresh")
    fresh.recall(view)
    assert batch.cursor == writer._cursor == view.last("log")
    for name in _NUMBERS:
        assert getattr(tables, name) == getattr(fresh, name), name
    _compare_memory(view, tables._memory)
    for name in list(tables._memory._live):
        live = tables._find(batch, name)  # as every use of it does
        if live is not None:
            _compare_attempt(view, live)
    for live in tables._memory._live.values():
        if live.outdated and live.base is not None:
            _compare_base(view, live.base)
            found = view.attempt_values(*live.name)
            assert found is not None, live.name
            spans = (view.span(*live.name, sequence) for sequence in range(found[1][_SPANS], 0, -1))
            assert any(span is not None and span.body == live.base.number for span in spans), live.name
    _compare_queue(view, transaction.follower(MemoryQueue))
    releases = LiveReleases()
    releases.recall(view)
    assert vars(transaction.follower(LiveReleases)) == vars(releases)


def _compare_memory(view: TapeView, memory: WriterCache) -> None:
    for name, known in memory._rollouts.items():
        assert view.numbered_rollout(name) == (known.number, known.rollout), name
        assert [attempt.id for attempt in view.attempts(name)] == known.attempts, name
    for name, _ in memory._live:
        assert view.rollout(name) is not None, name
    for name, base in memory._keyframes.values():
        assert view.rollout(name) is not None, name
        _compare_base(view, base)
    for shared in memory._shared.values():
        _compare_base(view, shared.base)
    assert memory._size == sum(2048 + (0 if live.base is None else live.base.size) for live in memory._live.values())


def _compare_attempt(view: TapeView, live: CachedAttempt) -> None:
    found = view.attempt_values(*live.name)
    assert found is not None, live.name
    origins, values, cursors = found
    # While a call of it runs, that it is heard of is not written at every look (`DeadlineOperations`).
    seen = max(values[_SEEN], live.values[_SEEN])
    assert live.values == [*values[:_SEEN], seen, *values[_SEEN + 1 :]], live.name
    assert (live.origins, live.cursors) == (origins, cursors), live.name
    assert live.block == last_block(values[_SPANS])
    assert not live.dirty
    if live.base is not None:
        _compare_base(view, live.base)
    if live.base is not None and live.newest:
        span = view.span(*live.name, live.newest)
        assert span is not None
        assert span.body is not None
        assert view.body(span.body)[0].request == live.base.request


def _compare_base(view: TapeView, base: DeltaBase) -> None:
    """What is stored against it is read with what the tape has of it."""
    found = view.body(base.number)[1]
    assert (found.request, found.depth, found.rest) == (base.request, base.depth, base.rest)


def _compare_queue(view: TapeView, waiting: MemoryQueue) -> None:
    fresh = MemoryQueue()
    fresh.recall(view)
    assert (waiting.state, waiting._names, waiting.counts()) == (fresh.state, fresh._names, fresh.counts())
    while (found := fresh.next(range(4))) is not None:
        assert waiting.next(range(4)) == found
        fresh.remove(found[0])
        waiting.remove(found[0])
    for key, value in view.scan("queue"):
        waiting.add(key, value[: value.index(keys.rollout_key("")[-1])].decode("ascii"))
