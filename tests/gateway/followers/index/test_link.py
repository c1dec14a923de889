"""The process of an index and whoever asks it: killed, damaged, deleted, behind, and of another tape."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.entries import call
from fakes.indexing import caught_up, followed
from fakes.mistakes import tells
from fakes.process import ROOT, alive

from penstock.gateway.api import pagination
from penstock.gateway.api.guard import Control
from penstock.gateway.api.pagination import index_lookup, recent_walk, scan
from penstock.gateway.app import open_store
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import (
    LARGE,
    FindRequest,
    FindResult,
    IndexFailure,
    IndexLag,
    IndexLink,
    IndexReply,
    IndexRequest,
    SumRequest,
    SumResult,
    When,
)
from penstock.gateway.followers.index.process import IndexServer
from penstock.gateway.followers.index.segments import NEAR, IndexLockedError, SegmentDirectory
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus, Outcome
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.model.state import IndexView
from penstock.gateway.reading.filters import parse
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.work.operations import QueueOperations

SEALED, PATIENCE_S = 40, 60.0
DONE = AttemptStatus.SUCCEEDED
ASKED = FindRequest("spans", "rollout:r3", 0, None, 1000)


def awaited(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


def fill(store: Store, calls: int) -> None:
    """Calls of ten rollouts in turn, some to a commit."""
    made = [call(f"r{number % 10}") for number in range(calls)]
    for start in range(0, calls, 7):
        store.write(made[start : start + 7])


def expected(store: Store, filter: str = ASKED.filter, prices: Prices = Prices()) -> list[int]:  # noqa: B008
    """Where the spans of a filter are, by a scan."""
    return [int(mark[0]) for mark, span in recent_walk(store, parse(filter), prices, scan)(None) if span is not None]


@pytest.fixture
def store(store: Store) -> Store:
    """A tape with 300 calls."""
    fill(store, 300)
    return store


@contextmanager
def linked(store: Store, when: When = "always", prices: Prices | None = None) -> Generator[IndexLink]:
    """A link to the index of a tape, tended until it is ready."""
    link = IndexLink(store.path, when, store.cursor, SEALED, prices)
    try:
        if when == "always":
            awaited(lambda: ready(link))
        yield link
    finally:
        link.close()


def indexed(store: Store, sealed: int = SEALED) -> None:
    with followed(store, sealed) as index:
        assert index.find(ASKED).positions == expected(store)


def ready(link: IndexLink) -> bool:
    link.ensure_running()
    return link.view().status == "ready"


def process_of(link: IndexLink) -> subprocess.Popen[bytes]:
    found = link._process
    assert found is not None
    return found


def found(link: IndexLink, asked: FindRequest = ASKED) -> list[int]:
    """Where the rows are, once it answers: on a busy machine it may be behind at first."""
    answers: list[FindResult] = []

    def answered() -> bool:
        link.ensure_running()
        answer = link.find(asked)
        answers.extend([] if answer is None else [answer])
        return bool(answers)

    awaited(answered)
    assert answers[0].complete
    return answers[0].positions


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
    for _ in range(3):
        with linked(store) as link:
            process = process_of(link)
            for _ in range(rng.randrange(1, 12)):
                fill(store, 30)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with linked(store) as link:
        assert found(link) == expected(store)


def test_a_process_that_is_slow_is_left_to_it_and_one_that_hangs_is_given_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(store) as link:
        process = process_of(link)
        os.kill(process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("penstock.gateway.followers.index.link.PATIENCE_S", 0.2)
            assert link.find(ASKED) is None
            assert link.find(FindRequest("spans", "rollout:r4", 0, None, 1000)) is None
            assert link.view().status == "busy"
        os.kill(process.pid, signal.SIGCONT)
        awaited(lambda: ready(link))
        assert found(link) == expected(store), "an answer that came late is no answer to the next question"
        assert process_of(link) is process

        os.kill(process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("penstock.gateway.followers.index.link.PATIENCE_S", 0.2)
            patched.setattr("penstock.gateway.followers.index.link.STUCK_S", 0.2)
            assert link.find(ASKED) is None
        assert process.poll() == -signal.SIGKILL
        awaited(lambda: ready(link))
        assert found(link) == expected(store)


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "no manifest", "odd manifest"])
def test_a_damaged_index_is_made_anew(store: Store, harm: str) -> None:
    indexed(store)
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
    indexed(store)


def test_it_may_be_deleted_while_it_is_asked(store: Store) -> None:
    with linked(store) as link:
        assert found(link) == expected(store)
        shutil.rmtree(store.path / "index")
        answer = link.find(ASKED)
        assert answer is None or answer.positions == expected(store)
        link.rebuild()
        awaited(lambda: ready(link))
        assert found(link) == expected(store)


def test_a_full_disk_makes_answers_slower_and_not_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SegmentDirectory, *given: object) -> None:
        raise OSError(28, "No space left on device")

    index = TapeIndex(store, store.path / "index", SEALED)
    monkeypatch.setattr(SegmentDirectory, "finish", full)
    with pytest.raises(OSError, match="No space"):
        caught_up(index)
    monkeypatch.undo()
    index.rebuild()
    caught_up(index)
    assert index.find(ASKED).positions == expected(store)
    index.close()


def test_costs_are_by_the_list_that_the_gateway_has(store: Store, tmp_path: Path) -> None:
    """Also when its file has changed before the index is started."""
    entry = call()
    entry.usage = Usage(input_tokens=1_000_000)
    store.write([entry])
    file, row = tmp_path / "prices.toml", 'as_of = 2026-08-01\n[[price]]\nmodel = "m-*"\noutput = 0.0\ninput = '
    file.write_text(f"{row}2.0")
    prices = Prices(file)
    file.write_text(f"{row}9.0")
    with linked(store, prices=prices) as link:
        wanted = expected(store, "cost:2", prices)
        assert found(link, FindRequest("spans", "cost:2", 0, None, 1000)) == wanted
        assert len(wanted) == 1


def test_it_is_not_used_for_another_tape(store: Store, tmp_path: Path) -> None:
    """One with as many changes, and one with fewer."""
    indexed(store)
    for calls in (400, 50):
        with open_store(tmp_path / f"other-{calls}") as other:
            fill(other, calls)
            shutil.copytree(store.path / "index", other.path / "index")
            indexed(other)


def test_a_file_that_cannot_be_read_is_made_anew_at_opening(store: Store) -> None:
    """Its size and its checksum are right."""
    indexed(store)
    manifest = store.path / "index" / "manifest.json"
    told = json.loads(manifest.read_text())
    one = next(file for file in told["files"] if file["table"] == "rollouts")
    data = b"no Parquet"
    (store.path / "index" / one["name"]).write_bytes(data)
    one |= {"bytes": len(data), "crc": zlib.crc32(data)}
    manifest.write_text(json.dumps(told))
    with linked(store) as link:
        assert found(link) == expected(store)


def test_names_of_directories_are_no_columns(tmp_path: Path) -> None:
    with open_store(tmp_path / "model=foo" / "run=5") as other:
        fill(other, 100)
        with followed(other, SEALED) as index:
            asked = FindRequest("spans", "model:m-1", 0, None, 1000)
            assert index.find(asked).positions == expected(other, "model:m-1")


def test_a_tape_that_was_put_back_and_got_the_same_names_again_is_another_one(tmp_path: Path) -> None:
    def enqueue(store: Store, tenant: str, now: int) -> None:
        specs = [(f"task-{number}", RolloutSpec(metadata={"tenant": tenant})) for number in range(30)]
        store.write([QueuedOperation(lambda tape: QueueOperations(tape).enqueue(specs, now))])

    asked = FindRequest("rollouts", "metadata.tenant:new", 0, None, 100)
    with open_store(tmp_path / "old") as old:
        enqueue(old, "old", 1)
        with followed(old, 10) as index:
            assert index.find(asked).positions == []
    with open_store(tmp_path / "new") as new:
        enqueue(new, "new", 2)
        shutil.copytree(tmp_path / "old" / "index", tmp_path / "new" / "index")
        with followed(new, 10) as index:
            assert len(index.find(asked).positions) == 30


def test_a_tape_with_another_end_than_the_backup_that_it_comes_from_is_another_one(tmp_path: Path) -> None:
    """The last change of both is the end of the same rollout, and says its name only."""

    def live(store: Store, agent: str) -> None:
        for _ in range(20):
            entry = call("h1")
            entry.agent = agent
            store.write([entry])
        done = QueuedOperation(lambda tape: QueueOperations(tape).finish(("h1", "a1"), None, DONE, Outcome(), [], 10))
        store.write([done])
        assert done.refusal is None

    with open_store(tmp_path / "old") as old:
        given = QueuedOperation(lambda tape: QueueOperations(tape).hand_out("h1", RolloutSpec(), "w1", 10**18, 1))
        old.write([given])
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    with open_store(tmp_path / "old") as old:
        live(old, "old")
        with followed(old, 5):
            pass
    with open_store(tmp_path / "new") as new:
        live(new, "new")
        shutil.copytree(tmp_path / "old" / "index", tmp_path / "new" / "index")
        with followed(new, 5) as index:
            assert len(index.find(FindRequest("spans", "agent:new", 0, None, 100)).positions) == 20


def test_a_call_that_has_begun_and_is_nowhere_keeps_nobody_waiting(store: Store) -> None:
    """On a damaged tape."""
    with followed(store, SEALED) as index:
        index._running[keys.summary_key("r3", "a1", 1000)] = 5
        index._running_changed = True
        assert index.find(ASKED).positions == expected(store)


def test_a_tape_that_cannot_be_read_is_no_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is half of what changed: nothing is missing when it can be read again."""
    index = TapeIndex(store, store.path / "index", 10**6)
    ours, theirs = Pipe()
    answering = IndexServer(index, theirs)
    store.write(
        [QueuedOperation(lambda tape: QueueOperations(tape).enqueue([("late", RolloutSpec(input="flight"))], 1))]
    )
    caught_up(index)

    def unreadable(self: Store, rollout: str) -> None:
        raise TapeError("it cannot be read now")

    asked = FindRequest("rollouts", "input~flight", 0, None, 10)
    with monkeypatch.context() as patched:
        patched.setattr(TapeView, "attempts", unreadable)
        assert answering._answer(asked) == IndexFailure("it cannot be read now")
    answer = answering._answer(asked)
    assert isinstance(answer, FindResult)
    assert answer.names == ["late"]
    index.close()
    ours.close()


