"""A release or a resource whose record is damaged: it is left alone, and all else goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest
from fakes.experiment import Traffic, policy, prompt
from fakes.local import Local
from fakes.process import Gateway
from fakes.tape import Tape
from fakes.transactions import begun, done
from fakes.waiting import until

from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import AssignmentEvidence, Release
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.outcomes import Requester
from penstock.gateway.releases.canary_counter import OutcomeCounter
from penstock.gateway.releases.operations import PinRequest, ReleaseOperations
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.operations import SpanOperations

S = 10**9
T0 = 1_000 * S


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "counted") as made:
        yield made


async def harm(gateway: Gateway, database: bytes, key: bytes) -> None:
    """Starts it again on a tape of which this record is damaged."""
    _ = await gateway.terminate()
    with lmdb.open(str(gateway.data / "tape"), max_dbs=64) as tape, tape.begin(write=True) as txn:
        assert txn.replace(key, b"\xff\xff", db=tape.open_db(database, txn)) is not None
    await gateway.start(gateway.port)


async def test_a_damaged_release_keeps_no_gateway_from_starting(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape
) -> None:
    """What it has given to rollouts stays theirs, others get the stable version, another release can be made."""
    release = await traffic.start("travel", "v2", policy(0.999))
    assert await traffic.rollout("r1", lambda _: None, calls=1) == "candidate"
    await harm(gateway, b"releases", release.id.encode())
    assert f"release {release.id} is left alone" in gateway.log
    _ = await traffic.call("r1")
    _ = await traffic.call("r2")
    assert [span.versions for span in await tape.spans("r1", 2)] == [{"travel": "v2"}] * 2
    assert [(span.versions, span.arm) for span in await tape.spans("r2", 1)] == [({"travel": "v1"}, None)]
    assert traffic.failures == []

    assert await client.releases() == []
    with pytest.raises(ClientError, match="its record cannot be read; run `penstock check`"):
        _ = await client.decide(release.id, "abort", ActionRequest(who="ann", why="it is damaged"))
    other = await traffic.start("travel", "v2", policy(0.999))
    assert other.id != release.id
    assert await traffic.rollout("r3", lambda _: None, calls=1) == "candidate"
    # Retention asks whether it still has to count its rollouts.
    _ = await client.cancel("r1")
    _ = await client.forget("r1")
    assert await client.rollouts_by_id(["r1"]) == []


async def test_a_release_that_is_damaged_while_it_runs_stops_nothing_else(
    gateway: Gateway, client: Client, traffic: Traffic
) -> None:
    """It counts no more, which is said once, and the gateway goes on answering."""
    assert isinstance(gateway, Local)
    release = await traffic.start("travel", "v2", policy(0.999))
    # Its record is written anew when a rollout takes part.
    await traffic.rollout("r1", lambda _: None, calls=1)

    def damage(tape: Transaction) -> None:
        tape.put("releases", release.id.encode(), b"\xff\xff")

    _ = await gateway.gateway.recorder.submit(damage)
    # What is committed has the release looked at again.
    _ = await traffic.call("r1")
    await until(lambda: "it is left alone" in gateway.log)
    assert await client.releases() == []
    assert gateway.log.count(f"release {release.id}: its record cannot be read") == 1


@pytest.mark.parametrize(("database", "key"), [(b"resources", b"other\0v1\0"), (b"stable", b"other")])
async def test_a_damaged_resource_takes_no_other_with_it(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape, database: bytes, key: bytes
) -> None:
    _ = await client.add_version("other", prompt("You are somebody else, and it is {date}.", sent=True))
    await harm(gateway, database, key)
    assert "resource other is left alone" in gateway.log
    assert [one.name for one in await client.resources()] == ["travel"]
    _ = await traffic.call("r1")
    _ = await traffic.call("r2", text="You are somebody else, and it is Tuesday.")
    assert [span.versions for span in await tape.spans("r1", 1)] == [{"travel": "v1"}]
    assert [span.versions for span in await tape.spans("r2", 1)] == [None]
    assert traffic.failures == []


def test_a_missing_assignment_is_said_and_a_person_can_still_decide(store: Store) -> None:
    release = assigned(store, 3)
    seen = [AssignmentEvidence(number=at + 1, rollout=f"r{at}", seen_ns=T0, reward=0.5) for at in range(3)]
    done(store, lambda tape: ReleaseOperations(tape).count(release.id, release.revision, (), seen))
    done(store, lambda tape: tape.delete("assigned", keys.numbered_key(release.id, 2)))
    release = done(store, lambda tape: ReleaseOperations(tape).stored(release.id))
    counter = counter_at(store, lambda: T0)
    with pytest.raises(
        DamagedRecordError, match=f"assignment 2 of release {release.id} is missing; run `penstock check`"
    ):
        _ = counter.replayed(release)
    assert counter.evidence(release).seen == 1


def test_what_was_on_the_tape_before_a_deadline_counts(store: Store) -> None:
    """Also where the deadline passes during the round that looks: the reward came before it, and after the round's
    first read."""
    release = assigned(store, 2, outcome_deadline_s=600.0)
    deadline = T0 + 600 * S
    times = iter([deadline - S])

    def now() -> int:
        if (time := next(times, None)) is not None:
            return time
        reward = Judgement(value=1.0)
        done(store, lambda tape: SpanOperations(tape).reward(("r1", "a1"), reward, True, deadline - S // 2))
        return deadline + S

    counter = counter_at(store, now)
    first = counter._round(release, Canary.of(release))
    second = counter._round(release, Canary.of(release))
    assert first is not None
    assert second is not None
    assert [one.reward for one in first.seen] == []
    assert [(one.rollout, one.reward) for one in second.seen] == [("r0", None), ("r1", 1.0)]


def counter_at(store: Store, now_ns: Callable[[], int]) -> OutcomeCounter:
    nothing: Any = None
    return OutcomeCounter(store, nothing, nothing, now_ns, nothing)


def assigned(store: Store, count: int, **about: Any) -> Release:
    """A canary that has so many rollouts, each with a call, which began at `T0`."""
    for text in ("one", "two"):
        done(store, partial(_add, text=text))
    made = Release(
        id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", salt="s",
        policy=policy(0.5, rollouts=3, **about),
    )  # fmt: skip
    release = done(store, lambda tape: begun(tape, made, 0.5))
    for at in range(count):
        request = PinRequest(f"r{at}", Requester("", "m", "online", {}), ("travel",))
        call = SpanEntry(f"r{at}", "a1", start_ns=T0, end_ns=T0 + S, status="ok", kind="llm")
        done(store, lambda tape, request=request, at=at: ReleaseOperations(tape).pin(request, T0 + at))
        done(store, lambda tape, call=call: SpanOperations(tape).add([call], T0 + S))
    return done(store, lambda tape: ReleaseOperations(tape).stored(release.id))


def _add(tape: Transaction, text: str) -> None:
    _ = ReleaseOperations(tape).add_version("travel", prompt(f"Text {text}"), 1)
