"""What is in a lake: everything that is on the tape, once, whatever is killed, full or in a hurry."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.entries import body, conversation, finish, running
from fakes.forgetting import forget
from fakes.indexing import caught_up
from fakes.mistakes import tells
from fakes.process import PATHS
from fakes.s3 import KEY, SECRET, bucket
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.console.commands.serve import follow_lake, write_lake
from penstock.gateway.app import open_store
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.sql.views import VIEWS, statements
from penstock.gateway.followers.lake.lake import OURS, Lake, LakeTable
from penstock.gateway.followers.lake.location import (
    CommitConflictError,
    LakeFiles,
    LakeLocation,
    LakeUnreachableError,
    LakeUnusableError,
)
from penstock.gateway.followers.lake.rows import ALWAYS, BODIES, SCHEMA, TABLE_DEFINITIONS, RowChunk
from penstock.gateway.model.prices import Prices
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.tape.store.view import TapeView

deltalake: Any = import_module("deltalake")
duckdb: Any = import_module("duckdb")
pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")
"""None of them has types that are checked."""
T0 = 1_790_000_000_000_000_000
DAY_NS = 86_400 * 10**9
Row = dict[str, Any]


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with open_store(tmp_path / "data") as made:
        made.secret()
        yield made


def lake_of(store: Store, to: Path | str, bodies: bool = True, rows: int = 1000) -> Lake:
    return Lake(store, LakeLocation(str(to)), Prices(), bodies=bodies, rows=rows)


def fill(lake: Lake) -> None:
    """Until there is nothing new."""
    while lake.step() is not None:
        pass


def rows_of(to: Path | str, table: str) -> list[Row]:
    """The rows of a table as a reader finds them, by cursor."""
    options = {} if isinstance(to, Path) else {"aws_allow_http": "true"}
    found = deltalake.DeltaTable(f"{to}/{table}", storage_options=options).to_pyarrow_table().to_pylist()
    return sorted(
        found, key=lambda row: tuple(map(str, (row[TABLE_DEFINITIONS[table].key], row.get("position"), row["rollout"])))
    )


def spans_on(store: Store) -> list[tuple[str, str, int]]:
    found = [span for _, rollout in store.rollouts() for span in store.spans(rollout.id)]
    return sorted((span.rollout, span.attempt, span.sequence) for span in found if span.status != "open")


def same_as_the_tape(store: Store, to: Path | str) -> None:
    """Every span and every body once, and of each rollout and attempt the newest row as it is on the tape."""
    wanted = spans_on(store)
    assert sorted((row["rollout"], row["attempt"], row["sequence"]) for row in rows_of(to, "spans")) == wanted
    bodies = {(row["rollout"], row["attempt"], row["sequence"]): row for row in rows_of(to, BODIES)}
    assert len(bodies) == len(rows_of(to, BODIES))
    for row in rows_of(to, "spans"):
        span = store.span(row["rollout"], row["attempt"], row["sequence"])
        assert span is not None
        exchange = store.exchange(span)
        if exchange is None:
            continue
        kept = bodies[row["rollout"], row["attempt"], row["sequence"]]
        assert (kept["request"], kept["response"]) == (exchange.request_body, exchange.response_body)
        assert row["request_hash"] == hashlib.sha256(exchange.request_body).hexdigest()
    messages = [(row["span"], row["position"]) for row in rows_of(to, "messages")]
    assert len(set(messages)) == len(messages)
    newest = {row["rollout"]: row for row in rows_of(to, "rollouts")}
    assert len({(row["rollout"], row["cursor"]) for row in rows_of(to, "rollouts")}) == len(rows_of(to, "rollouts"))
    assert {name: row["status"] for name, row in newest.items()} == {
        rollout.id: str(rollout.status) for _, rollout in store.rollouts()
    }
    calls = {(row["rollout"], row["attempt"]): row["calls"] for row in rows_of(to, "attempts")}
    assert calls == {
        (one.rollout, one.id): one.totals.calls for _, r in store.rollouts() for one in store.attempts(r.id)
    }


def it_is_whole(store: Store, to: Path) -> None:
    """As the tape, and every file is one of the newest version."""
    same_as_the_tape(store, to)
    nothing_is_left_over(to)


def mixed(store: Store) -> None:
    """Calls of several days and kinds, with tools, rewards and half a surrogate pair."""
    for number in range(3):
        store.write(conversation(4, f"r{number}"))
    answer = b'{"choices":[{"message":{"role":"assistant","content":"Stra\\u00dfe","tool_calls":'
    answer += b'[{"id":"c1","function":{"name":"find","arguments":"{\\"q\\": 1}"}}]}}]}'
    said = body(b'{"messages":[{"role":"user","content":"look"}]}', answer)
    call = SpanEntry("r9", "a1", kind="llm", start_ns=T0, end_ns=T0 + 1500, status="ok", dialect="chat", body=said)
    call.tool_calls = 1
    half = body(b'{"messages":[{"role":"user","content":"half \\ud83d of it"}]}', b"{}")
    odd = SpanEntry("r9", "a1", kind="llm", start_ns=T0, end_ns=T0 + 1500, status="ok", dialect="chat", body=half)
    reward = {"penstock.reward.value": 0.5, "penstock.reward.source": "judge"}
    given = SpanEntry(
        "r9", "a1", kind="reward", name="reward", start_ns=T0 + DAY_NS, end_ns=T0 + DAY_NS, attributes=reward
    )
    given.status = "ok"
    store.write([call, odd, given])
    store.write([running("r9", "a1")])


def plain(value: Any) -> Any:
    """A value without what DuckDB and Arrow write differently."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, dict | list):
        return (
            sorted(cast("dict[str, str]", value).items()) if isinstance(value, dict) else list(cast("list[Any]", value))
        )
    return value