@pytest.mark.parametrize(("of_finding", "of_a_row"), [(1.0, 0.0), (0.1, 0.04)], ids=["a slow index", "slow rows"])
async def test_one_page_asks_a_slow_index_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, of_finding: float, of_a_row: float
) -> None:
    """However many slices the page has: each had a row of what was found, and asked for the rest anew."""
    index, clock, asked, at = TapeIndex(store, store.path / "index", SEALED), 0.0, list[FindRequest](), Store.at
    caught_up(index)

    def find(one: FindRequest) -> FindResult:
        nonlocal clock
        clock += of_finding
        asked.append(one)
        return index.find(one)

    def slowly(self: Store, cursors: Iterable[int]) -> Iterator[tuple[int, Span]]:
        nonlocal clock
        for one in at(self, cursors):
            clock += of_a_row
            yield one

    monkeypatch.setattr(Store, "at", slowly)
    monkeypatch.setattr(pagination, "time", SimpleNamespace(monotonic=lambda: clock))
    query, control = parse(ASKED.filter), cast(Control, SimpleNamespace(index=SimpleNamespace(find=find)))
    walk = recent_walk(store, query, Prices(), index_lookup(control.index, "spans", query, 0))
    page = await pagination.page(walk, None, 30)
    assert len(page.rows) == 30
    assert len(asked) == 1
    index.close()


