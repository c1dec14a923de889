"""The driver, and those who look after servers, on a real tape without a gateway: what must hold between two looks, and
for those who wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeVar, cast

import aiohttp
import pytest
from fakes.engine import UNLOAD, engine
from fakes.experiment import policy
from fakes.process import PATIENCE
from fakes.releasing import Bench, bench, counting
from fakes.some import some
from fakes.transactions import begun, done

from penstock.gateway.app import open_store
from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import AssignmentEvidence, Release
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.releases.canary.outcomes import Requester
from penstock.gateway.releases.canary.verification import verify
from penstock.gateway.releases.driver import Driver, DriverCallbacks, JobProgress, JobReport, StageJobs
from penstock.gateway.releases.operations import PinRequest, ReleaseOperations
from penstock.gateway.releases.reader import QUIET_NS, ReleaseReader
from penstock.gateway.releases.transitions import entry
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.traffic.trials.adapter_keeper import AdapterKeeper
from penstock.gateway.work.operations import SpanOperations

T = TypeVar("T")
ANN = ActionRequest(who="ann")
MINUTE = 60 * 10**9
FIRST = {"stage": "canary", "split": 0.05}


async def never(release: Release, progress: JobProgress) -> JobReport:
    """A job that is not over."""
    await asyncio.Event().wait()
    raise AssertionError


class Submitting:
    """A recorder that tells when somebody has handed it an operation; nothing is written before `go`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._go = threading.Event()
        self.handed = asyncio.Event()
        self._held = recorder.submit(lambda transaction: self._go.wait(PATIENCE))

    def submit(self, operation: Callable[[Transaction], T]) -> asyncio.Future[T]:
        self.handed.set()
        return self._recorder.submit(operation)

    def go(self) -> None:
        self._go.set()


def driver(made: Bench, recorder: Submitting | None = None) -> Driver:
    context = made.context
    feed = ChangeFeed(context.tape.cursor())
    jobs = StageJobs(never, never, never)
    callbacks = DriverCallbacks(context.pins.reload, _nobody_else, lambda: None)
    given = cast(Recorder, recorder or context.recorder)
    return Driver(context.tape, given, context.now_ns, feed, jobs, [], callbacks)


async def _nobody_else() -> None:
    """There is no other worker."""


async def test_a_person_decides_about_the_release_as_it_is(tmp_path: Path) -> None:
    """What has become of it since somebody looked is what is held, and what is resumed."""
    async with counting() as provider, bench(tmp_path, provider) as made:
        release = await made.release(checked="required")
        recorder = Submitting(made.context.recorder)
        drives = driver(made, recorder)
        moved = made.context.recorder.submit(
            lambda transaction: ReleaseOperations(transaction).change(
                release.id, None, {"stage": "checked"}, entry("check", "gateway", ""), 5
            )
        )
        holding = asyncio.ensure_future(drives.decide(release.id, "hold", ANN))
        await recorder.handed.wait()
        assert not moved.done()
        recorder.go()
        held = await holding
        assert (await moved).stage == "checked"
        assert (held.stage, held.held_in) == ("held", "checked")
        resumed = await drives.decide(release.id, "resume", ANN)
        assert resumed.stage == "checked"
        await drives.stop()


async def test_what_was_counted_in_the_meantime_is_in_the_evidence(tmp_path: Path) -> None:
    async with counting() as provider, bench(tmp_path, provider) as made:
        release = await made.release()

        def begin(transaction: Transaction) -> Release:
            for stage in ("checked", "replayed", "shadowed"):
                ReleaseOperations(transaction).change(release.id, None, {"stage": stage}, entry("x", "gateway", ""), 3)
            moved = ReleaseOperations(transaction).change(release.id, None, FIRST, entry("canary", "gateway", ""), 4)
            for number in range(8):
                ReleaseOperations(transaction).pin(
                    PinRequest(f"r{number}", Requester("", "m", "online", {}), ["travel"]), 5
                )
            return moved

        moved = await made.do(begin)
        seen = [
            AssignmentEvidence(number=at, rollout=f"r{at - 1}", seen_ns=6, reward=0.5, guards={}) for at in range(1, 9)
        ]
        await made.do(
            lambda transaction: ReleaseOperations(transaction).count(release.id, moved.revision, (), seen[:3])
        )
        recorder = Submitting(made.context.recorder)
        drives = driver(made, recorder)
        more = made.context.recorder.submit(
            lambda transaction: ReleaseOperations(transaction).count(release.id, moved.revision, (), seen[3:])
        )
        aborting = asyncio.ensure_future(drives.decide(release.id, "abort", ANN))
        await recorder.handed.wait()
        assert not more.done()
        recorder.go()
        ended = await aborting
        tape = made.context.tape
        last = ReleaseReader(tape).audit(release.id)[-1]
        assert (last.action, last.assignment, last.evidence["seen"], last.evidence["split"]) == ("abort", 8, 8, 0.05)
        assert (
            list(verify(ended, *ReleaseReader(tape).assignments(release.id), ReleaseReader(tape).audit(release.id)))
            == []
        )
        await drives.stop()


