"""The process of an index and whoever asks it: killed, damaged, deleted, behind, and of another tape."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.entries import call
from fakes.process import ROOT

from penstock.gateway.api.pages import recent_walk, scan
from penstock.gateway.app import open_store
from penstock.gateway.filters.query import parse
from penstock.gateway.index.follower import Index
from penstock.gateway.index.link import LARGE, Link, When
from penstock.gateway.index.questions import Find
from penstock.gateway.index.segments import Held, Segments
from penstock.gateway.model.index import IndexView
from penstock.gateway.store import Store

SEALED, PATIENCE_S = 40, 60.0
ASKED = Find("spans", "rollout:r3", 0, None, 1000)


def awaited(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


def fill(store: Store, calls: int) -> None:
    """Calls of ten rollouts in turn, some to a commit."""
    made = [call(f"r{number % 10}") for number in range(calls)]
    for start in range(0, calls, 7):
        store.write(made[start : start + 7])


def expected(store: Store, filter: str = ASKED.filter) -> list[int]:
    """Where the spans of a filter are, by a scan."""
    return [int(mark[0]) for mark, span in recent_walk(store, parse(filter), scan)(None) if span is not None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A tape with 300 calls."""
    with open_store(tmp_path) as found:
        fill(found, 300)
        yield found


@contextmanager
def linked(store: Store, when: When = "always") -> Generator[Link]:
    """A link to the index of a tape, tended until it is ready."""
    link = Link(store.path, when, store.cursor, SEALED)
    try:
        if when == "always":
            awaited(lambda: ready(link))
        yield link
    finally:
        link.close()


def ready(link: Link) -> bool:
    """Whether it is, having been looked after."""
    link.tend()
    return link.view().status == "ready"


def process_of(link: Link) -> subprocess.Popen[bytes]:
    found = link._process
    assert found is not None
    return found


def found(link: Link) -> list[int]:
    answer = link.find(ASKED)
    assert answer is not None
    assert answer.complete
    return answer.positions


def test_it_finds_what_a_scan_finds_as_of_the_newest_commit(store: Store) -> None:
    with linked(store) as link:
        assert found(link) == expected(store)
        for _ in range(5):
            fill(store, 10)
            assert found(link) == expected(store)
        view = link.view()
        assert (view.cursor, view.newest) == (store.cursor(), store.cursor())
        assert view.files > 0
        assert view.bytes == sum(path.stat().st_size for path in (store.path / "index").glob("*.parquet"))


def test_a_killed_process_is_started_again_and_a_scan_answers_meanwhile(store: Store) -> None:
    with linked(store) as link:
        process = process_of(link)
        process.kill()
        process.wait()
        assert link.find(ASKED) is None
        fill(store, 100)
        awaited(lambda: ready(link))
        assert process_of(link).pid != process.pid
        assert found(link) == expected(store)


def test_kills_at_any_time_leave_it_exact(store: Store) -> None:
    """While it seals every few calls."""
    rng = random.Random(7)
    for _ in range(6):
        with linked(store) as link:
            process = process_of(link)
            for _ in range(rng.randrange(1, 12)):
                fill(store, 30)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with linked(store) as link:
        assert found(link) == expected(store)


def test_a_process_that_hangs_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.index.link.PATIENCE_S", 0.2)
    with linked(store) as link:
        process = process_of(link)
        os.kill(process.pid, signal.SIGSTOP)
        assert link.find(ASKED) is None
        assert process.poll() == -signal.SIGKILL
        awaited(lambda: ready(link))
        assert found(link) == expected(store)


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "no manifest", "odd manifest"])
def test_a_damaged_index_is_made_anew(store: Store, harm: str) -> None:
    with linked(store):
        pass
    index = store.path / "index"
    file = sorted(index.glob("spans-*.parquet"))[0]
    data = file.read_bytes()
    match harm:
        case "cut":
            file.write_bytes(data[:-20])
        case "changed":
            file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "gone":
            file.unlink()
        case "no manifest":
            (index / "manifest.json").unlink()
        case _:
            (index / "manifest.json").write_text('{"cursor": "many"}')
    with linked(store) as link:
        assert found(link) == expected(store)


def test_it_may_be_deleted_while_it_is_asked(store: Store) -> None:
    with linked(store) as link:
        shutil.rmtree(store.path / "index")
        answer = link.find(ASKED)
        assert answer is None or answer.positions == expected(store)
        link.rebuild()
        awaited(lambda: ready(link))
        assert found(link) == expected(store)


def test_a_full_disk_makes_answers_slower_and_not_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Segments, *given: object) -> None:
        raise OSError(28, "No space left on device")

    index = Index(store, store.path / "index", SEALED)
    monkeypatch.setattr(Segments, "finish", full)
    with pytest.raises(OSError, match="No space"):
        index.follow(time.monotonic() + PATIENCE_S)
    monkeypatch.undo()
    index.rebuild()
    assert index.follow(time.monotonic() + PATIENCE_S)
    assert index.find(ASKED).positions == expected(store)
    index.close()


def test_it_is_not_used_for_another_tape(store: Store, tmp_path: Path) -> None:
    """One with as many changes, and one with fewer."""
    with linked(store):
        pass
    for calls in (400, 50):
        with open_store(tmp_path / f"other-{calls}") as other:
            fill(other, calls)
            shutil.copytree(store.path / "index", other.path / "index")
            with linked(other) as link:
                assert found(link) == expected(other)


def test_two_processes_never_have_one_index_open(store: Store) -> None:
    index = Index(store, store.path / "index", SEALED)
    with pytest.raises(Held, match="another process has the index"):
        Index(store, store.path / "index", SEALED)
    index.close()


def test_it_ends_with_its_gateway(store: Store) -> None:
    """Also when that was killed."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom penstock.gateway.index.link import Link\n"
        "link = Link(Path(sys.argv[1]), 'always', lambda: 1)\n"
        "link.tend()\nprint(link._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    gateway = subprocess.Popen(
        [sys.executable, "-c", program, str(store.path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert gateway.stdout is not None
    child = int(gateway.stdout.readline())
    awaited(lambda: (store.path / "index" / "lock").exists())
    gateway.kill()
    gateway.communicate()
    awaited(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.parametrize(
    ("when", "changes", "missing", "status"),
    [
        ("large", LARGE - 1, False, "small"),
        ("large", LARGE, False, "starting"),
        ("always", 0, False, "starting"),
        ("never", LARGE, False, "off"),
        ("large", LARGE, True, "missing"),
        ("large", 0, True, "missing"),
    ],
)
def test_it_says_why_there_is_none(tmp_path: Path, when: When, changes: int, missing: bool, status: str) -> None:
    link = Link(tmp_path, when, lambda: changes)
    link.missing = missing
    view = link.view()
    assert (view.status, view.newest) == (status, changes)
    assert view.reason
    assert link.wanted == (status == "starting")
    assert link.find(ASKED) is None
    assert isinstance(link.rebuild(), IndexView)
