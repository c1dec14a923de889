"""Rollouts that nobody has queued: they end when quiet, also after a restart or a kill, and come back."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import StartGateway
from fakes.desk import PATIENCE, SECOND, Call, Clock, Life, living
from fakes.entries import finish, running
from fakes.local import locally
from fakes.many_turns import hello
from fakes.process import upstreams
from fakes.provider import Provider

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus, Judgement, RolloutStatus
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.work import dispatcher
from penstock.gateway.work.operations import DeadlineOperations
from penstock.gateway.work.queue import DeadlineCheck, QueueReader, put


@asynccontextmanager
async def still(path: Path) -> AsyncGenerator[Life]:
    """A desk whose clock goes on where the test says so, and whose attempts end when they were quiet for 0.3 s."""
    async with living(path, Clock(stands=True), quiet_s=0.3) as made:
        made.sweep_no_more()
        yield made


async def quiet(life: Life) -> None:
    """Nothing is heard for so long."""
    life.sweep()
    await life.later(0.3)


# -- the desk --


async def test_who_nobody_has_claimed_ends_when_it_is_quiet_and_comes_alive_with_the_next_call(tmp_path: Path) -> None:
    async with still(tmp_path) as life:
        await life.agent_calls("by-hand/0")
        assert life.status("by-hand") == RolloutStatus.RUNNING
        await quiet(life)
        assert life.status("by-hand") == RolloutStatus.ENDED
        ended = life.attempt("by-hand/0")
        assert (ended.status, ended.outcome, ended.reward) == (AttemptStatus.ENDED, None, None)
        assert ended.ended_ns == ended.last_seen_ns
        told = await life.dispatcher.reward("by-hand", "0", Judgement(value=1.0))
        assert told.late
        assert life.status("by-hand") == RolloutStatus.ENDED
        before = life.store.cursor()
        await life.agent_calls("by-hand/0")
        assert life.attempt("by-hand/0").ended_ns is None
        changes, _ = life.store.changes(before, 100)
        assert [change.kind for change in changes] == ["attempt", "rollout", "span"]
        await quiet(life)
        assert life.status("by-hand") == RolloutStatus.ENDED


async def test_a_rollout_is_quiet_when_all_its_attempts_are(tmp_path: Path) -> None:
    async with still(tmp_path) as life:
        await life.agent_calls("by-hand/0")
        life.sweep()
        while life.attempt("by-hand/0").status == AttemptStatus.RUNNING:
            await life.agent_calls("by-hand/1")
            life.sweep()
            await life.later(0.2)
            assert life.status("by-hand") == RolloutStatus.RUNNING
        await life.later(0.3)
        assert life.status("by-hand") == RolloutStatus.ENDED
        await life.agent_calls("by-hand/2")
        assert life.status("by-hand") == RolloutStatus.RUNNING


@pytest.mark.parametrize(
    ("calls", "end"),
    [
        ("error@1", "failed"),
        ("interrupted@1", "failed"),
        ("cancelled@1", "ended"),
        ("error@1 ok@2", "ended"),
        ("ok@1 error@2-3", "failed"),
        ("error@2 ok@1-5", "failed"),  # the one that began last ended first
        ("ok@1-5 tool:error@2", "failed"),
        ("error@1 mcp:ok@2 reward:ok@3", "failed"),
        ("ok@1 opaque:error@2", "ended"),
        ("error@1" + " event:ok@2" * 40, "failed"),
        ("", "ended"),
    ],
)
async def test_who_is_quiet_after_a_call_that_failed_has_failed(tmp_path: Path, calls: str, end: str) -> None:
    async with still(tmp_path) as life:
        for one in [*calls.split(), "otel:ok@0"]:
            what, _, when = one.rpartition("@")
            kind, _, status = what.rpartition(":")
            begin, _, until = when.partition("-")
            made = Call("by-hand", "0", life.clock() - 10)
            made.made.status, made.made.kind = status, "llm" if kind in ("", "opaque") else kind
            made.made.dialect = kind if kind == "opaque" else "chat"
            made.made.start_ns += int(begin)
            made.made.end_ns = (made.made.end_ns or 0) + int(until or begin)
            life.recorder.put(made)
        assert await life.recorder.flush()
        await quiet(life)
        assert (life.status("by-hand"), life.attempt("by-hand/0").status) == (end, end)
        assert life.attempt("by-hand/0").outcome is None
        await life.agent_calls("by-hand/0")
        assert (life.status("by-hand"), life.attempt("by-hand/0").status) == ("running", "running")


async def test_what_an_earlier_version_called_succeeded_stays_so_until_the_next_call(tmp_path: Path) -> None:
    async with still(tmp_path) as life:
        await life.agent_calls("by-hand/0")
        await quiet(life)

        def as_before(transaction: Transaction) -> None:
            known = transaction.rollout("by-hand")
            assert known is not None
            known.rollout.status = RolloutStatus.SUCCEEDED
            transaction.put_rollout(known.rollout)
            live = transaction.attempt(SpanEntry("by-hand", "0"))
            put(live, status=AttemptStatus.SUCCEEDED)
            transaction.touch(live)

        await life.recorder.submit(as_before)
        assert (life.status("by-hand"), life.attempt("by-hand/0").status) == ("succeeded", "succeeded")
        await life.agent_calls("by-hand/0")
        assert (life.status("by-hand"), life.attempt("by-hand/0").status) == ("running", "running")


async def test_an_end_that_somebody_has_told_stays(tmp_path: Path) -> None:
    async with still(tmp_path) as life:
        await life.agent_calls("by-hand/0")
        await quiet(life)
        assert await life.finish("by-hand/0", "failed", None, [Judgement(value=0.5)]) == RolloutStatus.FAILED
        await life.agent_calls("by-hand/0")
        assert (life.status("by-hand"), life.attempt("by-hand/0").status) == ("failed", "failed")
        with pytest.raises(OperationRefusedError, match="was not claimed, so it cannot be handed back"):
            await life.finish("by-hand/0", "environment", None)


async def test_who_waits_for_an_answer_is_not_quiet(tmp_path: Path) -> None:
    async with still(tmp_path) as life:
        waiting = Call("by-hand", "0", life.clock())
        waiting.made = running("by-hand", "0")
        waiting.made.start_ns = life.clock()
        life.recorder.announce(waiting)
        assert await life.recorder.flush()
        for _ in range(3):
            await quiet(life)
            assert life.status("by-hand") == RolloutStatus.RUNNING
        finish(waiting.made)
        waiting.made.end_ns = life.clock()
        life.recorder.put(waiting)
        assert await life.recorder.flush()
        await quiet(life)
        assert life.status("by-hand") == RolloutStatus.ENDED


async def test_quiet_attempts_end_after_a_restart_too(tmp_path: Path) -> None:
    clock = Clock()
    async with living(tmp_path, clock) as life:
        await life.agent_calls("by-hand/0")
        await life.agent_calls("again/0")
    clock.ahead += 3600 * SECOND
    async with living(tmp_path, clock, quiet_s=2) as life:
        await life.agent_calls("again/0")
        await life.when(lambda: life.status("by-hand") == RolloutStatus.ENDED)
        assert life.attempt("by-hand/0").ended_ns == life.attempt("by-hand/0").last_seen_ns
        await life.when(lambda: life.status("again") == RolloutStatus.ENDED)


async def test_who_was_heard_of_lately_is_looked_at_without_being_remembered(tmp_path: Path) -> None:
    clock = Clock()
    async with living(tmp_path, clock) as life:
        await life.agent_calls("by-hand/0")
    async with living(tmp_path, clock) as life:
        memory = life.store._writer._tables._memory
        seen = life.attempt("by-hand/0").last_seen_ns
        looked = await life.recorder.submit(
            lambda transaction: DeadlineOperations(transaction).expire([("by-hand", "0"), ("nobody", "0")], seen, 60)
        )
        assert looked == [
            DeadlineCheck("by-hand", "0", seen + 60 * SECOND, unclaimed=True),
            DeadlineCheck("nobody", "0", None),
        ]
        assert memory.find(("by-hand", "0")) is None


@pytest.mark.parametrize(("turns", "at_once"), [(100, 7), (2, 25)])
async def test_many_end_some_at_a_time_and_more_where_very_many_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, at_once: int
) -> None:
    """Else more would fall due than are looked at, and what waits would grow without end."""
    monkeypatch.setattr(dispatcher, "AT_ONCE", 7)
    monkeypatch.setattr(dispatcher, "TURNS", turns)
    clock = Clock(stands=True)
    async with living(tmp_path, clock, quiet_s=30) as life:
        seen: list[int] = []
        submit = life.recorder.submit

        def counting(do: Callable[[Transaction], Any]) -> asyncio.Future[Any]:
            done = submit(do)
            done.add_done_callback(lambda it: seen.append(len(it.result()) if isinstance(it.result(), list) else 0))
            return done

        for number in range(50):
            life.recorder.put(Call(f"by-hand-{number}", "0", life.clock()))
        assert await life.recorder.flush()
        life.dispatcher.deadlines._sweep()
        clock.ahead += 3600 * SECOND
        monkeypatch.setattr(life.recorder, "submit", counting)
        life.dispatcher.deadlines._sweep()
        # They are on the tape a moment before they are counted.
        await life.when(lambda: life.metrics.attempts[("ended",)] == 50)
        assert max(seen) == at_once
        assert list(QueueReader(life.store).unclaimed(50)) == []


async def test_those_that_are_not_due_for_long_cost_next_to_no_memory(tmp_path: Path) -> None:
    async with living(tmp_path) as life:
        life.waiting_begin(1)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        life.waiting_begin(20_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 20_000 * 64, "each was a tuple in a dict and in a heap, 450 bytes"


async def test_after_a_restart_some_are_looked_at_and_cost_next_to_no_memory_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were looked at when workers had had time to come back, and kept one by one from then on."""
    monkeypatch.setattr(dispatcher, "PIECE", 20)
    clock = Clock(stands=True)
    async with living(tmp_path, clock) as life:
        for number in range(50):
            life.recorder.put(Call(f"by-hand-{number}", "0", life.clock()))
        assert await life.recorder.flush()
    async with living(tmp_path, clock) as life:
        there = life.dispatcher.deadlines
        clock.ahead += 6 * SECOND
        for watched in (20, 20, 10, 0):
            # Those that were looked at are not watched any more, and the next ones are.
            clock.ahead += 5 * SECOND
            there._sweep()
            there._set_timer()
            await life.when(lambda watched=watched: len(there._watched) == watched)
        assert len(next(iter(QueueReader(life.store).unclaimed(50)))) == 50
        clock.ahead += 1800 * SECOND
        there._sweep()
        await life.when(lambda: life.metrics.attempts[("ended",)] == 50)
        assert list(QueueReader(life.store).unclaimed(50)) == []