async def test_two_people_who_decide_at_once_are_both_heard(tmp_path: Path) -> None:
    async with counting() as provider, bench(tmp_path, provider) as made:
        release = await made.release()
        drives = driver(made)
        hold, abort = (drives.decide(release.id, action, ANN) for action in ("hold", "abort"))
        held, aborted = await asyncio.gather(hold, abort, return_exceptions=True)
        assert not isinstance(aborted, BaseException)
        found = some(ReleaseReader(made.context.tape).release(release.id))
        assert found.stage == "aborted"
        told = [one.action for one in ReleaseReader(made.context.tape).audit(release.id)]
        if isinstance(held, OperationRefusedError):
            # The other was quicker: what has ended cannot be held, and who asked is told.
            assert told == ["start", "abort"]
        else:
            assert told == ["start", "hold", "abort"]
        await drives.stop()


# --- who still needs an adapter ---


def tried(store: Store, candidate: str, rollout: str, heard: int) -> None:
    """A rollout is pinned to a candidate whose release has ended, and was last heard of then."""
    new = Release(
        id="new", resource="policy", kind="model", stable="v1", candidate=candidate, policy=policy(), salt="s"
    )  # fmt: skip

    def operation(transaction: Transaction) -> None:
        release = begun(transaction, new, 1.0)
        ReleaseOperations(transaction).pin(PinRequest(rollout, Requester("", "policy", "online", {}), ["policy"]), 4)
        ReleaseOperations(transaction).change(
            release.id, None, {"stage": "aborted", "split": 0.0}, entry("abort", "ann", ""), 5
        )
        SpanOperations(transaction).add([SpanEntry(rollout, "a1", start_ns=heard, end_ns=heard, status="ok")], heard)

    done(store, operation)
    assert [pin.version for pin in ReleaseReader(store).pins(rollout)] == [candidate]


async def test_a_rollout_that_never_ends_needs_its_adapter_for_an_hour_after_its_last_call(tmp_path: Path) -> None:
    now = 10 * QUIET_NS
    with open_store(tmp_path) as store:
        for number in (1, 2, 3):
            content = {"upstream": "u", "base": "base", "adapter": f"/adapters/{number}"}
            new = NewVersion(kind="model", content=content)
            done(store, lambda transaction, new=new: ReleaseOperations(transaction).add_version("policy", new, 1))
        tried(store, "v2", "young", now - QUIET_NS + MINUTE)
        tried(store, "v3", "old", now - QUIET_NS - MINUTE)
        async with engine() as vllm, aiohttp.ClientSession() as session:
            vllm.adapters = {f"policy@v{number}": f"/adapters/{number}" for number in (1, 2, 3)}
            upstream = UpstreamSettings(name="u", base_url=vllm.openai_url)
            adapter_keeper = AdapterKeeper(store, {"u": upstream}, lambda: session, lambda: now)
            await adapter_keeper.settle()
            assert [body["lora_name"] for path, body in vllm.asked if path == UNLOAD] == ["policy@v3"]
            assert vllm.adapters.keys() == {"policy@v1", "policy@v2"}


def no_session() -> aiohttp.ClientSession:
    raise AssertionError("no server is asked")


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncGenerator[AdapterKeeper]:
    with open_store(tmp_path) as store:
        made = AdapterKeeper(store, {}, no_session, lambda: 1)
        await made.start()
        yield made
        await made.stop()


async def test_who_waits_may_leave(keeper: AdapterKeeper) -> None:
    """A worker that has asked dies: what it waits for is cancelled."""
    assert keeper.repair().cancel()
    async with asyncio.timeout(PATIENCE):
        await keeper.repair()
        await keeper.repair()


async def test_nobody_waits_when_it_has_stopped(keeper: AdapterKeeper) -> None:
    """Calls that are served to their end by a process that has handed over."""
    queued = keeper.repair()
    await keeper.stop()
    assert queued.done()
    assert keeper.repair().done()


async def test_who_waits_while_servers_are_looked_at_goes_on_too(
    keeper: AdapterKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = asyncio.Event()

    async def settle(lost: bool) -> None:
        looking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(keeper, "settle", settle)
    waiting = keeper.repair()
    async with asyncio.timeout(PATIENCE):
        await looking.wait()
    await keeper.stop()
    assert waiting.done()


async def test_a_fault_does_not_end_it(
    keeper: AdapterKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def settle(lost: bool) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "penstock.releases"):
        patch.setattr(keeper, "settle", settle)
        async with asyncio.timeout(PATIENCE):
            await keeper.repair()
    assert "adapters are not looked after for now" in caplog.text
    async with asyncio.timeout(PATIENCE):
        await keeper.repair()
