"""What was forgotten is not in the file, whatever was written before, between and after; all else is as it was."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.entries import body, call, finish, running
from fakes.forgetting import forget, overwrite
from fakes.some import some
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.tape.store import Store, codec, erasure
from penstock.gateway.tape.store.cache import SHARED_BY
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.erasure import SPANS, WipePosition
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.work.operations import QueueOperations

SYSTEM = b'{"messages":[{"role":"system","content":"' + b"You help people to change flights. " * 40


def needle(rng: random.Random) -> bytes:
    """Text that no compressor makes shorter, so that it is found where it is."""
    return rng.randbytes(16)


def calls(rollout: str, secret: bytes, rng: random.Random, turns: int, size: int) -> list[SpanEntry]:
    """Calls of a rollout that says its secret everywhere."""
    made: list[SpanEntry] = []
    told = SYSTEM
    for turn in range(turns):
        told += b"".join((b'"},{"user":"', secret, rng.randbytes(size), b"%d" % turn))
        entry = call(rollout, "a1", told + b'"}]}', secret + rng.randbytes(size))
        assert entry.body is not None
        entry.body.response_headers = b"x-id: " + secret.hex().encode() + b"\r\n"
        entry.attributes = {"customer": secret.hex()}
        made.append(entry)
    return made


def searched(path: Path, secret: bytes) -> list[str]:
    """Files that hold a secret, as it is or as hex."""
    found = [file for file in path.rglob("*") if file.is_file()]
    return [
        file.name for file in found if (data := file.read_bytes()) and (secret in data or secret.hex().encode() in data)
    ]


def enqueue(store: Store, rollout: str, secret: bytes) -> None:
    spec = RolloutSpec(input={"task": secret.hex()}, metadata={"customer": secret.hex()})
    store.write([QueuedOperation(lambda tape: QueueOperations(tape).enqueue([(rollout, spec)], 1))])
    store.write([QueuedOperation(lambda tape: QueueOperations(tape).cancel(rollout, None, 2))])


def assert_kept(store: Store, entries: list[SpanEntry]) -> None:
    for entry in entries:
        span = some(store.span(entry.rollout, entry.attempt, entry.sequence))
        assert span.attributes == entry.attributes
        exchange = some(store.exchange(span))
        assert entry.body is not None
        assert (exchange.request_body, exchange.response_body) == (entry.body.request, entry.body.response)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 40, 900, 5000])), min_size=1, max_size=8),
    st.sampled_from([1, 3, 40]),
    st.sets(st.integers(0, 7)),
    st.booleans(),
)
def test_nothing_of_it_is_left_in_any_file(
    seed: int, shapes: list[tuple[int, int]], at_once: int, going: set[int], restarted: bool
) -> None:
    rng = random.Random(seed)
    secrets = [needle(rng) for _ in shapes]
    told = [calls(f"r{at}", secrets[at], rng, *shape) for at, shape in enumerate(shapes)]
    order = [entry for entries in told for entry in entries]
    rng.shuffle(order)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with open_store(path, map_bytes=1 << 20) as store:
            for at in range(0, len(shapes), 2):
                enqueue(store, f"r{at}", secrets[at])
            for at in range(0, len(order), at_once):
                store.write(order[at : at + at_once])
            if not restarted:
                assert_gone(store, told, secrets, going)
        if restarted:
            with open_store(path, map_bytes=1 << 20) as store:
                assert_gone(store, told, secrets, going)


def assert_gone(store: Store, told: list[list[SpanEntry]], secrets: list[bytes], going: set[int]) -> None:
    """Forgets some rollouts: nothing of them is left, and all of the others."""
    for at in going & set(range(len(told))):
        forget(store, f"r{at}")
    overwrite(store)
    for at, entries in enumerate(told):
        if at in going:
            assert searched(store.path, secrets[at]) == []
            assert store.rollout(f"r{at}") is None
            assert list(store.spans(f"r{at}")) == []
        else:
            assert searched(store.path, secrets[at]) != []
            assert_kept(store, entries)
    assert list(problems(store)) == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as made:
        yield made
        assert list(problems(made)) == []


def test_what_two_said_stays_as_long_as_one_of_them(store: Store) -> None:
    rng = random.Random(1)
    both = rng.randbytes(600)
    entries = [call(f"r{at}", "a1", both + b"%d" % at + rng.randbytes(50)) for at in range(3)]
    for entry in entries:
        store.write([entry])
    for at in range(3):
        assert searched(store.path, both) != []
        forget(store, f"r{at}")
        overwrite(store)
        assert_kept(store, entries[at + 1 :])
    assert searched(store.path, both) == []


def test_of_what_was_shared_only_that_stays_which_others_use(store: Store) -> None:
    rng = random.Random(2)
    system, two = rng.randbytes(600), rng.randbytes(400)
    entries = [call(f"r{at}", "a1", system + (two if at < 2 else b"") + b"%d" % at) for at in range(3)]
    for entry in entries:
        store.write([entry])
    forget(store, "r0")
    forget(store, "r1")
    overwrite(store)
    assert searched(store.path, two) == []
    assert searched(store.path, system) != []
    assert_kept(store, entries[2:])
    later = call("r3", "a1", system + two + b"3")
    store.write([later])
    assert_kept(store, [later])


def test_a_call_that_runs_does_not_stand_on_what_is_forgotten(store: Store) -> None:
    system = random.Random(3).randbytes(600)
    for at in range(2):
        store.write([call(f"r{at}", "a1", system + b"%d" % at)])
    waiting = running("r2", "a1", system + b"2")
    store.write([waiting])
    forget(store, "r0")
    forget(store, "r1")
    span = some(store.span("r2", "a1", 1))
    exchange = some(store.exchange(span))
    assert exchange.request_body == system + b"2"
    store.write([finish(waiting)])
    assert_kept(store, [waiting])


def test_a_call_that_was_running_when_its_gateway_died_stands_on_what_is_kept(tmp_path: Path) -> None:
    system = random.Random(4).randbytes(600)
    with open_store(tmp_path) as store:
        for at in range(2):
            store.write([call(f"r{at}", "a1", system + b"%d" % at)])
        store.write([running("r2", "a1", system + b"2")])
    with open_store(tmp_path) as store:
        forget(store, "r0")
        forget(store, "r1")
        assert list(problems(store)) == []
        span = some(store.span("r2", "a1", 1))
        exchange = some(store.exchange(span))
        assert exchange.request_body == system + b"2"


def test_a_shared_body_serves_so_many_and_no_more(store: Store) -> None:
    system = random.Random(5).randbytes(600)
    entries = [call(f"r{at}", "a1", system + b"%d" % at) for at in range(SHARED_BY + 40)]
    for at in range(0, len(entries), 40):
        store.write(entries[at : at + 40])
    with store.view() as view:
        shared = {key[:8] for key, _ in view.scan("uses")}
    assert len(shared) == 2
    assert_kept(store, entries)


def test_a_rollout_of_many_calls_is_wiped_step_by_step(store: Store) -> None:
    rng = random.Random(6)
    secret = needle(rng)
    for entries in (calls("r0", secret, rng, 700, 4), calls("r1", needle(rng), rng, 3, 4)):
        for at in range(0, len(entries), 60):
            store.write(entries[at : at + 60])
    forget(store, "r0")
    overwrite(store)
    assert searched(store.path, secret) == []
    assert len(list(store.spans("r1"))) == 3


def test_a_step_ends_when_its_time_is_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(rollout: str, seconds: float) -> int:
        monkeypatch.setattr(erasure, "STEP_S", seconds)
        entries = calls(rollout, needle(random.Random(12)), random.Random(13), 128, 4)
        for at in range(0, len(entries), 16):
            store.write(entries[at : at + 16])
        hidden = QueuedOperation(lambda tape: tape.erasure.hide(rollout))
        store.write([hidden])
        place, count = WipePosition(), 0
        while place is not None:
            step = QueuedOperation(lambda tape, at=place: tape.erasure.wipe([(hidden.result or 0, at)]))
            store.write([step])
            assert step.result is not None
            (place,) = step.result
            count += 1
        return count

    assert steps("r0", 60.0) == 1
    assert steps("r1", 0.0) == 4


def test_a_step_that_ends_within_a_segment_leaves_the_rest_for_the_next(store: Store) -> None:
    rng = random.Random(8)
    secret = needle(rng)
    entries = calls("r0", secret, rng, SPANS + 60, 4)
    for at in range(0, len(entries), 50):
        store.write(entries[at : at + 50])
    store.write(calls("r1", needle(rng), rng, 1, 4))
    forget(store, "r0")
    with store.view() as view:
        left = [record for _, segment in view.scan("bodies") for record in codec.unpack_segment(segment) if record]
        assert len(left) == 2  # what r1 says, and what it shared
        assert view.count("uses") == 1
    overwrite(store)
    assert searched(store.path, secret) == []


def test_another_of_its_name_in_the_same_commit_stays(store: Store) -> None:
    last, late = call("r0", "a1", b"last"), call("r0", "a1", b"late")
    store.write([call("r0", "a1", b"first")])
    hidden = QueuedOperation(lambda tape: tape.erasure.hide("r0"))
    store.write([last, hidden, late])
    wiped = QueuedOperation(lambda tape: tape.erasure.wipe([(hidden.result or 0, WipePosition())]))
    store.write([wiped])
    assert wiped.result == [None]
    assert_kept(store, [late])
    assert [rollout.id for _, rollout in store.rollouts()] == ["r0"]


def test_what_is_hidden_is_out_of_sight_before_it_is_wiped(store: Store) -> None:
    store.write([call("r0", "a1", b"first")])
    span = some(store.span("r0", "a1", 1))
    hidden = QueuedOperation(lambda tape: tape.erasure.hide("r0"))
    store.write([hidden])
    assert list(store.recent()) == []
    assert [change.kind for change in store.changes(0, 100)[0]] == ["forgotten"]
    assert store.find_response(span.response_id or "") is None
    store.write([QueuedOperation(lambda tape: tape.erasure.wipe([(hidden.result or 0, WipePosition())]))])
    assert store.exchange(span) is None  # it was read before


def test_a_pass_goes_on_behind_a_value_that_was_written_over_its_place(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "_AT_ONCE", 8)
    rng = random.Random(9)
    for at in range(12):
        store.write([call(f"r{at}", "a1", rng.randbytes(40_000))])
    for at in range(11):
        forget(store, f"r{at}")
    for turn in range(12):
        store.write([QueuedOperation(lambda tape: tape.put("meta", b"note commit", b"1"))])
        with store.overwrite_pass() as going:
            while going.step():
                store.write([call("load", f"a{turn}", rng.randbytes(rng.randrange(2_000, 60_000)))])
        forget(store, "load")
    assert list(problems(store)) == []


def test_numbers_of_segments_that_are_gone_are_a_hole(store: Store) -> None:
    for at in range(30):
        store.write([call(f"r{at}", "a1", b"%d" % at)])
    newest = store.cursor()
    for at in range(5, 25):
        forget(store, f"r{at}")
    with store.view() as view:
        assert view.count("holes") == 2  # one of the log, one of the bodies
        assert view.hole("bodies", 6) == (6, 25)
    told = [change.span.rollout for change in store.changes(0, 1000)[0] if change.span]
    assert told == [f"r{at}" for at in range(30) if not 5 <= at < 25]
    assert [span.rollout for _, span in store.recent()] == told[::-1]
    changes, cursor = store.changes(newest, 1000)
    assert [(change.kind, change.name) for change in changes] == [("forgotten", f"r{at}") for at in range(5, 25)]
    assert cursor == store.cursor()


def test_the_same_name_may_come_again(store: Store) -> None:
    store.write([call("r0", "a1", b"first")])
    forget(store, "r0")
    again = call("r0", "a1", b"second")
    store.write([again])
    assert_kept(store, [again])
    assert [span.sequence for span in store.spans("r0")] == [1]


READER = """
import lmdb, sys
with lmdb.open(sys.argv[1], readonly=True, max_dbs=99) as env, env.begin() as txn:
    print("reading", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_pages_that_a_reader_sees_are_overwritten_when_it_has_ended(store: Store) -> None:
    rng = random.Random(7)
    secret = needle(rng)
    store.write(calls("r0", secret, rng, 5, 3000))
    command = [sys.executable, "-c", READER, str(store.path / "tape")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        forget(store, "r0")
        store.write([call("r1")])
        with store.overwrite_pass() as overwriting:
            while not overwriting.is_blocked:
                assert overwriting.step()
            store.write([call("r2")])
            assert overwriting.step()
            assert searched(store.path, secret) == ["data.mdb"]
            reader.kill()
            reader.wait()
            assert not overwriting.step()
    assert searched(store.path, secret) == []


def test_the_old_tail_of_the_log_goes_with_the_last_that_it_tells_of(store: Store) -> None:
    for at in range(20):
        enqueue(store, f"r{at}", b"x")
    for at in range(15):
        forget(store, f"r{at}")
    with store.view() as view:
        (below,) = {number for number in [view.origins("r15")] if number is not None}
    store.write([QueuedOperation(lambda tape: tape.erasure.sweep(below.number))])
    with store.view() as view:
        assert view.hole("log", 1) == (1, below.number - 1)
    assert [rollout.id for _, rollout in store.rollouts()] == [f"r{at}" for at in range(19, 14, -1)]


def test_a_file_that_is_laid_out_otherwise_is_left_alone(store: Store) -> None:
    store.write([call()])
    file = store.path / "tape" / "data.mdb"
    before = file.read_bytes()
    with store.overwrite_pass() as overwriting:
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, b"\x02", 20)  # the version of the layout
        os.pwrite(fd, b"\x02", 4096 + 20)
        with pytest.raises(TapeError, match="version 2 of LMDB's layout"):
            overwriting.step()
        os.pwrite(fd, b"\x01", 20)
        os.pwrite(fd, b"\x01", 4096 + 20)
        os.close(fd)
    assert file.read_bytes() == before


def test_what_a_commit_that_failed_has_left_behind_the_last_page_is_overwritten(store: Store) -> None:
    rng = random.Random(10)
    secret = needle(rng)
    store.write([call("r0")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.figures()["used_bytes"] + 400_000, hard))
    try:
        with pytest.raises(TapeError, match="cannot write"):
            store.write([call("r0", "a1", b"".join(secret + rng.randbytes(4080) for _ in range(200)))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert searched(store.path, secret) == ["data.mdb"]
    later = call("r1", "a1", rng.randbytes(2000))
    with store.overwrite_pass() as overwriting:
        more = overwriting.step()
        store.write([later])
        while more:
            more = overwriting.step()
            store.write([QueuedOperation(lambda tape: tape.put("meta", b"note commit", b"1"))])
    assert searched(store.path, secret) == []
    assert_kept(store, [later])


def test_what_the_disk_takes_only_some_of_is_not_overwritten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = needle(random.Random(11))
    store.write([call("r0", "a1", secret)])
    forget(store, "r0")
    write = os.pwrite

    def one_byte(fd: int, data: bytes, at: int) -> int:
        return write(fd, data[:1], at)

    with monkeypatch.context() as some:
        some.setattr(os, "pwrite", one_byte)
        with pytest.raises(TapeError, match="the disk takes only some"):
            overwrite(store)
    overwrite(store)
    assert searched(store.path, secret) == []


def test_a_shared_body_is_read_back_cut() -> None:
    record, base = codec.pack_shared(b"a" * 40 + b"b" * 40, 1, alone=True)
    whole = body(b"a" * 40 + b"-" + b"b" * 10)
    made, _ = codec.pack_body(whole, 2, base, alone=True)
    _, prefix, suffix = codec.base_use(made)
    cut, _ = codec.pack_shared(b"a" * prefix + b"b" * suffix, 1, alone=True)
    assert len(cut) < len(record) + 1
    found, _ = codec.unpack_body(made, codec.unpack_body(cut, None, 1)[1], 2)
    assert found == whole


def test_a_file_of_another_layout_is_not_kept_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is tried again every few seconds, for as long as the gateway runs."""
    store.write([call("r0")])

    def held() -> int:
        return sum(
            os.path.samefile(f"/proc/self/fd/{fd}", store._env.file)
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        )

    before = held()
    monkeypatch.setattr(erasure, "_VERSION", 2)
    for _ in range(3):
        with pytest.raises(TapeError, match="is not laid out as expected"):
            store.overwrite_pass()
    assert held() == before
    store.write([call("r1")])
