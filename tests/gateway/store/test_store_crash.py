"""Killed, out of disk: the tape is whole and holds everything that was ever called committed."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from fakes.crashing import ROOM, fill_and_go_on, fill_within_a_limit, request, response, write_forever
from fakes.disks import small_disk
from fakes.some import some

from penstock.gateway.app import open_store
from penstock.gateway.cli.check import problems
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.store import Store

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
    listen, report = processes.Pipe(duplex=False)
    writer = processes.Process(target=write_forever, args=(path, life, report))
    writer.start()
    report.close()
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
