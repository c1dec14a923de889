"""How an index reads texts: what it leaves out, what it holds in memory, and what a damaged tape does to it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import body
from fakes.indexing import caught_up

from penstock.gateway.api.pagination import recent_walk, scan
from penstock.gateway.followers.index.finder import NoAnswerError
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import FindRequest
from penstock.gateway.followers.index.tables import IndexTables
from penstock.gateway.model.facts import UNREAD
from penstock.gateway.model.prices import Prices
from penstock.gateway.reading.filters import parse
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.tape.store.view import TapeView

T0 = 1_790_000_000_000_000_000


@pytest.fixture
def index(store: Store, tmp_path: Path) -> Generator[TapeIndex]:
    made = TapeIndex(store, tmp_path / "index")
    yield made
    made.close()


def call(request: Any, answer: Any, dialect: str = "chat", rollout: str = "r1") -> SpanEntry:
    said = body(json.dumps(request).encode(), json.dumps(answer).encode())
    return SpanEntry(rollout, "a1", kind="llm", start_ns=T0, end_ns=T0, status="ok", dialect=dialect, body=said)


def chat(*texts: str, answer: str = "fine") -> tuple[Any, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": messages}, {"choices": [{"message": {"role": "assistant", "content": answer}}]}


def hits(store: Store, index: TapeIndex, text: str) -> list[int]:
    """The sequences of the spans that say a text, by the index and by a scan."""
    query = parse(f'text~"{text}"')
    caught_up(index)
    wanted = sorted(span.sequence for _, span in recent_walk(store, query, Prices(), scan)(None) if span is not None)
    found = index.find(FindRequest("spans", str(query), 0, None, 100)).positions
    assert sorted(span.sequence for _, span in store.at(found)) == wanted
    return wanted


def test_what_an_attempt_begins_with_is_said_by_its_first_conversation(store: Store, index: TapeIndex) -> None:
    """Not by what is no conversation."""
    store.write([call({"input": "look up"}, {"data": []}, "embeddings")])
    store.write([call(*chat("an example", "its answer", "the question"))])
    store.write([call(*chat("an example", "its answer", "the question", "fine", "thanks"))])
    assert hits(store, index, "an example") == [2]
    assert hits(store, index, "its answer") == [2]
    assert hits(store, index, "thanks") == [3]
    assert hits(store, index, "fine") == [2, 3]


def test_attributes_of_an_agents_span_are_no_facts_of_a_call(store: Store, index: TapeIndex) -> None:
    """Whatever their names and values are, the index goes on, and filters find nothing in them."""
    sent: dict[str, Any] = {UNREAD: 5, "penstock.reward.value": "much"}
    store.write([SpanEntry("r1", "a1", kind="otel", start_ns=T0, end_ns=T0, status="ok", attributes=sent)])
    caught_up(index)
    for text, found in (("kind:otel", 1), ("unread:*", 0)):
        query = parse(text)
        assert len(index.find(FindRequest("spans", text, 0, None, 100)).positions) == found
        assert sum(span is not None for _, span in recent_walk(store, query, Prices(), scan)(None)) == found


def test_a_damaged_body_is_left_out_and_nothing_is_read_twice(
    store: Store, index: TapeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        store.write([call(*chat(f"question {number}"), rollout=f"r{number}")])
    read, damaged = TapeView.body, store.find_response("none") is None

    def torn(self: TapeView, number: int, *known: Any) -> Any:
        if number == 3 and damaged:
            raise ValueError("not what it should be")
        return read(self, number, *known)

    monkeypatch.setattr(TapeView, "body", torn)
    caught_up(index)
    monkeypatch.undo()
    for number in range(6):
        found = index.find(FindRequest("spans", f'text~"question {number}"', 0, None, 100)).positions
        assert len(found) == (0 if number == 2 else 1), number


@pytest.mark.parametrize(
    ("database", "left"),
    [*((one, [0, 1, 3, 4, 5]) for one in ("attempts", "rollouts", "log")), ("last of log", [0, 1, 2, 3, 4])],
)
def test_a_damaged_record_is_left_out_and_what_comes_after_it_is_not(
    store: Store, index: TapeIndex, database: str, left: list[int]
) -> None:
    for number in range(6):
        store.write([call(*chat(f"question {number}"), rollout=f"r{number}")])
    with store.view() as view:
        at = 5 if database == "last of log" else 2
        place, last = view.origins(f"r{at}"), view.log_gap(3 * at + 1)[1]
        assert place is not None
        (attempt,) = [key for key, _ in view.scan("attempts") if key.startswith(keys.number(place.number))]
    harmed = {"attempts": attempt, "rollouts": keys.rollout_key(f"r{at}")}.get(database, keys.number(last))
    store.write([QueuedOperation(lambda tape: tape.put(database.split()[-1], harmed, b"\xff\xff"))])
    caught_up(index)
    assert index.find(FindRequest("rollouts", "", 0, None, 100)).names == [f"r{number}" for number in reversed(left)]
    index._seal()
    assert index.follow(time.monotonic() + 60)


def test_much_text_is_sealed_however_few_the_spans(
    store: Store, index: TapeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.followers.index.follower.UNSEALED_BYTES", 1000)
    store.write([call(*chat("long " * 300))])
    caught_up(index)
    assert index.state().fresh == 0
    assert hits(store, index, "long long") == [1]


def test_snapshots_are_few_and_gone_at_the_end(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.followers.index.follower.FRESH_S", 0.0)
    index, files = TapeIndex(store, tmp_path / "index"), dict[str, list[str]]()
    for number in range(5):
        store.write([call(*chat(f"question {number}"))])
        caught_up(index)
        files = index.files()
        assert all(Path(name).exists() for names in files.values() for name in names)
    now = tmp_path / "index" / "now"
    assert len(list(now.iterdir())) == 2
    assert index.files() == files  # nothing has changed
    index.close()
    assert not now.exists()


def test_a_snapshot_that_cannot_be_written_is_no_fault_of_the_index(
    store: Store, index: TapeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: IndexTables, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    store.write([call(*chat("a question"))])
    caught_up(index)
    with monkeypatch.context() as patched:
        patched.setattr(IndexTables, "write", full)
        with pytest.raises(NoAnswerError, match=r"what is in memory cannot be written: .*No space left"):
            index.files()
    assert not list((tmp_path / "index" / "now").iterdir())
    assert index.files()["spans"]
