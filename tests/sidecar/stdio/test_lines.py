"""Whatever passes, and however it is cut into reads: the pieces are all of it, and lines are where they were."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.stdio_frames import CLIENT, TAIL, StdioFrame, pack_frame, parse_frames
from penstock.sidecar.stdio import spool as module
from penstock.sidecar.stdio.spool import LinePiece, LineSplitter

STREAMS = st.lists(st.sampled_from([b"", b"\n", b"\r\n", b"\xff\xfe\0", b'{"id":1}', b"x" * 40]), max_size=30).map(
    b"".join
)
CUTS = st.lists(st.integers(0, 200), max_size=12)


def reads(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream as it may come: no read is empty, because that is its end."""
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[start:end] for start, end in pairwise(places)]


def fed(lines: LineSplitter, stream: bytes, cuts: list[int]) -> list[LinePiece]:
    return [piece for data in reads(stream, cuts) for piece in lines.feed(data)] + lines.close()


def put_together(pieces: list[LinePiece]) -> list[tuple[bytes, int]]:
    """(what is kept of it, bytes that passed) of each line."""
    made: list[tuple[bytes, int]] = []
    kept, size = b"", 0
    for piece in pieces:
        kept, size = kept + piece.data, size + piece.size
        if piece.last:
            made.append((kept, size))
            kept, size = b"", 0
    assert not size, "a line has no end"
    return made


@given(STREAMS, CUTS, st.integers(1, 50))
def test_the_lines_are_those_of_the_stream(stream: bytes, cuts: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        found = put_together(fed(LineSplitter(), stream, cuts))
    assert [kept for kept, _ in found] == stream.splitlines(keepends=True) if b"\r" not in stream else True
    assert b"".join(kept for kept, _ in found) == stream
    assert all(kept.count(b"\n") <= 1 and len(kept) == size for kept, size in found)
    assert all(kept.endswith(b"\n") for kept, _ in found[:-1])


@given(STREAMS, CUTS, st.integers(1, 50), st.integers(0, 60))
def test_a_line_that_is_too_long_keeps_its_beginning_and_says_how_long_it_was(
    stream: bytes, cuts: list[int], piece: int, limit: int
) -> None:
    lines = LineSplitter()
    lines.limit = limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        pieces = fed(lines, stream, cuts)
    whole = put_together(fed(LineSplitter(), stream, []))
    kept = put_together(pieces)
    assert [size for _, size in kept] == [size for _, size in whole]
    for (part, size), (line, _) in zip(kept, whole, strict=True):
        assert part == line if size <= limit else part.startswith(line[:limit]) and len(part) < size
        assert len(part) <= max(limit, 0) + TAIL
        assert size <= limit or line.endswith(part[limit:])


def test_a_long_line_is_not_kept_in_memory() -> None:
    lines = LineSplitter()
    lines.limit = 1 << 20
    made = [piece for _ in range(1000) for piece in lines.feed(b"x" * 65536)]
    assert sum(len(piece.data) for piece in made) <= 1 << 20
    (last,) = lines.feed(b'"id":7}\n')
    assert last.data.endswith(b'"id":7}\n')
    assert sum(piece.size for piece in [*made, last]) == 1000 * 65536 + 8


def frame(data: bytes, more: int, last: bool, sequence: int) -> StdioFrame:
    return StdioFrame(CLIENT, sequence, 5, len(data) + more, data, last)


FRAMES = st.builds(frame, st.binary(max_size=30), st.integers(0, 9), st.booleans(), st.integers(1, 1 << 40))


@given(st.lists(FRAMES, max_size=8))
def test_frames_are_what_was_packed(some: list[StdioFrame]) -> None:
    assert list(parse_frames(b"".join(map(pack_frame, some)))) == some


@given(st.lists(FRAMES, min_size=1, max_size=4), st.data())
def test_what_is_no_whole_frame_is_refused(some: list[StdioFrame], data: st.DataObject) -> None:
    body = b"".join(map(pack_frame, some))
    ends = {len(b"".join(map(pack_frame, some[:number]))) for number in range(len(some) + 1)}
    cut = data.draw(st.integers(0, len(body)).filter(lambda at: at not in ends))
    with pytest.raises(ValueError, match="no whole frame"):
        list(parse_frames(body[:cut]))
