"""The texts of an index: what a search finds in them, in memory, in files, and in files that were opened again."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.gateway.followers.index import texts as texts_module
from penstock.gateway.followers.index.segments import SegmentDirectory, SegmentFile
from penstock.gateway.followers.index.texts import TextIndex
from penstock.gateway.model.turn import Passage

WORDS = [
    "Where",
    "is",
    "my",
    "FLIGHT",
    "straße",
    "reiſe",
    "İstanbul",
    "日本語",
    "K",
    "to",
    "Rome",
    "seat 21c",
    "\u0000",
    "é",
]
SPAN = ("r1", "a1", 1)
sayings = st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), max_size=4)
needles = st.one_of(
    st.sampled_from(
        [*WORDS, "flight", "strasse", "is my", "istanbul", "k", "日本", "e", "reise", "where is my flight to"]
    ),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join),
).map(str.casefold)


@contextmanager
def opened() -> Generator[SegmentDirectory]:
    with tempfile.TemporaryDirectory() as path:
        segments = SegmentDirectory(Path(path))
        yield segments
        segments.close()


def passages(texts: list[str]) -> list[Passage]:
    return [Passage(False, "user", "text", None, None, text) for text in texts]


def found(texts: TextIndex, needles: list[tuple[str, ...]], before: int | None = None) -> list[set[int]]:
    """All that a search finds, after its parts were seen to go from the newest to the oldest."""
    hits: list[set[int]] = [set() for _ in needles]
    high = before
    for part in texts.search(needles, before):
        assert high is None or part.low < high
        for some, cursors in zip(hits, part.cursors, strict=True):
            assert all(part.low <= cursor for cursor in cursors.tolist())
            assert high is None or all(cursor < high for cursor in cursors.tolist() if before is None)
            some.update(cursors.tolist())
        high = part.low
    assert high == 0
    return [{cursor for cursor in some if before is None or cursor < before} for some in hits]


@settings(deadline=None)
@given(
    st.lists(st.one_of(sayings, st.just("seal"), st.just("open")), max_size=30),
    st.lists(st.tuples(needles) | st.tuples(needles, needles), min_size=1, max_size=3),
    st.none() | st.integers(1, 40),
)
def test_a_search_finds_any_part_of_a_text_and_nothing_else(
    happens: list[list[str] | str], needles: list[tuple[str, ...]], before: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patched, opened() as segments:
        patched.setattr("penstock.gateway.followers.index.texts.BLOCK", 100)
        patched.setattr("penstock.gateway.followers.index.texts.FIRST", 1)
        patched.setattr("os.fsync", int)  # nothing here outlives the test
        files, texts, said = list[SegmentFile](), TextIndex(segments, []), dict[int, list[str]]()
        for cursor, action in enumerate(happens, 1):
            if isinstance(action, list):
                texts.add(cursor, SPAN, passages(action))
                said[cursor] = action
                continue
            new = texts.seal(cursor)
            texts.adopt_sealed(new)
            files += new
            if action == "open":
                texts.close()
                texts = TextIndex(segments, files)
        wanted = [
            {
                cursor
                for cursor, some in said.items()
                if (before is None or cursor < before)
                and any(one in text.casefold() for text in some for one in needle)
            }
            for needle in needles
        ]
        assert found(texts, needles, before) == wanted
        event(f"found: {any(wanted)}, files: {bool(files)}")


def test_a_search_reads_few_blocks() -> None:
    with opened() as segments, pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.gateway.followers.index.texts.BLOCK", 2000)
        texts = TextIndex(segments, [])
        for cursor in range(1, 400):
            texts.add(cursor, SPAN, passages([f"Passenger number {cursor:03} has asked for a seat at the window"]))
        texts.adopt_sealed(texts.seal(400))
        read, hits = list[int](), texts_module.hits_in

        def counted(cursors: Any, *given: Any) -> Any:
            read.append(len(cursors))
            return hits(cursors, *given)

        patched.setattr(texts_module, "hits_in", counted)
        assert found(texts, [("number 217 has",)]) == [{217}]
        assert 1 <= len(read) <= 2


def test_a_damaged_file_is_told() -> None:
    with opened() as segments:
        texts = TextIndex(segments, [])
        texts.add(1, SPAN, passages(["hello"]))
        files = texts.seal(1)
        path = segments.path / files[0].name
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(Exception, match=r"(?i)parquet"):
            TextIndex(segments, files)


def filled(segments: SegmentDirectory, spans: int, text: str) -> TextIndex:
    texts = TextIndex(segments, [])
    for cursor in range(1, spans + 1):
        texts.add(cursor, SPAN, passages([text.format(cursor)]))
    texts.adopt_sealed(texts.seal(spans))
    return texts


def test_a_search_ends_in_time_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "BLOCK", 1)
    with opened() as segments:
        texts = filled(segments, 20, "the same text, {}")
        needle = [("same text",)]
        for round in range(1, 20):
            parts = list(
                texts.search(needle, until=0.0)
            )  # no time at all: a block that was not read before, and no more
            assert [(part.low, part.last) for part in parts] == [(21 - round, True)]
            assert sorted(parts[0].cursors[0].tolist()) == list(range(21 - round, 21))
        assert [part.low for part in texts.search(needle, until=0.0)] == [0]
        monkeypatch.setattr(texts_module, "hits_in", None)
        assert [part.low for part in texts.search(needle, before=10)] == [0]  # nothing is read again


def test_a_search_goes_on_behind_what_is_not_full_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read that again each time, and stopped there: a list of rollouts was looked for without end."""
    monkeypatch.setattr(texts_module, "BLOCK", 1)
    with opened() as segments:
        texts = filled(segments, 3, "the same text, {}")
        monkeypatch.setattr(texts_module, "BLOCK", 10_000)
        texts.add(4, SPAN, passages(["the same text, 4"]))
        lows = [list(texts.search([("same text",)], until=0.0))[-1].low for _ in range(3)]
        assert lows == [3, 2, 0]


def test_much_text_of_one_span_takes_little_memory() -> None:
    with opened() as segments:
        texts = TextIndex(segments, [])
        tracemalloc.start()
        texts.add(1, SPAN, passages([f"{number:08}" * 16 for number in range(40_000)]))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 60 << 20  # of 5 MB of text, most of it Python's own strings
        assert found(texts, [("00039999",)]) == [{1}]