def nothing(*given: Any) -> None:
    """Stands for what is not to happen."""


def test_the_tables_have_what_sql_says(store: Store, tmp_path: Path) -> None:
    """What is written for `penstock sql` is right here, too."""
    mixed(store)
    fill(lake_of(store, tmp_path / "lake"))
    index = TapeIndex(store, tmp_path / "index")
    caught_up(index)
    duck = duckdb.connect()
    for statement in statements(index.files()):
        if " from _" not in statement:
            duck.execute(statement)
    for table in ALWAYS:
        names = list(VIEWS[table].columns)
        columns = ", ".join(f'"{name}"' for name in names)
        where = "where status <> 'open'" if table == "spans" else ""
        answered = duck.execute(f"select {columns} from {table} {where}").fetchall()
        wanted = [tuple(map(plain, row)) for row in answered]
        found = [tuple(plain(row[name]) for name in names) for row in rows_of(tmp_path / "lake", table)]
        assert found, table
        assert sorted(found, key=repr) == sorted(wanted, key=repr)
    index.close()


def test_files_are_of_one_day_and_say_their_schema(store: Store, tmp_path: Path) -> None:
    mixed(store)
    fill(lake_of(store, tmp_path / "lake"))
    found = sorted(str(path.relative_to(tmp_path / "lake")) for path in (tmp_path / "lake").rglob("*.parquet"))
    assert len({name.split("/")[1] for name in found if name.startswith("spans/")}) == 3
    for name in found:
        metadata = pq.read_metadata(tmp_path / "lake" / name).metadata
        assert metadata[b"penstock.schema"] == str(SCHEMA).encode()
        assert metadata[b"penstock.table"].decode() == name.split("/")[0]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4)),
        st.just(("lake", 0)),
        st.tuples(st.just("fail"), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=8,
)


class Killed(BaseException):
    """Stands for the end of a process: nobody catches it to put something in order."""


