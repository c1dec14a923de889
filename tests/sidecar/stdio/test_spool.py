"""What is on disk is what passed; what is missing is said; nobody else can read it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, SERVER, StdioFrame, parse_frames
from penstock.sidecar.stdio.delivery import Destination, destination_record, send_leftover
from penstock.sidecar.stdio.spool import SPOOL_BYTES, LinePiece, Spool, write_about


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "state" / "0-1", SPOOL_BYTES, segment=200)


def line(text: str) -> list[LinePiece]:
    data = text.encode() + b"\n"
    return [LinePiece(data, len(data), True)]


def put(spool: Spool, count: int) -> None:
    for number in range(count):
        spool.put(CLIENT, line(f"line {number}"), number)


def everything(spool: Spool, most: int = 150) -> list[StdioFrame]:
    """All frames, as a sender reads them."""
    found: list[StdioFrame] = []
    while body := spool.after(found[-1].sequence if found else 0, most):
        found += parse_frames(body)
    return found


def test_frames_are_read_in_their_order_from_several_files(spool: Spool) -> None:
    put(spool, 20)
    assert [frame.data for frame in everything(spool)] == [f"line {number}\n".encode() for number in range(20)]
    assert len(list(spool.folder.glob("*.frames"))) > 3
    put(spool, 1)
    assert [frame.sequence for frame in parse_frames(spool.after(20, 100))] == [21]
    # Somebody asks again for what was read before.
    assert [frame.sequence for frame in parse_frames(spool.after(3, 60))] == [4]


def test_files_go_that_nobody_needs(spool: Spool) -> None:
    put(spool, 20)
    before = len(list(spool.folder.glob("*.frames")))
    spool.acknowledge(18, [2])
    left = {frame.sequence for path in spool.folder.glob("*.frames") for frame in parse_frames(path.read_bytes())}
    assert {2, 19, 20} <= left
    assert len(left) < 20
    assert len(list(spool.folder.glob("*.frames"))) < before
    body, lost = spool.select([2, 19], 1000)
    assert [frame.sequence for frame in parse_frames(body)] == [2, 19]
    assert lost == []
    assert spool.select([9], 1000) == (b"", [9])


def test_only_its_owner_reads_it(spool: Spool) -> None:
    put(spool, 1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (spool.folder, *spool.folder.iterdir())}
    assert set(modes.values()) == {0o700, 0o600}
    assert modes[spool.folder.name] == 0o700


def test_a_session_that_is_sent_is_gone(spool: Spool) -> None:
    put(spool, 20)
    spool.remove()
    assert not spool.folder.exists()


def test_what_has_no_room_is_said_to_be_missing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "0-1", 1000, segment=100)
    put(spool, 40)
    kept = everything(spool)
    assert spool.missed
    assert sum(path.stat().st_size for path in spool.folder.glob("*.frames")) <= 1000
    spool.acknowledge(kept[-1].sequence, [])
    spool.put(SERVER, line("again"), 99)
    gap, after = everything(spool)[-2:]
    said = json.loads(gap.data)
    assert (gap.kind, after.data) == (GAP, b"again\n")
    assert said == {"lines": 40 - len(kept), "since_ns": len(kept), "cut": ["client"]}
    assert gap.size == sum(len(f"line {number}\n") for number in range(len(kept), 40))


def test_the_rest_of_a_line_that_has_lost_a_part_is_left_out(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "0-1", 1000, segment=100)
    spool.put(CLIENT, [LinePiece(b"begun", 5, False), LinePiece(b"x" * 2000, 2000, False)], 1)
    spool.put(CLIENT, [LinePiece(b"its end\n", 8, True), *line("the next")], 2)
    begun, gap, following = everything(spool)
    assert (begun.data, begun.last) == (b"begun", False)
    assert (gap.kind, gap.size) == (GAP, 2008)
    assert following.data == b"the next\n"


@given(st.integers(0, 30), st.integers(1, 400))
def test_what_a_killed_wrapper_has_left_is_found(count: int, torn: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        home = Path(os.environ.get("TMPDIR", "/tmp")) / f"penstock-spool-{os.getpid()}"
        patch.setenv("XDG_STATE_HOME", str(home))
        spool = Spool(home / "0-1", SPOOL_BYTES, segment=300)
        try:
            put(spool, count)
            whole = everything(spool)
            spool.close()
            if files := sorted(spool.folder.glob("*.frames")):
                data = files[-1].read_bytes()
                files[-1].write_bytes(data[: max(0, len(data) - torn)])
            found = Spool(spool.folder, SPOOL_BYTES)
            found.recover(77)
            frames_left = everything(found)
            *lines, end = frames_left or [StdioFrame(END, 1, 77, 0, b"")]
            assert lines == whole[: len(lines)]
            assert end.kind == END
            assert not frames_left or json.loads(end.data) == {"by": "killed"}
            assert [frame.sequence for frame in frames_left] == list(range(1, len(frames_left) + 1))
            found.remove()
        finally:
            spool.remove()


def test_one_that_lives_is_left_alone(spool: Spool) -> None:
    with pytest.raises(OSError, match="temporarily unavailable"):
        Spool(spool.folder, 0)


@pytest.mark.parametrize(("days", "kept"), [(29, True), (31, False)])
def test_what_no_gateway_takes_is_removed_after_a_month(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], days: int, kept: bool
) -> None:
    folder = tmp_path / "0-1"
    spool = Spool(folder, SPOOL_BYTES)
    nowhere = Destination("http://127.0.0.1:9", None)
    write_about(folder, destination_record(nowhere, "tools"))
    put(spool, 1)
    spool.close()
    then = time.time() - days * 86400
    os.utime(folder, (then, then))
    assert not send_leftover(folder, nowhere, lambda: False)
    assert folder.exists() == kept
    assert ("could not be sent for a month" in capfd.readouterr().err) != kept
