"""Two processes that write one tape: each sees what the other has written, and knows which open calls are whose."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from fakes.entries import call, running
from fakes.second_writer import Second
from fakes.shell import Shell
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.tape.store import Store, codec
from penstock.gateway.tape.store.directory import WriterRegistry
from penstock.gateway.tape.store.transaction import QueuedOperation

ORDERS = st.lists(st.tuples(st.sampled_from(["own", "call", "open", "end"]), st.sampled_from("abc")), max_size=12)


@pytest.fixture(scope="module")
def process() -> Generator[Second]:
    made = Second()
    yield made
    made.end()


@pytest.fixture
def other(process: Second, store: Store) -> Second:
    """The other process, which writes the tape of this store too."""
    assert process.does("tape", store.path) == "ready"
    return process


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with open_store(tmp_path) as made:
        yield made


def test_each_goes_on_behind_what_the_other_has_written(store: Store, other: Second) -> None:
    store.write([call("mine", request=b"first " * 40)])
    assert not store.behind
    theirs = int(other.does("call", "mine"))
    assert store.behind
    assert store.cursor() == theirs
    mine = store.write([call("mine", request=b"first " * 60)])
    assert not store.behind
    told = [record for record in store.newest if record.startswith(b"s")]
    assert len(told) == 2, "what the other has written is told with what was written here"
    assert int(other.does("call", "mine")) > mine
    assert [span.sequence for span in store.spans("mine")] == [1, 2, 3, 4]
    assert list(problems(store)) == []


@pytest.mark.parametrize("many", [0, 100])
def test_what_the_other_has_written_leaves_a_base(store: Store, other: Second, many: int) -> None:
    """Where many are written at once nothing is read back: whole conversations would be stored anew."""
    told = os.urandom(20_000).hex().encode()

    def write(request: bytes) -> None:
        store.write([call("mine", request=request), *(call(f"beside{number}") for number in range(many))])

    write(told)
    other.does("call", "mine")
    write(told + b" and more")
    other.does("call", "mine")
    write(told + b" and more")  # it is not the last call that is repeated
    spans = list(store.spans("mine"))
    with store.view() as view:
        bases = [codec.base_of(view.body_record(span.body)) for span in spans if span.body is not None]
    first, second = spans[0].body, spans[2].body
    # One that is written alone stands on the last one, which is read back.
    assert bases == [0, first, first, second, second] if many else [0, first, spans[1].body, second, spans[3].body]
    assert [span.retry_of for span in spans] == [None] * 5
    assert list(problems(store)) == []


@pytest.mark.parametrize("theirs", ["call mine, seen beside0", "seen mine"])
def test_a_lease_that_the_other_has_renewed_leaves_a_base(theirs: str, store: Store, other: Second) -> None:
    """Where one process gives out leases and several record the calls, that happens all the time."""
    told = os.urandom(20_000).hex().encode()

    def write(request: bytes) -> None:
        # So many that no keyframe is remembered in place of a base.
        others = (call(f"beside{number}", request=os.urandom(200)) for number in range(100))
        store.write([call("mine", request=request), *others])

    write(told)
    for one in theirs.split(", "):
        other.does(*one.split())
    write(told + b" and more")
    spans = list(store.spans("mine"))
    with store.view() as view:
        bases = [codec.base_of(view.body_record(span.body)) for span in spans if span.body is not None]
    assert bases[-1] == spans[0].body
    assert list(problems(store)) == []


def test_open_calls_of_a_process_that_lives_stay_open(store: Store) -> None:
    other = Second()
    other.does("tape", store.path)
    store.write([running("mine")])
    other.does("open", "theirs")
    assert len(store.live_writers()) == 2
    store.write([QueuedOperation(lambda transaction: transaction.interrupt(store.live_writers()))])
    assert {status(store, "mine"), status(store, "theirs")} == {SpanStatus.OPEN}

    other.end()
    assert len(store.live_writers()) == 1
    store.write([QueuedOperation(lambda transaction: transaction.interrupt(store.live_writers()))])
    assert status(store, "mine") == SpanStatus.OPEN
    assert status(store, "theirs") == SpanStatus.INTERRUPTED
    assert list(problems(store)) == []


@pytest.mark.slow
async def test_a_second_process_without_the_lock_is_refused(store: Store, tmp_path: Path) -> None:
    done = await Shell("", tmp_path).run("serve", "--data", str(store.path), "--port", "0")
    assert (done.code, "another gateway (process" in done.err) == (1, True), done.err


def test_what_a_dead_process_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "writers").mkdir()
    (tmp_path / "writers" / "0badcafe").touch()
    made, other = WriterRegistry(tmp_path), WriterRegistry(tmp_path)
    assert made.live_writers() == {made.own, other.own}
    assert sorted(os.listdir(tmp_path / "writers")) == sorted([made.own, other.own])
    other.close()
    assert made.live_writers() == {made.own}
    made.close()
    assert os.listdir(tmp_path / "writers") == []


@given(orders=ORDERS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_log_has_no_gap_whoever_writes(
    orders: list[tuple[str, str]], process: Second, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with open_store(tmp_path_factory.mktemp("tape")) as store:
        process.does("tape", store.path)
        heard: list[bytes] = []
        cursor, under_way = store.cursor(), set[str]()
        for what, name in orders:
            if what == "own":
                cursor = store.write([call(name)])
                heard += store.newest
            elif what == "call" or (what == "end") == (name in under_way):
                if what != "call":
                    under_way ^= {name}
                before, cursor = cursor, int(process.does(what, name))
                assert cursor > before
        cursor = store.write([call("last")])
        heard += store.newest
        with store.view() as view:
            assert heard == list(view.log_records(0, cursor)), "all of it, in order, each once"
        assert list(problems(store)) == []


def status(store: Store, rollout: str) -> SpanStatus:
    """Of its only call."""
    (span,) = store.spans(rollout)
    return span.status