@given(steps)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_is_there_once_whatever_is_killed(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    """A writer dies before or after a put, or before or after a commit, and the next one goes on."""
    home = tmp_path_factory.mktemp("lake")
    with open_store(home / "data") as store:
        store.secret()
        number = 0
        for what, count in steps:
            if what == "write":
                store.write(conversation(count, f"r{number % 3}", f"a{number}"))
                number += 1
            elif what == "lake":
                fill(lake_of(store, home / "to", rows=7))
            else:
                die_in(store, home / "to", count)
        store.write(conversation(1, "r0"))
        fill(lake_of(store, home / "to", rows=7))
        it_is_whole(store, home / "to")


def die_in(store: Store, to: Path, after: int) -> None:
    """A writer that is killed at its nth put or commit, before or after it."""
    left = [after]

    def mortal(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            found = do(*given)
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return found

        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LakeTable, "_put", mortal(LakeTable._put))
        patch.setattr(LakeTable, "_commit", mortal(LakeTable._commit))
        patch.setattr(LakeTable, "_discard", nothing)
        try:
            fill(lake_of(store, to, rows=7))
        except Killed:
            return


def nothing_is_left_over(to: Path) -> None:
    for table in TABLE_DEFINITIONS:
        live = {Path(uri) for uri in deltalake.DeltaTable(f"{to}/{table}").file_uris()}
        assert live == set((to / table).rglob("day=*/*.parquet"))


@pytest.mark.parametrize("what", ["rollouts", "attempts"])
def test_what_is_damaged_keeps_nothing_else_back(
    store: Store, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.write([*conversation(4, "r1"), *conversation(4, "r2")])

    def damage(tape: Transaction) -> None:
        (key, _), *_ = tape.scan(what)
        tape.put(what, key, b"\xc1")

    store.write([QueuedOperation[None](damage)])
    fill(lake_of(store, tmp_path / "lake"))
    assert {row["rollout"] for row in rows_of(tmp_path / "lake", "spans")} == {"r1", "r2"}
    assert {row["rollout"] for row in rows_of(tmp_path / "lake", "rollouts")} == {"r2"}
    assert "rollout r1 is not in the lake" in caplog.text


def test_a_writer_that_is_killed_leaves_every_row_once(store: Store, tmp_path: Path) -> None:
    to, chance = tmp_path / "lake", random.Random(7)
    for number in range(3):
        store.write(conversation(30, f"r{number}"))
        command = [sys.executable, "-m", "fakes.lake_writer", str(tmp_path / "data"), str(to)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PATHS}, **pipes) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 4)):
                if writer.stdout.readline() == "done\n":
                    break
            # It is somewhere between two chunks now, or in one.
            with suppress(subprocess.TimeoutExpired):
                writer.wait(chance.uniform(0.0, 0.02))
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
    fill(lake_of(store, to, rows=20))
    it_is_whole(store, to)