def test_figures_wait_for_a_search_as_long_as_it_gets_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.followers.index.finder.SEARCH_S", 0.0)
    monkeypatch.setattr("penstock.gateway.followers.index.texts.BLOCK", 60)
    index, answers = TapeIndex(store, store.path / "index", 10**6), list[IndexReply]()
    ours, theirs = Pipe()
    answer = {"choices": [{"message": {"role": "assistant", "content": "gladly " * 10}}]}
    store.write([call(response=json.dumps(answer).encode()) for _ in range(5)])
    caught_up(index)
    answering, link = IndexServer(index, theirs), IndexLink(store.path, "never", store.cursor)

    def ask(question: IndexRequest, wait_s: float) -> IndexReply:
        answers.append(answering._answer(question))
        return answers[-1]

    monkeypatch.setattr(link, "_ask", ask)
    asked = SumRequest("model", "text~gladly", 0, 10)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.gateway.followers.index.link.SEARCHED_S", 0.0)
        assert link.sum(asked) is None
    found = link.sum(asked)
    assert found is not None
    assert sum(row["calls"] for row in found.rows) == 5
    assert [type(one) for one in answers] == [IndexFailure] * (len(answers) - 1) + [SumResult]
    assert len(answers) > 2
    index.close()
    ours.close()


