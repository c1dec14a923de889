"""The tape: what is written is read back, exactly, by every way of reading, beside whatever else happens."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import lmdb
import msgspec
import pytest
from fakes.entries import HEADERS, call, conversation, finish, running
from fakes.some import some

from penstock.console.commands.check import examine, problems
from penstock.gateway.app import open_store
from penstock.gateway.model.answers import Change
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Exchange
from penstock.gateway.tape.store import Store, codec, environment, keys, records
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.environment import FORMAT, ORDER, REMAP_BYTES
from penstock.gateway.tape.store.reader import header_lines
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.work.operations import QueueOperations

SMALL = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with open_store(tmp_path, map_bytes=SMALL) as made:
        yield made
        assert list(problems(made)) == []


def exchange_of(store: Store, entry: SpanEntry) -> Exchange:
    span = some(store.span(entry.rollout, entry.attempt, entry.sequence))
    found = some(store.exchange(span))
    return found


def assert_kept(store: Store, entries: list[SpanEntry]) -> None:
    """Their bytes are on the tape."""
    for entry in entries:
        assert entry.body is not None
        found = exchange_of(store, entry)
        assert found.request_body == entry.body.request
        assert found.response_body == entry.body.response


# -- records ---------------------------------------------------------------------------------------------------------


def test_every_field_of_a_span_has_its_place() -> None:
    from_the_key, computed = {"rollout", "attempt", "sequence"}, {"cost", "unpriced"}
    assert sorted((*records.STYLE, *records.OWN)) == sorted(set(Span.model_fields) - from_the_key - computed)


def test_an_entry_writes_its_fields_in_the_order_of_the_record() -> None:
    names = {one.name for one in fields(SpanEntry)}
    entry = SpanEntry("r", "a")
    for name in names - {"rollout", "attempt", "status", "deferred", "usage", "body", "start_ns", "end_ns"}:
        setattr(entry, name, f"<{name}>")
    style = [f"<{name}>" if name in names else None for name in records.STYLE]
    assert list(entry.style()) == ["<kind>", "open", *style[2:]]
    entry.start_ns, entry.end_ns = 100, 130
    _, start, took, *own = codec.decode(entry.summary(1, 77, [5, None, None, None, None]))
    assert (start, took) == (100, 30)
    expected = {name: f"<{name}>" for name in names} | {"body": 77, "usage": [5, None, None, None, None]}
    assert own == [expected[name] for name in records.OWN[2:]]


def test_a_span_comes_back_whole(store: Store) -> None:
    entry = call()
    entry.trace_id, entry.parent_id, entry.tool_calls, entry.error = "0" * 31 + "1", "0" * 15 + "2", 3, "http_429"
    entry.truncated, entry.stream, entry.upstream, entry.model_served = True, True, "local", "m-1-2026"
    entry.kind, entry.name, entry.span_id, entry.attributes = "otel", "step", "0" * 15 + "3", {"a": [1, "b", None]}
    store.write([entry])
    span = some(store.span("r1", "a1", 1))
    for name in {one.name for one in fields(SpanEntry)} & set(Span.model_fields) - {"body"}:
        assert getattr(span, name) == getattr(entry, name), name
    assert Span.model_validate(span.model_dump()) == span
    assert span.duration_ns == 1_000_000_007
    assert span.body == 1


def test_defaults_that_were_cut_off_come_back(store: Store) -> None:
    store.write([SpanEntry("r1", "a1", status="ok")])
    span = some(store.span("r1", "a1", 1))
    assert span == Span(rollout="r1", attempt="a1", sequence=1, trace_id=span.trace_id, span_id=span.span_id)


def test_what_calls_have_in_common_is_stored_from_its_second_appearance_on(store: Store) -> None:
    store.write([call() for _ in range(3)])
    with store.view() as view:
        styles = [codec.decode(view.log_record(cursor)[1 + 10 :])[0] for cursor in view.cursors("r1", "a1", 0)]
        assert isinstance(styles[0], list)
        assert styles[1:] == [1, 1]
        assert view.last("styles") == 1
    own = {"sequence", "span_id", "body"}
    assert len({span.model_dump_json(exclude=own) for span in store.spans("r1")}) == 1


def test_calls_like_no_other_do_not_fill_the_table(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for start in range(0, 9000, 3000):
            batch = [call() for _ in range(3000)]
            for at, entry in enumerate(batch, start):
                entry.path = f"/v1/files/{at}"
            store.write(batch)
        with store.view() as view:
            assert view.last("styles") == 0


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_conversations_are_byte_exact(store: Store, together: bool) -> None:
    entries = [*conversation(80), *conversation(40, "r2"), call("r3", request=b"", response=b"")]
    for batch in [entries] if together else [[entry] for entry in entries]:
        store.write(batch)
    assert_kept(store, entries)
    found = exchange_of(store, entries[5])
    assert found.request_headers == header_lines(HEADERS)
    assert found.chunks[0].at_ns == 900_000


@pytest.mark.parametrize("together", [False, True])
def test_calls_that_are_read_one_after_the_other_are_those_that_are_read_alone(store: Store, together: bool) -> None:
    """In their order, from its midst, backwards, across conversations, with one that is open in between."""
    entries = [*conversation(40), running(), *conversation(20, "r2")]
    for batch in [entries] if together else [[entry] for entry in entries]:
        store.write(batch)
    first, other = list(store.spans("r1")), list(store.spans("r2"))
    mixed = [span for pair in zip(first, other, strict=False) for span in pair]
    for spans in ([*first, *other], first[7:], first[::-1], mixed, first[::3], [first[9], first[9]], []):
        assert list(store.exchanges(iter(spans))) == [(span, store.exchange(span)) for span in spans]


def test_agents_that_resend_everything_cost_what_is_new(store: Store) -> None:
    entries = conversation(200)
    raw = sum(len(entry.body.request) for entry in entries if entry.body is not None)
    for entry in entries:
        store.write([entry])
    assert store.figures()["used_bytes"] < raw / 5


def test_lists(store: Store) -> None:
    for number in range(300):
        store.write([call(f"r{number:03}", "a1"), call(f"r{number:03}", "a2")])
    newest = list(store.rollouts())
    assert [rollout.id for _, rollout in newest] == [f"r{number:03}" for number in range(299, -1, -1)]
    position = newest[9][0]
    assert [rollout.id for _, rollout in islice(store.rollouts(position), 2)] == ["r289", "r288"]
    assert next(store.rollouts(10**12))[1].id == "r299"
    assert list(store.rollouts(0)) == list(store.rollouts(-5)) == []
    assert len(list(store.rollouts(2**70))) == 300
    assert [(one.id, one.sequence) for one in store.attempts("r000")] == [("a1", 1), ("a2", 2)]
    assert store.attempts("r") == []
    assert store.rollout("r00") is None


def test_spans_of_an_attempt_are_paged_by_place(store: Store) -> None:
    store.write([call(attempt=attempt) for attempt in ("z", "b") for _ in range(520)])
    everything = [(span.attempt, span.sequence) for span in store.spans("r1")]
    assert everything == [(name, at) for name in ("z", "b") for at in range(1, 521)]
    for after in (-1, 0, 1, 255, 256, 257, 511, 520, 521, 2**40):
        found = [(one.attempt, one.sequence) for one in store.spans("r1", after=("z", after))]
        assert found == everything[min(max(after, 0), 520) :]
    assert [one.sequence for one in store.spans("r1", "b", after=("b", 518))] == [519, 520]
    assert list(store.spans("r1", "none")) == list(store.spans("none")) == []
    with store.view() as view:
        found = view.attempts_and_spans("r1"), view.attempts_and_spans("none")
    assert found == ((store.attempts("r1"), list(store.spans("r1"))), ([], []))


@pytest.mark.parametrize("name", ["", "ä", "a\0b", "r1/a1", "x" * 600])
def test_names_that_cannot_be_are_not_there(store: Store, name: str) -> None:
    store.write([call()])
    assert store.rollout(name) is None
    assert store.attempts(name) == []
    assert store.span(name, "a1", 1) is store.span("r1", name, 1) is None
    assert list(store.spans(name)) == list(store.spans("r1", name)) == []


def test_spans_that_were_never_given_out(store: Store) -> None:
    store.write([call()])
    for sequence in (-1, 0, 2, 256, 257, 2**32, 2**70):
        assert store.span("r1", "a1", sequence) is None


def test_changes_and_recent_tell_every_call_once_whatever_the_page(store: Store) -> None:
    open_calls = [running() for _ in range(5)]
    store.write(open_calls)
    store.write([call() for _ in range(20)])
    store.write([finish(open_calls[2])])
    for limit in (1, 2, 3, 7, 1000):
        cursor, told = 0, list[int]()
        while True:
            page, cursor = store.changes(cursor, limit)
            assert len(page) <= limit
            told += [change.span.sequence for change in page if change.span is not None]
            if not page:
                break
        assert sorted(told) == list(range(1, 26))
        assert cursor == store.cursor()
    everything = list(store.recent())
    assert sorted(span.sequence for _, span in everything) == list(range(1, 26))
    paged = list(islice(store.recent(), 4))
    while page := list(islice(store.recent(paged[-1][0]), 4)):
        paged += page
    assert paged == everything
    assert list(store.recent(10**12)) == everything
    assert list(store.recent(1)) == list(store.recent(-3)) == []
    assert store.changes(10**30, 5) == ([], 10**30)
    assert store.changes(-7, 1) == store.changes(0, 1)


@pytest.mark.parametrize("together", [1, 300], ids=["each in its own commit", "in few commits"])
def test_the_newest_spans_are_found_behind_changes_of_all_else_without_reading_those(
    store: Store, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    store.write([call() for _ in range(120)])
    for at in range(0, 600, together):
        names = [f"q{number}" for number in range(at, at + together)]
        store.write(
            [
                QueuedOperation(
                    lambda tape, names=names: QueueOperations(tape).enqueue([(it, RolloutSpec()) for it in names], 1)
                )
            ]
        )
    counted = Counter[str]()

    def changed(view: TapeView, at: int, record: bytes) -> Change | None:
        counted["read"] += 1
        return change(view, at, record)

    def viewed() -> AbstractContextManager[TapeView]:
        counted["views"] += 1
        return view()

    change, view = TapeView.change, store.view
    monkeypatch.setattr(TapeView, "change", changed)
    monkeypatch.setattr(store, "view", viewed)
    assert [span.sequence for _, span in islice(store.recent(), 100)] == list(range(120, 20, -1))
    assert counted["read"] == 100
    assert counted["views"] < 10


def test_a_call_that_runs_is_seen_and_so_is_its_request(store: Store) -> None:
    store.write(conversation(3))
    entry = running(request=b"a question")
    store.write([entry])
    span = some(store.span("r1", "a1", 4))
    assert (span.status, span.end_ns, span.body) == (SpanStatus.OPEN, None, None)
    assert exchange_of(store, entry).request_body == b"a question"
    store.write([finish(entry)])
    assert [span.status for span in store.spans("r1")] == [SpanStatus.OK] * 4
    assert store.figures()["open"] == 0


def test_a_call_announced_and_ended_within_one_batch_is_one_call(store: Store) -> None:
    entry = call()
    store.write([entry, entry])
    attempt = store.attempts("r1")[0]
    assert (attempt.spans, attempt.totals.calls) == (1, 1)


def test_sums(store: Store) -> None:
    entries = [call(request=b"x" * size) for size in (1, 2, 3)]
    entries[0].status, entries[1].status, entries[2].gap, entries[2].tool_calls = "error", "cancelled", True, 4
    for entry in entries:
        store.write([entry])
    totals = store.attempts("r1")[0].totals
    assert (totals.calls, totals.errors, totals.cancelled, totals.gaps, totals.tool_calls) == (3, 1, 1, 1, 4)
    assert (totals.input_tokens, totals.output_tokens) == (6, 9)


def test_absurd_counts_of_a_provider_do_no_harm(store: Store) -> None:
    entry = call()
    assert entry.usage is not None
    entry.usage.input_tokens = 10**40
    store.write([entry])
    span = some(store.span("r1", "a1", 1))
    assert span.usage is not None
    assert (span.usage.input_tokens, span.usage.output_tokens) == (None, 3)


def test_a_retry_is_linked_to_the_first_of_its_kind(store: Store) -> None:
    entries = [call(request=b"same") for _ in range(3)]
    entries[1].retried = entries[2].retried = True
    store.write(entries[:2])
    store.write(entries[2:])
    other = call(request=b"other")
    other.retried = True
    store.write([other])
    assert [span.retry_of for span in store.spans("r1")] == [None, 1, 1, None]


# -- opening ---------------------------------------------------------------------------------------------------------


def test_what_was_open_is_interrupted_when_the_tape_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write(conversation(2))
        store.write([running(request=b"never answered"), running(attempt="a2")])
    with open_store(tmp_path) as store:
        spans = list(store.spans("r1"))
        assert [span.status for span in spans] == ["ok", "ok", "interrupted", "interrupted"]
        assert spans[2].error == "gateway_died"
        found = some(store.exchange(spans[2]))
        assert found.request_body == b"never answered"
        assert store.attempts("r1")[0].totals.errors == 1
        assert store.figures()["open"] == 0
        assert list(problems(store)) == []
    with open_store(tmp_path) as store:
        assert len(list(store.spans("r1"))) == 4


def test_what_dies_again_and_again_changes_nothing_of_what_is_kept(tmp_path: Path) -> None:
    """What calls have in common is kept once, under a number. That of the interrupted was found again in no life of the
    gateway, and after the third the numbers of others were given to it."""
    statuses: list[str] = []
    for life in range(8):
        with open_store(tmp_path) as store:
            store.write([call(request=b"%d" % number) for number in range(3)])
            for number in range(2):
                other = call(request=b"%d" % number)
                other.model = f"m-{life}"
                store.write([other])
            store.write([running(), running()])
            statuses += ["ok"] * 5 + ["interrupted"] * 2
    with open_store(tmp_path) as store:
        spans = list(store.spans("r1"))
        assert [span.status for span in spans] == statuses
        models = [model for life in range(8) for model in ["m-1"] * 3 + [f"m-{life}"] * 2 + ["m-1"] * 2]
        assert [span.model for span in spans] == models
        assert list(problems(store)) == []


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    entries = conversation(60)
    for at in range(0, 60, 15):
        with open_store(tmp_path) as store:
            before = store.cursor()
            assert store.write(entries[at : at + 15]) > before
    with open_store(tmp_path) as store:
        assert [entry.sequence for entry in entries] == list(range(1, 61))
        assert_kept(store, entries)
        assert list(problems(store)) == []
        assert store.attempts("r1")[0].totals.calls == 60


def test_a_conversation_leans_on_what_was_written_before_a_restart(tmp_path: Path) -> None:
    *before, last = conversation(30)
    with open_store(tmp_path) as store:
        store.write(before)
    with open_store(tmp_path) as store:
        store.write([last])
        with store.view() as view:
            assert len(view.get("bodies", keys.number(30)) or b"") < 150
        assert_kept(store, [*before, last])


def test_a_conversation_is_read_back_only_for_a_call_that_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ended one as well read its last body: a quarter of the time, and memory that others' bodies need."""
    *before, last = conversation(30)
    with open_store(tmp_path) as store:
        store.write(before)
    with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(TapeView, "newest_body", None)
            ending = QueuedOperation(lambda tape: tape.attempt(SpanEntry("r1", "a1")).values[:1])
            store.write([ending])
            assert ending.result == [1]
        store.write([last])
        with store.view() as view:
            assert len(view.get("bodies", keys.number(30)) or b"") < 150