def test_two_writers_at_once_write_every_row_once(store: Store, tmp_path: Path) -> None:
    for number in range(4):
        store.write(conversation(20, f"r{number}"))
    problems = list[BaseException]()

    def run() -> None:
        try:
            fill(lake_of(store, tmp_path / "lake", rows=20))
        except BaseException as error:
            problems.append(error)

    writers = [threading.Thread(target=run) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not problems
    same_as_the_tape(store, tmp_path / "lake")
    fill(lake_of(store, tmp_path / "lake"))
    nothing_is_left_over(tmp_path / "lake")


def test_a_directory_that_another_writer_makes_meanwhile_is_no_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(conversation(3))
    lake = tmp_path / "lake"

    def look(ask: Callable[[Any], bool], path: Any) -> bool:
        found = ask(path)
        lake.mkdir(exist_ok=True)
        return found

    for ask in (os.path.isdir, os.path.exists):
        monkeypatch.setattr(os.path, ask.__name__, partial(look, ask))
    fill(lake_of(store, lake))
    same_as_the_tape(store, lake)


def test_a_writer_whose_file_another_one_has_cleaned_away_was_not_first(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(conversation(3))
    size = LakeFiles.size

    def size_of_what_is_gone(self: LakeFiles, name: str) -> int:
        monkeypatch.setattr(LakeFiles, "size", size)
        # The next one to open the lake finds a file of a version that is taken and that does not name it.
        for _ in range(2):
            fill(lake_of(store, tmp_path / "lake"))
        return self.size(name)

    monkeypatch.setattr(LakeFiles, "size", size_of_what_is_gone)
    fill(lake_of(store, tmp_path / "lake"))
    it_is_whole(store, tmp_path / "lake")


def test_a_second_writer_with_the_same_rows_is_refused(store: Store, tmp_path: Path) -> None:
    store.write(conversation(3))
    first, second = lake_of(store, tmp_path / "lake"), lake_of(store, tmp_path / "lake")
    first.open()
    second.open()
    chunk = second._reader.read(0, True)
    assert chunk is not None
    fill(first)
    for table in second._tables:
        with pytest.raises(CommitConflictError):
            table.commit(chunk)
    it_is_whole(store, tmp_path / "lake")


def test_a_full_disk_is_said_and_harms_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space ends after some files: those of a table that has no commit yet do not count, and are deleted."""
    store.write(conversation(5))
    left, written = [3], pq.write_table

    def full(*given: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        written(*given, **options)

    monkeypatch.setattr(pq, "write_table", full)
    lake = lake_of(store, tmp_path / "lake")
    with pytest.raises(LakeUnreachableError, match=f"^{tmp_path}/lake: No space left on device$"):
        lake.step()
    left[0] = 1000
    fill(lake)
    it_is_whole(store, tmp_path / "lake")


def test_an_answer_that_was_lost_is_no_second_row(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit has happened, and whoever made it hears of an error."""
    store.write(conversation(5))
    commit = LakeTable._commit

    def deaf(self: LakeTable, changed: Any, noted: Any) -> None:
        commit(self, changed, noted)
        raise LakeUnreachableError("the answer was lost")

    lake = lake_of(store, tmp_path / "lake")
    lake.open()
    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "_commit", deaf)
        with pytest.raises(LakeUnreachableError):  # of a table without rows it cannot tell
            lake.step()
    fill(lake)
    it_is_whole(store, tmp_path / "lake")


def test_bodies_that_are_asked_for_later_are_those_of_the_whole_tape(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "lake"
    store.write(conversation(5))
    fill(lake_of(store, to, bodies=False))
    assert not (to / BODIES).exists()
    fill(lake_of(store, to, rows=3))
    store.write(conversation(2, "r2"))
    fill(lake_of(store, to, bodies=False))  # a lake that has them goes on having them
    same_as_the_tape(store, to)


# -- forgetting -------------------------------------------------------------------------------------------------------


def forgetting(monkeypatch: pytest.MonkeyPatch, rollout: str, at: int) -> None:
    """The log as it is after a rollout was forgotten: a change tells it, and those before say nothing any more."""
    log_records = TapeView.log_records

    def told(view: TapeView, after: int, last: int) -> Generator[bytes]:
        for cursor, record in enumerate(log_records(view, after, last), after + 1):
            if cursor == at:
                yield b"f" + rollout.encode() + b"\0"
            elif cursor < at and record[1:].startswith(rollout.encode() + b"\0"):
                yield b"x"
            else:
                yield record

    monkeypatch.setattr(TapeView, "log_records", told)


def test_what_is_forgotten_is_in_no_file(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "lake"
    store.write(conversation(4, "kept"))
    secret = body(b'{"messages":[{"role":"user","content":"my name is Rumpelstiltskin"}]}', b"{}")
    for day in range(2):
        start = T0 + day * DAY_NS
        call = SpanEntry(
            "gone", "a1", kind="llm", start_ns=start, end_ns=start, status="ok", dialect="chat", body=secret
        )
        store.write([call, *conversation(1, "kept", f"a{day}")])
    fill(lake_of(store, to, rows=5))
    assert any(row["rollout"] == "gone" for row in rows_of(to, "messages"))
    kept = {table: [row for row in rows_of(to, table) if row["rollout"] != "gone"] for table in TABLE_DEFINITIONS}
    before = {path for path in to.rglob("day=*/*.parquet") if b"gone" in uncompressed(path)}
    store.write(conversation(1, "kept", "later"))
    forgetting(monkeypatch, "gone", store.cursor())
    found = lake_of(store, to).step()
    assert found is not None
    assert found.forgotten == 1
    assert sum(one.erased for one in found.written.values()) >= 8
    for table in TABLE_DEFINITIONS:
        now = rows_of(to, table)
        assert [row for row in now if row in kept[table]] == kept[table]
        assert not [row for row in now if row["rollout"] == "gone"]
    assert before
    assert not [path for path in before if path.exists()]
    for path in to.rglob("*"):
        if path.is_file():
            content = uncompressed(path) if "day=" in str(path) else path.read_bytes()
            assert b"Rumpelstiltskin" not in content, path
            assert b"gone" not in content, path
    nothing_is_left_over(to)


def test_it_forgets_what_its_tape_has_forgotten(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "lake"
    for at in range(12):
        store.write(conversation(3, f"r{at}"))
    fill(lake_of(store, to, rows=10))
    forget(store, "r3")
    store.write(conversation(2, "r3"))  # another of this name
    forget(store, "r7")
    fill(lake_of(store, to, rows=10))
    same_as_the_tape(store, to)
    forget(store, "r11")  # the last calls, which say whether the tape is the same one
    fill(lake_of(store, to, rows=10))
    it_is_whole(store, to)


def uncompressed(path: Path) -> bytes:
    """What is in a file, for a look at all of it."""
    return repr(pq.read_table(path).to_pylist()).encode() + path.read_bytes()


def test_rows_of_the_same_chunk_are_forgotten_too_and_later_ones_stay(store: Store, tmp_path: Path) -> None:
    """A name may come again."""
    store.write(conversation(3, "again"))
    lake = lake_of(store, tmp_path / "lake")
    lake.open()
    chunk = lake._reader.read(0, True)
    assert chunk is not None
    spans = sorted(row[0] for row in chunk.rows["spans"][next(iter(chunk.rows["spans"]))])
    chunk.forgotten["again"] = spans[1]
    lake._write(chunk)
    assert [row["span"] for row in rows_of(tmp_path / "lake", "spans")] == spans[1:]


def test_an_erasure_that_was_killed_is_made_up_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are gone with the commit; files that had them go when the next writer starts."""
    to = tmp_path / "lake"
    store.write([*conversation(2, "gone"), *conversation(2, "kept")])
    fill(lake_of(store, to))
    lake = lake_of(store, to)
    lake.open()

    def die(table: LakeTable) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "erase", die)
        with pytest.raises(Killed):
            lake._write(RowChunk(store.cursor() + 1, 0, {}, {"gone": store.cursor() + 1}))
    held = [path for path in to.rglob("day=*/*.parquet") if b"gone" in uncompressed(path)]
    assert held
    store.write(conversation(1, "kept", "later"))
    monkeypatch.setattr(Lake, "_check", nothing)  # the change that forgets is not on this tape
    lake_of(store, to).open()
    assert not [path for path in held if path.exists()]
    nothing_is_left_over(to)


def test_a_table_that_was_compacted_forgets_as_well(store: Store, tmp_path: Path) -> None:
    """Files of other names, and what they were made of."""
    to = tmp_path / "lake"
    for number in range(3):
        store.write([*conversation(2, "gone", f"a{number}"), *conversation(2, "kept", f"a{number}")])
        fill(lake_of(store, to))
    for table in ("spans", "messages"):
        deltalake.DeltaTable(f"{to}/{table}").optimize.compact()
    assert [
        path
        for path in (to / "spans").rglob("day=*/*.parquet")
        if not OURS.fullmatch(f"{path.parent.name}/{path.name}")
    ]
    lake = lake_of(store, to)
    lake.open()
    lake._write(RowChunk(store.cursor() + 1, 0, {}, {"gone": store.cursor() + 1}))
    for path in to.rglob("day=*/*.parquet"):
        assert b"gone" not in uncompressed(path)
    assert {row["rollout"] for row in rows_of(to, "spans")} == {"kept"}
    assert len(rows_of(to, "spans")) == 6
    for path in to.rglob("_delta_log/*.json"):
        assert b"gone" not in path.read_bytes()


# -- refusing ---------------------------------------------------------------------------------------------------------


def refused(lake: Lake) -> str:
    with pytest.raises(LakeUnusableError) as caught:
        lake.open()
    return str(caught.value)


def test_another_tape_and_another_place_are_refused(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "lake"
    store.write(conversation(2))
    fill(lake_of(store, to))
    with open_store(tmp_path / "other") as other:
        assert "was never served: start `penstock serve --data" in refused(lake_of(other, to))
        other.secret()
        other.write(conversation(2))
        assert tells(refused(lake_of(other, to)), f"{to}/spans", "another tape", "another --to")
    assert tells(refused(lake_of(store, tmp_path)), "no lake", "empty place")
    file = tmp_path / "file"
    file.write_text("x")
    assert tells(refused(lake_of(store, file)), f"--to: {file} is a file", "directory")
    deltalake.write_deltalake(str(tmp_path / "theirs" / "spans"), pa.table({"a": [1]}))
    assert tells(refused(lake_of(store, tmp_path / "theirs")), "spans is a table of somebody else", "another --to")
    (tmp_path / "files" / "spans").mkdir(parents=True)
    (tmp_path / "files" / "spans" / "a.csv").write_text("x")
    assert "spans holds a.csv" in refused(lake_of(store, tmp_path / "files"))
    with pytest.raises(LakeUnusableError, match="gs://b/p': a lake is in a directory or in s3://BUCKET/PREFIX"):
        LakeLocation("gs://b/p")
    for name, taken in (("a%20b", "'%20'"), ("a\\b", "'\\\\'")):
        with pytest.raises(LakeUnusableError, match=f"{re.escape(taken)} in it would be taken for another character"):
            LakeLocation(str(tmp_path / name))


def test_a_newer_schema_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(conversation(2))
    fill(lake_of(store, tmp_path / "lake"))
    monkeypatch.setattr("penstock.gateway.followers.lake.lake.SCHEMA", SCHEMA - 1)
    said = refused(lake_of(store, tmp_path / "lake"))
    assert tells(said, "schema 1", "this version writes 0", "update Penstock", "another --to")


def test_a_column_of_a_newer_version_is_refused(store: Store, tmp_path: Path) -> None:
    store.write(conversation(2))
    fill(lake_of(store, tmp_path / "lake"))
    newer = deltalake.Schema.from_arrow(pa.schema([("mood", pa.string())])).fields
    deltalake.DeltaTable(str(tmp_path / "lake" / "spans")).alter.add_columns(newer)
    said = refused(lake_of(store, tmp_path / "lake"))
    assert tells(said, "the column mood", "update Penstock", "another --to")


def test_a_tape_that_was_put_back_is_refused(store: Store, tmp_path: Path) -> None:
    to, old = tmp_path / "lake", tmp_path / "old"
    store.write(conversation(2))
    shutil.copytree(tmp_path / "data", old)
    store.write(conversation(3, "r2"))
    fill(lake_of(store, to))
    with open_store(old) as back:
        assert tells(refused(lake_of(back, to)), "put back from a backup", "another --to")
        lives = conversation(9, "r2")
        for entry in lives:
            entry.start_ns += 1
        back.write(lives)
        assert "another history of this tape up to change" in refused(lake_of(back, to))


def test_a_place_that_may_not_be_written_is_said(store: Store, tmp_path: Path) -> None:
    store.write(conversation(2))
    to = tmp_path / "lake"
    to.mkdir(mode=0o500)
    with pytest.raises(LakeUnreachableError, match=f"^{to}: Permission denied"):
        lake_of(store, to).open()


# -- going on ---------------------------------------------------------------------------------------------------------


def test_it_says_what_there_is_and_what_there_is_not(store: Store, tmp_path: Path) -> None:
    said, lake = list[str](), lake_of(store, tmp_path / "lake", bodies=False)
    write_lake(lake, said.append, threading.Event())
    assert said == ["nothing to write: the tape is empty"]
    assert not (tmp_path / "lake").exists()
    store.write(conversation(2))
    write_lake(lake, said.append, threading.Event())
    write_lake(lake, said.append, threading.Event())
    assert said[1].startswith("spans +2 (")
    assert said[1].endswith("; at change 4, up to date")
    assert said[2] == "nothing new since change 4"


def test_it_goes_on_after_what_cannot_be_reached(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is said once."""
    stop, said, warned, lake = threading.Event(), list[str](), list[str](), lake_of(store, tmp_path / "lake")
    store.write(conversation(2))
    step, left = lake.step, [3]

    def failing() -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise LakeUnreachableError("s3://b: it is away")
        return step()

    def say(line: str) -> None:
        said.append(line)
        stop.set()

    monkeypatch.setattr(lake, "step", failing)
    follow_lake(lake, 0.001, say, warned.append, stop)
    (warning,) = warned
    assert tells(warning, "s3://b: it is away", "0.001 s")
    assert said[0].startswith("spans +2 (")


# -- a bucket ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reached() -> Generator[dict[str, str]]:
    with bucket() as env:
        yield env


def test_a_bucket(store: Store, reached: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in reached.items():
        monkeypatch.setenv(name, value)
    to = "s3://lakes/of/ours"
    for number in range(2):
        store.write(conversation(3, f"r{number}"))
        fill(lake_of(store, to, rows=10))
    die_in(store, to, 0)  # pyright: ignore[reportArgumentType] - it is only handed on
    store.write([*finished("r3"), *conversation(2, "gone")])
    die_in(store, to, 5)  # pyright: ignore[reportArgumentType] - as above
    first, second = lake_of(store, to), lake_of(store, to)
    first.open()
    second.open()
    chunk = second._reader.read(second.cursor, True)
    assert chunk is not None
    fill(first)
    with pytest.raises(CommitConflictError):
        second._tables[-1].commit(chunk)
    same_as_the_tape(store, to)
    first._write(RowChunk(store.cursor() + 1, 0, {}, {"gone": store.cursor() + 1}))
    assert "gone" not in {row["rollout"] for row in rows_of(to, "spans")}
    files = {name for name in LakeLocation(to).table("spans").names() if name.startswith("day=")}
    live = deltalake.DeltaTable(f"{to}/spans", storage_options={"aws_allow_http": "true"}).file_uris()
    assert files == {uri.partition("/spans/")[2] for uri in live}


def finished(rollout: str) -> list[SpanEntry]:
    return [finish(running(rollout))]


def test_a_bucket_that_cannot_be_reached_is_named_and_no_secret_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(conversation(1))
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:9/{SECRET}", "AWS_REGION": "eu-central-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(LakeUnreachableError, match=r"^s3://lakes/x: .*Connection refused") as caught:
        lake_of(store, "s3://lakes/x").open()
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
