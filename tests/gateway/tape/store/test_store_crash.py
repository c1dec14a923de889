"""Killed, out of disk, copied: the tape is whole and holds everything that was ever called committed, and a copy is a
tape as of one commit, or none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import cast

import lmdb
import pytest
from fakes.crashing import (
    ROOM,
    back_up_and_die,
    back_up_within_a_limit,
    fill_and_go_on,
    fill_within_a_limit,
    request,
    response,
    write_forever,
)
from fakes.disks import small_disk
from fakes.entries import call, running
from fakes.forkserver import reporting
from fakes.some import some

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.tape.store import Store, environment
from penstock.gateway.tape.store.backup import copy_tape
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.environment import DATABASES, Environment

KILLS = 8


def test_what_was_committed_survives_kill_9(tmp_path: Path, processes: ForkServerContext) -> None:
    rng = random.Random(9)
    committed: dict[int, set[int]] = {}
    for life in range(KILLS):
        committed[life] = killed_after(processes, tmp_path, life, commits=rng.randrange(1, 12))
        with open_store(tmp_path) as store:
            assert list(problems(store)) == []
            for earlier, numbers in committed.items():
                assert_there(store, earlier, numbers)


def killed_after(processes: ForkServerContext, path: Path, life: int, commits: int) -> set[int]:
    """The calls that a writer had reported as committed when it was killed."""
    with reporting(processes, write_forever, path, life) as (writer, listen):
        told = [number for _ in range(commits) for number in listen.recv()]
        writer.kill()
        writer.join()
        return {*told, *rest(listen)}


def rest(listen: Connection) -> list[int]:
    """What was still in the pipe; the last report may be cut off."""
    told: list[int] = []
    try:
        while True:
            told += listen.recv()
    except (EOFError, OSError):
        return told


def assert_there(store: Store, life: int, committed: set[int]) -> None:
    """All that was committed is there and finished; what else is there is whole."""
    finished: set[int] = set()
    for span in store.spans(f"r{life}"):
        exchange = some(store.exchange(span))
        assert exchange.request_body == request(span.start_ns)
        assert span.status in (SpanStatus.OK, SpanStatus.INTERRUPTED)
        if span.status == SpanStatus.OK:
            assert exchange.response_body == response(span.start_ns)
            finished.add(span.start_ns)
    assert committed <= finished


@pytest.mark.slow
def test_a_full_disk_refuses_and_harms_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * ROOM) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(ROOM))
        fill_and_go_on(disk / "data", ballast.unlink)


def test_a_limit_on_file_sizes_refuses_and_harms_nothing(tmp_path: Path, processes: ForkServerContext) -> None:
    writer = processes.Process(target=fill_within_a_limit, args=(tmp_path,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0


COPIES = 2


def records(path: Path) -> Mapping[str, list[tuple[bytes, bytes]]]:
    """Every byte that a tape holds, by database."""
    tape = Environment(path, readonly=True, map_bytes=1 << 20)
    try:
        with tape.read() as txn:
            return {name: list(txn.cursor(db=tape.dbs[name])) for name in DATABASES}
    finally:
        tape.close()


def copy(source: Path, target: Path) -> None:
    with copy_tape(source, target) as made, Store(made, readonly=True) as store:
        assert list(problems(store)) == []


def readers(store: Store) -> str:
    """LMDB's table of those who read."""
    opened = cast("lmdb.Environment", vars(vars(store)["_env"])["_env"])
    return opened.readers()


def written(path: Path) -> Path:
    """A tape with calls that have ended and one that runs."""
    with open_store(path) as store:
        for number in range(40):
            store.write([call(f"r{number % 7}", request=request(number), response=response(number))])
        store.write([running("r1", "a1", b"it runs")])
    return path


def test_a_copy_has_every_byte_of_the_tape(tmp_path: Path) -> None:
    written(tmp_path / "data")
    copy(tmp_path / "data", tmp_path / "copy")
    assert sorted(one.name for one in (tmp_path / "copy").iterdir()) == ["lock", "tape"]
    assert [one.name for one in (tmp_path / "copy" / "tape").iterdir()] == ["data.mdb"]
    assert records(tmp_path / "copy") == records(tmp_path / "data")
    assert sum(map(len, records(tmp_path / "copy").values())) > 40
    assert (tmp_path / "copy" / "tape" / "data.mdb").stat().st_mode & 0o777 == 0o600