def test_the_writer_forgets_when_it_must_and_loses_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, memory_bytes=2000) as store:
        turns = [conversation(12, f"r{number}") for number in range(20)]
        entries = [entry for turn in zip(*turns, strict=True) for entry in turn]
        for at in range(0, len(entries), 16):
            store.write(entries[at : at + 16])
        assert_kept(store, entries)
        assert all(store.attempts(f"r{number}")[0].totals.calls == 12 for number in range(20))
        assert list(problems(store)) == []


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        made = store.secret()
        assert len(made) == 32
        assert store.secret() == made
        store.write([call()])
    with Store(tmp_path, readonly=True) as store:
        assert store.secret() == made


def test_one_process_writes(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(TapeError, match="another gateway writes the tape"):
        open_store(tmp_path)
    open_store(tmp_path).close()


READER = """
import sys
from pathlib import Path
from typing import NoReturn
from penstock.console.commands.check import problems
from penstock.gateway.tape.store import Store
with Store(Path(sys.argv[1]), readonly=True, map_bytes=1 << 20) as tape:
    for _ in sys.stdin:
        _, span = next(tape.recent())
        exchange = tape.exchange(span)
        print(span.sequence, len(exchange.request_body), len(list(problems(tape))), flush=True)
"""


@pytest.mark.slow
def test_reading_in_another_process_beside_a_writer_that_grows_the_tape(tmp_path: Path) -> None:
    with open_store(tmp_path, map_bytes=SMALL) as writer:
        writer.write([call()])
        command = [sys.executable, "-c", READER, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            for at in range(2, 12):
                writer.write([running(), call(request=secret_noise(400_000 + at, at))])
                reader.stdin.write("now\n")
                reader.stdin.flush()
                assert reader.stdout.readline().split() == [str(2 * at - 1), str(400_000 + at), "0"]
            reader.stdin.close()
        assert writer.figures()["map_bytes"] > 2 * SMALL


def test_no_tape_is_not_a_tape(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="holds no tape"):
        examine(tmp_path)
    assert not (tmp_path / "tape").exists()
    lmdb.open(str(tmp_path / "tape"), max_dbs=2).close()
    with pytest.raises(TapeError, match="holds no tape"):
        examine(tmp_path)


def test_a_tape_of_an_older_version_gets_what_it_lacks(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write([call()])
    with lmdb.open(str(tmp_path / "tape"), max_dbs=99) as env, env.begin(write=True) as txn:
        txn.drop(env.open_db(b"hosted", txn))
    with pytest.raises(TapeError, match=r"older penstock .* no database 'hosted'; start `penstock serve --data"):
        examine(tmp_path)
    with open_store(tmp_path) as store:
        assert [span.sequence for span in store.spans("r1", "a1")] == [1]
    assert examine(tmp_path)[1] == []


@pytest.mark.parametrize("found", [b"1", b"3", b"\xff"])
def test_another_format_is_refused(tmp_path: Path, found: bytes) -> None:
    with open_store(tmp_path) as store:
        store.write([call()])
    damage(tmp_path, "meta", b"format", found)
    for readonly in (True, False):
        with pytest.raises(TapeError, match=f"this penstock reads {FORMAT.decode()}"):
            Store(tmp_path, readonly=readonly)
    damage(tmp_path, "meta", b"format", FORMAT)
    with open_store(tmp_path) as store:
        assert store.attempts("r1")[0].totals.calls == 1


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TapeError, match="cannot open"):
        open_store(tmp_path / "file")
    (tmp_path / "tape").write_text("x")
    with pytest.raises(TapeError, match="cannot open"):
        open_store(tmp_path)
    (tmp_path / "tape").unlink()
    open_store(tmp_path).close()


# -- growing ---------------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_map(tmp_path: Path) -> None:
    with open_store(tmp_path, map_bytes=SMALL) as store:
        noise = [bytes(range(256)) * at + at.to_bytes(4, "big") * 40_000 for at in range(1, 9)]
        entries = [call(f"r{at % 2}", request=request, response=request[::-1]) for at, request in enumerate(noise)]
        entries += [call(request=secret_noise(300_000, at)) for at in range(10)]
        store.write(entries)
        assert [entry.sequence for entry in entries[8:]] == list(range(5, 15))
        assert store.attempts("r1")[0].spans == 14
        assert_kept(store, entries)
        assert list(problems(store)) == []


def secret_noise(size: int, seed: int) -> bytes:
    """Bytes that zstd cannot compress."""
    return random.Random(seed).randbytes(size)


def test_the_map_grows_while_others_read(tmp_path: Path) -> None:
    with open_store(tmp_path, map_bytes=SMALL) as store:
        stop, failures = threading.Event(), list[BaseException]()

        def read() -> None:
            try:
                while not stop.is_set():
                    for _, span in islice(store.recent(), 20):
                        assert store.exchange(span) is not None
                    store.changes(0, 50)
                    list(store.spans("r1", after=("a1", 3)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        entries = [call(request=secret_noise(60_000, at)) for at in range(90)]
        for at in range(0, 90, 3):
            store.write(entries[at : at + 3])
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.figures()["map_bytes"] >= 4 * SMALL
        assert_kept(store, entries)


# -- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path, database: str, key: bytes, value: bytes) -> None:
    """Overwrites a record behind the store's back."""
    with lmdb.open(str(path / "tape"), max_dbs=16, map_size=SMALL * 64) as env:
        db = env.open_db(database.encode())
        with env.begin(write=True, db=db) as txn:
            if value:
                txn.put(key, value)
            else:
                txn.delete(key)


PLACE = keys.attempt_record_key(1, "a1")
RUNNING = [1, list(AttemptStatus).index(AttemptStatus.RUNNING), 0, 0]
DAMAGE = [
    ("bodies", keys.number(2), b"\xff\xff", r"attempts r1/a1: #2"),
    ("bodies", keys.number(2), b"\x28\xb5\x2f\xfd\xff", r"bodies 2"),
    ("bodies", keys.number(2), b"", r"bodies: 2 should follow, found 3"),
    ("bodies", keys.number(2), msgspec.msgpack.encode([b"\x96\x63\0\0\0\xc2\xc4\0"]), r"body 2 leans on body 99"),
    ("log", keys.number(4), b"", r"log: 4 should follow, found 5"),
    ("log", keys.number(4), b"\xc1", r"log 4"),
    (
        "log",
        keys.number(4),
        msgspec.msgpack.encode([b"s" + keys.summary_key("r1", "a1", 2) + b"\xc0"]),
        r"attempts r1/a1: #2",
    ),
    ("attempts", PLACE, codec.encode([[], *RUNNING, 1], [None] * 6), r"#1: it was given out but is not in the index"),
    ("attempts", PLACE, codec.encode([[2, 2], *RUNNING, 2], [None] * 6), r"change 3 is not the summary of r1/a1#2"),
    ("attempts", PLACE, b"\xff", r"attempts r1/a1"),
    ("attempts", PLACE, codec.encode([[2, 3], *RUNNING, 2], [None] * 6), r"it counts 0 finished"),
    ("rollouts", keys.rollout_key("r1"), b"\xff", r"rollouts r1"),
    ("rollouts", keys.rollout_key("r1"), b"", r"its rollout is missing"),
    ("order", ORDER, keys.number(2), r"order 2: change 2 makes no rollout"),
    ("styles", keys.number(1), b"", r"style 1 is missing"),
    ("open", keys.summary_key("r1", "a1", 4), b"\xff", r"open r1/a1#4"),
]


@pytest.mark.parametrize(("database", "key", "value", "wanted"), DAMAGE)
def test_damage_is_reported_and_not_raised(
    tmp_path: Path, database: str, key: bytes, value: bytes, wanted: str
) -> None:
    with open_store(tmp_path) as store:
        for _ in range(3):
            store.write([call()])
        store.write([running()])
    damage(tmp_path, database, key, value)
    figures, problems = examine(tmp_path)
    assert figures["changes"] == 6
    assert any(re.search(wanted, problem) for problem in problems), problems


def test_a_damaged_body_is_a_tape_error_to_who_asks_and_no_matter_to_the_rest(tmp_path: Path) -> None:
    entries = [call(f"r{at}", request=secret_noise(100, at)) for at in range(3)]
    with open_store(tmp_path) as store:
        for entry in entries:
            store.write([entry])
    damage(tmp_path, "bodies", keys.number(2), b"\xff\xff")
    with open_store(tmp_path) as store:
        with pytest.raises(TapeError, match="penstock check"):
            exchange_of(store, entries[1])
        fresh = call(request=b"goes on")
        store.write([fresh])
        assert_kept(store, [entries[0], entries[2], fresh])
        assert len(list(problems(store))) >= 2


@pytest.mark.parametrize("value", [b"\xff\xff", b""], ids=["torn", "gone"])
@pytest.mark.parametrize("nth", range(5))
def test_a_damaged_piece_of_the_log_keeps_back_no_other(tmp_path: Path, nth: int, value: bytes) -> None:
    with open_store(tmp_path) as store:
        for at in range(5):
            store.write([call(f"r{at}"), call(f"r{at}")])
        found, last = store.changes(0, 100)
        spans = [position for position, _ in store.recent()]
        with store.view() as view:
            ends = [keys.to_number(key) for key, _ in view.scan("log")]
    lost = range(([0, *ends][nth]) + 1, ends[nth] + 1)
    damage(tmp_path, "log", keys.number(ends[nth]), value)
    # Where the newest piece is gone, the tape ends before it.
    last = last if value or nth < 4 else ends[-2]
    with open_store(tmp_path) as store:
        for limit in (1, 3, 100):
            told, since = list[int](), 0
            while since < last:
                page, since = store.changes(since, limit)
                told += [change.cursor for change in page]
            assert told == [change.cursor for change in found if change.cursor not in lost]
        for before in (None, lost[0], lost[-1], lost[-1] + 1):
            wanted = [at for at in spans if at not in lost and (before is None or at < before)]
            assert [position for position, _ in store.recent(before)] == wanted
        assert [position for position, _ in store.at(spans)] == [at for at in spans if at not in lost]
        assert {rollout.id for _, rollout in store.rollouts()} >= {f"r{at}" for at in range(5) if at != nth}


def test_an_open_call_that_cannot_be_read_is_a_tape_error_that_says_what_to_do(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write([running()])
    damage(tmp_path, "open", keys.summary_key("r1", "a1", 1), b"\xff")
    with pytest.raises(TapeError, match="penstock check"):
        open_store(tmp_path)
    assert len(examine(tmp_path)[1]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_map_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Pages that were read count as the process' memory until the map is made anew."""
    with open_store(tmp_path, map_bytes=1 << 29) as store:
        noise = random.Random(1)
        for _ in range(96):
            entry = call(request=noise.randbytes(1 << 20))
            store.write([entry])
            exchange_of(store, entry)
        assert store.figures()["used_bytes"] > 96 << 20
        assert mapped_bytes(tmp_path / "tape" / "data.mdb") < 2 * REMAP_BYTES


def mapped_bytes(file: Path) -> int:
    """How much of a mapped file is in this process' memory."""
    resident, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def test_a_tape_that_could_not_be_opened_anew_is_opened_by_who_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> NoReturn:
        raise TapeError("too many open files")

    with Store(tmp_path) as store:
        store.write([call("r0")])
        with monkeypatch.context() as nobody_may:
            nobody_may.setattr(environment, "_open", refused)
            nobody_may.setattr(environment, "_OPENINGS", 1)
            for _ in range(2):
                with pytest.raises(TapeError, match="too many open files"):
                    store.overwrite_pass()
            with pytest.raises(TapeError, match="too many open files"):
                store.write([call("r1")])
            with pytest.raises(TapeError, match="too many open files"):
                store.cursor()
        assert [rollout.id for _, rollout in store.rollouts()] == ["r0"]
        store.write([call("r1")])
        with store.overwrite_pass() as overwriting:
            overwriting.step()
        assert [rollout.id for _, rollout in store.rollouts()] == ["r1", "r0"]


def test_a_rollout_did_not_begin_later_than_it_is_recorded(store: Store) -> None:
    entry = call("r1")
    entry.start_ns, entry.end_ns = 2**62, 2**62 + 1  # by the clock of another machine
    store.write([QueuedOperation(lambda tape: tape.record(entry, seen_ns=1_800_000_000_000_000_000))])
    rollout, (attempt,) = store.rollout("r1"), store.attempts("r1")
    assert rollout is not None
    assert rollout.created_ns == attempt.created_ns == attempt.last_seen_ns == 1_800_000_000_000_000_000
    assert [span.start_ns for span in store.spans("r1")] == [2**62]
