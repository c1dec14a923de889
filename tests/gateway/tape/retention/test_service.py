"""What a gateway does in the background about rollouts that must go, on a tape of its own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import call
from fakes.some import some
from fakes.waiting import until

from penstock.gateway.app import open_store
from penstock.gateway.config import TapeSettings
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import RolloutStatus
from penstock.gateway.model.state import RetentionRule
from penstock.gateway.tape import retention as tape_retention
from penstock.gateway.tape.retention import RetentionService
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.cache import WriterCache
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction

ANN = ActionRequest(who="ann")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as made:
        yield made


class Call:
    """A call that has ended."""

    weight = 100

    def __init__(self, entry: SpanEntry) -> None:
        self._entry = entry

    def entry(self, final: bool) -> SpanEntry:
        return self._entry


@asynccontextmanager
async def retaining(
    store: Store, rules: Sequence[RetentionRule] = (), busy: Collection[str] = (), keep_bytes: int | None = None
) -> AsyncGenerator[tuple[RetentionService, Recorder]]:
    """What a gateway does with a tape, while calls of these rollouts are being served."""
    metrics = Metrics()
    recorder = Recorder(store, TapeSettings(), metrics, lambda cursor, records: None)
    recorder.start()

    async def busy_now() -> Collection[str]:
        return busy

    retention = RetentionService(
        rules, keep_bytes, store, recorder, metrics, time.time_ns, busy_now, list[str]().append
    )
    await retention.start()
    try:
        yield retention, recorder
    finally:
        await retention.stop()
        await recorder.close()


def ended(store: Store, entry: SpanEntry) -> None:
    """A rollout of one call, which has ended."""

    def end(tape: Transaction) -> None:
        known = some(tape.rollout(entry.rollout))
        known.rollout.status = RolloutStatus.SUCCEEDED
        tape.put_rollout(known.rollout)

    store.write([entry, QueuedOperation(end)])


async def test_a_rollout_whose_bodies_are_damaged_stays_alone(store: Store) -> None:
    rng = random.Random(1)
    for at in range(6):
        ended(store, call(f"r{at}", "a1", rng.randbytes(3000)))
    store.write([QueuedOperation(lambda tape: tape.delete("bodies", keys.number(3)))])
    said = list[bool]()
    async with retaining(store) as (retention, recorder):
        for at in (1, 2, 4):
            await retention.forget(f"r{at}", ANN)
            recorder.put(Call(call(f"later{at}")), said.append)
        await until(lambda: retention.status(0).wiping == 1 and not retention.status(0).overwriting)
        assert "r2: body 3 is missing" in retention.status(0).stuck
        assert recorder.failing is None
    assert said == [True] * 3
    for at in (1, 2, 4):
        span = some(store.span(f"later{at}", "a1", 1))
        assert store.exchange(span) is not None
    with store.view() as view:
        left = {key for key, record in view.scan("forgotten") if b'"wiped":true' not in record}
    assert left == {b"r2\0"}


@pytest.mark.parametrize("database", ["attempts", "rollouts"])
async def test_a_rule_goes_on_behind_a_rollout_that_is_damaged(store: Store, database: str) -> None:
    for at in range(4):
        ended(store, call(f"r{at}"))
    with store.view() as view:
        origins = some(view.origins("r1"))
        prefix = keys.rollout_key("r1") if database == "rollouts" else keys.number(origins.number)
        (key,) = [key for key, _ in view.scan(database, prefix)]
    store.write([QueuedOperation(lambda tape: tape.put(database, key, b"\xc1"))])
    async with retaining(store, [RetentionRule(filter="", after="1d")]) as (retention, _):
        await until(lambda: retention.status(0).retired == 3)
        assert ("r1: " in retention.status(0).stuck) == (database == "attempts")


async def test_where_the_tape_is_full_what_is_damaged_stays_alone(store: Store) -> None:
    for at in range(4):
        ended(store, call(f"r{at}"))
    store.write([QueuedOperation(lambda tape: tape.put("pins", keys.rollout_key("r1"), b"damaged"))])
    async with retaining(store, keep_bytes=1) as (retention, _):
        await until(lambda: retention.status(0).retired == 3)
        assert "r1: " in retention.status(0).stuck


async def test_a_rule_leaves_a_rollout_alone_while_a_call_of_it_is_served(store: Store) -> None:
    for at in range(4):
        ended(store, call(f"r{at}"))
    async with retaining(store, [RetentionRule(filter="", after="1d")], busy={"r1", "r3"}) as (retention, _):
        await until(lambda: retention.status(0).retired == 2)
    assert [rollout.id for _, rollout in store.rollouts()] == ["r3", "r1"]


async def test_a_rule_goes_on_behind_a_rollout_of_a_clock_that_was_wrong(store: Store) -> None:
    odd = call("odd")
    odd.start_ns, odd.end_ns = 2**62, 2**62 + 1
    for entry in (call("r1"), odd, call("r2")):
        ended(store, entry)
    async with retaining(store, [RetentionRule(filter="", after="1d")]) as (retention, _):
        await until(lambda: retention.status(0).retired == 2)
    assert [rollout.id for _, rollout in store.rollouts()] == ["odd"]


async def test_the_more_have_to_go_the_later_is_not_the_next_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What deleting took counted as looking: after ten minutes of it nothing went for more than three hours."""
    monkeypatch.setattr(tape_retention, "EVERY_S", 0.05)
    ended(store, call("r1"))
    async with retaining(store, [RetentionRule(filter="", after="1d")]) as (retention, recorder):
        submit = recorder.submit

        def slowly(do: Callable[[Transaction], Any]) -> asyncio.Future[Any]:
            async def done() -> Any:
                await asyncio.sleep(0.1)
                return await submit(do)

            return asyncio.ensure_future(done())

        monkeypatch.setattr(recorder, "submit", slowly)
        ended_at = time.monotonic()

        async def gone(count: int) -> bool:
            return retention.status(0).retired == count

        await until(lambda: gone(1))
        ended(store, call("r2"))
        await until(lambda: gone(2))
        assert time.monotonic() - ended_at < 10, "not twenty times what it took to delete the first one"


async def test_who_forgets_one_does_not_look_through_all_that_are_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among some thousand that took five milliseconds for each, in which no call could be written."""
    for at in range(3):
        ended(store, call(f"r{at}"))
    monkeypatch.setattr(WriterCache, "attempts_of", None)
    async with retaining(store) as (retention, _):
        await retention.forget("r1", ANN)
    memory = store._writer._tables._memory
    assert [memory.find((f"r{at}", "a1")) is not None for at in range(3)] == [True, False, True]