def test_a_copy_goes_on_as_a_tape(tmp_path: Path) -> None:
    copy(written(tmp_path / "data"), tmp_path / "copy")
    with open_store(tmp_path / "copy") as store:
        assert [span.status for span in store.spans("r1")][-1] == SpanStatus.INTERRUPTED
        store.write([call("r1", response=b"afterwards")])
        assert list(problems(store)) == []


def test_a_copy_while_calls_are_written_is_the_tape_as_of_one_commit(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    with reporting(processes, write_forever, tmp_path / "data", 1) as (_, listen):
        told = set(listen.recv())
        for number in range(COPIES):
            told |= set(listen.recv())
            copy(tmp_path / "data", tmp_path / f"copy-{number}")
            with Store(tmp_path / f"copy-{number}", readonly=True) as store:
                assert told <= {span.start_ns for span in store.spans("r1") if span.status == SpanStatus.OK}


def test_a_copy_that_is_killed_is_no_tape_and_is_made_anew(tmp_path: Path, processes: ForkServerContext) -> None:
    written(tmp_path / "data")
    chance = random.Random(3)
    for number in range(5):
        target = tmp_path / f"copy-{number}"
        copier = processes.Process(target=back_up_and_die, args=(tmp_path / "data", target, chance.randrange(12)))
        copier.start()
        copier.join()
        assert copier.exitcode == -9
        with pytest.raises(TapeError, match="holds no tape"):
            Store(target, readonly=True)
        copy(tmp_path / "data", target)
        assert records(target) == records(tmp_path / "data")


def test_a_full_disk_leaves_no_tape(tmp_path: Path, processes: ForkServerContext) -> None:
    with open_store(tmp_path / "data") as store:
        store.write([call(request=random.Random(1).randbytes(4 << 20))])
    copier = processes.Process(target=back_up_within_a_limit, args=(tmp_path / "data", tmp_path / "copy"))
    copier.start()
    copier.join()
    assert copier.exitcode == 0
    assert all(path.is_dir() or path.name == "lock" for path in (tmp_path / "copy").rglob("*"))
    copy(tmp_path / "data", tmp_path / "copy")
    assert records(tmp_path / "copy") == records(tmp_path / "data")


def test_pages_that_a_killed_copy_held_are_used_again(
    tmp_path: Path, processes: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that is at work takes its place in LMDB's table of readers away when the file grows."""
    monkeypatch.setattr(environment, "REMAP_BYTES", 1 << 16)
    with open_store(written(tmp_path / "data")) as store:
        copier = processes.Process(target=back_up_and_die, args=(tmp_path / "data", tmp_path / "copy", 6))
        copier.start()
        copier.join()
        assert copier.exitcode == -9
        assert str(copier.pid) in readers(store)
        for number in range(64):
            store.write([call("big", request=random.Random(number).randbytes(50_000))])
        assert str(copier.pid) not in readers(store)


def test_a_tape_is_never_overwritten(tmp_path: Path) -> None:
    written(tmp_path / "data")
    copy(tmp_path / "data", tmp_path / "copy")
    with open_store(tmp_path / "data") as store:
        store.write([call("r9")])
    before = records(tmp_path / "copy")
    with pytest.raises(TapeError, match="copy holds a tape already, which stays as it is; name another directory"):
        copy(tmp_path / "data", tmp_path / "copy")
    assert records(tmp_path / "copy") == before
    with pytest.raises(TapeError, match="data holds a tape already"):
        copy(tmp_path / "data", tmp_path / "data")


def test_a_copy_that_is_not_wanted_leaves_what_was_there(tmp_path: Path) -> None:
    written(tmp_path / "data")
    for name in ("penstock.toml", "partial/thesis.tex", "partial/tape/data.mdb"):
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine\n")
    for target in ("there", "new"):
        with pytest.raises(RuntimeError), copy_tape(tmp_path / "data", tmp_path / target):
            raise RuntimeError
        with pytest.raises(TapeError, match="holds no tape"):
            Store(tmp_path / target, readonly=True)
    copy(tmp_path / "data", tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"lock", "partial", "penstock.toml", "tape"}
    assert (tmp_path / "there" / "partial" / "thesis.tex").read_text() == "mine\n"
    assert (tmp_path / "there" / "partial" / "tape" / "data.mdb").read_text() == "mine\n"


def test_two_copies_at_once_do_not_mix(tmp_path: Path) -> None:
    written(tmp_path / "data")
    copy(tmp_path / "data", tmp_path / "other")
    with copy_tape(tmp_path / "data", tmp_path / "copy"), pytest.raises(TapeError, match="another gateway writes"):
        copy(tmp_path / "other", tmp_path / "copy")
    assert records(tmp_path / "copy") == records(tmp_path / "data")