# -- a gateway --


async def named(client: Client, filter: str) -> set[str]:
    """The rollouts that a filter finds."""
    return {rollout.id async for rollout in client.rollouts(filter)}


async def when(client: Client, rollout: str, status: RolloutStatus, since: int = 0) -> None:
    """Comes back when the feed has told that it stands there."""
    try:
        async with asyncio.timeout(PATIENCE):
            async for change in client.changes(since):
                if change.rollout is not None and change.rollout.id == rollout and change.rollout.status == status:
                    return
    except TimeoutError:
        raise AssertionError(f"{rollout} is not {status}: {await client.rollout(rollout)}") from None


def config(provider: Provider, quiet_s: float) -> str:
    return f"quiet_seconds = {quiet_s}\n" + upstreams(openai=provider.openai_url)


async def test_they_end_and_come_back_and_are_nobodys(tmp_path: Path, provider: Provider) -> None:
    async with locally(tmp_path, config(provider, 3.0)) as gateway, Client(gateway.url) as client:
        _ = await client.enqueue([RolloutSpec(id="queued")])
        _ = await client.claim(ClaimRequest(worker="w1"))
        await hello(gateway, "by-hand")
        await when(client, "by-hand", RolloutStatus.RUNNING)
        assert await named(client, "status:claimed") == {"queued"}
        assert await named(client, "-status:claimed origin:header") == {"by-hand"}
        assert await named(client, "status:running,claimed") >= {"queued"}
        await when(client, "by-hand", RolloutStatus.ENDED)
        assert await named(client, "status:ended,over") == {"by-hand"}
        told = await client.rollout("by-hand")
        assert (told.attempts[0].outcome, told.reward, told.totals.calls) == (None, None, 1)
        cursor = (await client.stats(spans=0)).cursor
        await hello(gateway, "by-hand")
        await when(client, "by-hand", RolloutStatus.RUNNING, cursor)
        await when(client, "by-hand", RolloutStatus.ENDED, cursor)
        assert (await client.rollout("by-hand")).totals.calls == 2


async def test_they_end_after_a_kill(start_gateway: StartGateway, provider: Provider) -> None:
    gateway = await start_gateway(config(provider, 6.0))
    await hello(gateway, "by-hand")
    async with Client(gateway.url) as client:
        await when(client, "by-hand", RolloutStatus.RUNNING)
        assert await named(client, "status:running") == {"by-hand"}
    _ = await gateway.kill()
    await gateway.start()
    async with Client(gateway.url) as client:
        await when(client, "by-hand", RolloutStatus.ENDED)