def test_a_gateway_loads_nothing_of_what_only_the_index_needs() -> None:
    """It may not be installed; and what it does, it does in another process."""
    code = "import sys, penstock.gateway.app; print({'duckdb', 'numpy', 'pyarrow'} & sys.modules.keys())"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "set()\n"


def test_a_process_that_says_half_an_answer_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys, time\nfrom multiprocessing.connection import Connection\nimport msgspec\n"
        "from penstock.gateway.followers.index.link import IndexState\nasked = Connection(int(sys.argv[-2]))\n"
        "asked.send_bytes(msgspec.msgpack.encode(IndexState(1, 1, 0, 0, 0, 0)))\nasked.recv_bytes()\n"
        "import os\nos.write(asked.fileno(), b'\\0\\0\\1\\0abc')\ntime.sleep(600)\n"
    )
    started = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        made: Any = started([sys.executable, "-c", program, *command[-2:]], env=env, **options)
        return made

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("penstock.gateway.followers.index.link.PATIENCE_S", 2.0)
    monkeypatch.setattr("penstock.gateway.followers.index.link.STUCK_S", 2.0)
    link = IndexLink(store.path, "always", store.cursor)
    link.ensure_running()
    process = process_of(link)
    try:
        awaited(lambda: link.view().status != "starting" or process.poll() is not None)
        assert link.find(ASKED) is None
        awaited(lambda: process.poll() == -signal.SIGKILL)
    finally:
        process.kill()
        link.close()


def test_a_process_that_cannot_be_started_is_no_fault_of_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(command: list[str], **options: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", start)
    link = IndexLink(store.path, "always", store.cursor)
    link.ensure_running()
    assert link.view().status == "starting"
    assert tells(caplog.text, "the process of the index cannot be started", "Too many open files")


def test_nobody_waits_for_an_index_that_is_far_behind(store: Store) -> None:
    index = TapeIndex(store, store.path / "index", 10**6)
    ours, theirs = Pipe()
    fill(store, NEAR + 1)
    assert IndexServer(index, theirs)._answer(ASKED) == IndexLag(0)
    caught_up(index)
    assert index.find(ASKED).positions == expected(store)
    index.close()
    ours.close()


def test_two_processes_never_have_one_index_open(store: Store) -> None:
    index = TapeIndex(store, store.path / "index", SEALED)
    with pytest.raises(IndexLockedError, match="another process has the index"):
        TapeIndex(store, store.path / "index", SEALED)
    index.close()


def test_it_ends_with_its_gateway(store: Store) -> None:
    """Also when that was killed."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom penstock.gateway.followers.index.link import IndexLink\n"
        "link = IndexLink(Path(sys.argv[1]), 'always', lambda: 1)\n"
        "link.ensure_running()\nprint(link._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    gateway = subprocess.Popen(
        [sys.executable, "-c", program, str(store.path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert gateway.stdout is not None
    child = int(gateway.stdout.readline())
    try:
        awaited(lambda: (store.path / "index" / "lock").exists())
    finally:
        gateway.kill()
        gateway.communicate()
    awaited(lambda: not alive(child))


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
    link = IndexLink(tmp_path, when, lambda: changes)
    link.missing = missing
    view = link.view()
    assert (view.status, view.newest) == (status, changes)
    assert view.reason
    assert link.should_run == (status == "starting")
    assert link.find(ASKED) is None
    assert isinstance(link.rebuild(), IndexView)


@pytest.mark.parametrize("when", ["always", "large", "never"])
async def test_what_a_killed_gateway_has_left_beside_the_files_is_deleted(tmp_path: Path, when: When) -> None:
    index = tmp_path / "index"
    for name in ("now/1", "linked/0123", "spill"):
        (index / name).mkdir(parents=True)
        (index / name / "spans.parquet").write_bytes(b"said")
    link = IndexLink(tmp_path, when, lambda: 0)
    assert list(index.iterdir()) != [], "they may be those of the gateway that is about to hand over"
    await link.start()
    assert list(index.iterdir()) == []
    assert not link.has_files
    (index / "spans-1.parquet.new").write_bytes(b"said")
    assert link.has_files
