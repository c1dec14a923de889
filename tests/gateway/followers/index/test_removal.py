"""Forgotten rollouts leave an index: its answers at once, its files one seal after another, also if it is killed."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from fakes.entries import body
from fakes.forgetting import forget
from fakes.indexing import caught_up, followed

from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import FindRequest, SumRequest
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation

T0 = 1_790_000_000_000_000_000
SEALED = 10
"""Calls of a sealed file."""


def said(rollout: str, text: str) -> SpanEntry:
    request = b'{"messages":[{"role":"user","content":"%s"}]}' % text.encode()
    return SpanEntry(
        rollout, "a1", start_ns=T0, end_ns=T0, status="ok", dialect="chat", model=f"model-{rollout}",
        body=body(request, b'{"choices":[{"message":{"content":"ok"}}]}'),
    )  # fmt: skip


def fill(store: Store, rollouts: int) -> None:
    for at in range(rollouts):
        store.write([said(f"r{at}", f"needle-{at:03d} {turn}") for turn in range(4)])


def tidied(index: TapeIndex) -> None:
    caught_up(index)
    while index.tidy():
        pass


def count(index: TapeIndex) -> int:
    return sum(row["calls"] for row in index.sum(SumRequest("agent", "", T0, 10)).rows)


def files_with(path: Path, text: str) -> list[str]:
    found: list[str] = []
    for file in sorted(path.rglob("*.parquet")):
        rows = duckdb.execute(f"select * from read_parquet('{file}')").fetchall()
        if any(text in str(row) for row in rows) or text.encode() in file.read_bytes():
            found.append(file.name)
    return found


def test_answers_are_without_it_at_once_and_files_soon(store: Store) -> None:
    path = store.path / "index"
    fill(store, 20)
    with followed(store, SEALED) as index:
        assert count(index) == 80
        forget(store, "r3")
        forget(store, "r19")
        caught_up(index)
        assert count(index) == 72
        assert files_with(path, "needle-003") != []
        tidied(index)
        assert [word for word in ("needle-003", "needle-019", "model-r3") if files_with(path, word)] == []
        assert files_with(path, "needle-004") != []
        assert index.find(FindRequest("spans", "text~needle-003", T0, None, 10)).positions == []
        assert len(index.find(FindRequest("spans", "text~needle-004", T0, None, 10)).positions) == 4
        assert count(index) == 72


@pytest.mark.parametrize("steps", range(6))
def test_a_process_that_is_killed_goes_on_where_it_was(store: Store, steps: int) -> None:
    fill(store, 20)
    with followed(store, SEALED) as index:
        for at in (1, 6, 12, 17):
            forget(store, f"r{at}")
        caught_up(index)
        for _ in range(steps):
            index.tidy()
        files = {file.name for file in index._tables.files}
    index = TapeIndex(store, store.path / "index", SEALED)
    assert files >= {file.name for file in index._tables.files}  # nothing was made anew
    assert index.cursor > 0
    tidied(index)
    assert count(index) == 64
    for at in (1, 6, 12, 17):
        assert files_with(store.path / "index", f"needle-{at:03d}") == []
    index.close()


def test_an_index_is_still_of_its_tape_when_all_of_its_last_changes_were_forgotten(store: Store) -> None:
    fill(store, 20)
    with followed(store, SEALED):
        pass
    for at in range(20):
        forget(store, f"r{at}")
    nothing_is_left(store, 0)


def nothing_is_left(store: Store, calls: int) -> None:
    """In files of an index that goes on."""
    index = TapeIndex(store, store.path / "index", SEALED)
    assert index.cursor > 0
    tidied(index)
    assert count(index) == calls
    assert [path.name for path in (store.path / "index").glob("*.parquet")] == []
    index.close()


def test_what_is_given_to_sql_is_without_it(store: Store) -> None:
    fill(store, 20)
    with followed(store, SEALED) as index:
        forget(store, "r3")
        caught_up(index)
        for path in (path for paths in index.files().values() for path in paths):
            assert not any("r3" in row for row in duckdb.execute(f"from read_parquet('{path}')").fetchall())


def test_another_of_the_same_name_is_there(store: Store) -> None:
    fill(store, 5)
    with followed(store, SEALED) as index:
        forget(store, "r3")
        store.write([said("r3", "another")])
        tidied(index)
        assert len(index.find(FindRequest("spans", "rollout:r3", T0, None, 10)).positions) == 1
        assert len(index.find(FindRequest("rollouts", "rollout:r3", T0, None, 10)).positions) == 1
        assert files_with(store.path / "index", "needle-003") == []


@pytest.mark.parametrize("lives", [1, 2])
def test_what_the_swept_beginning_of_the_log_told_of_is_gone(store: Store, lives: int) -> None:
    fill(store, 5)
    with followed(store, SEALED):
        pass
    for life in range(lives):
        forget(store, "r0")
        if life < lives - 1:
            store.write([said("r0", f"life-{life}")])
    for at in range(1, 5):
        forget(store, f"r{at}")
    store.write([said("later", "needle-100")])
    with store.view() as view:
        later = view.origins("later")
    assert later is not None
    store.write([QueuedOperation(lambda tape: tape.erasure.sweep(later.number))])
    nothing_is_left(store, 1)
