"""What is recorded is played: the same panes, from a file, without a gateway."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest
from fakes.goldens import text_of
from fakes.process import limit_files
from fakes.rig import Base
from fakes.tui_world import World

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.screens.registry import STANDING, make_view
from penstock.tui.session_recording import (
    FORMAT,
    RecordingClient,
    RecordingError,
    ReplayClient,
    ReplayClock,
    SessionRecorder,
    load,
)
from penstock.tui.view import render_plain


async def texts(client: ReplayClient | RecordingClient, now_ns: int) -> dict[str, str]:
    """Every screen that needs no words."""
    return {
        words[0]: "".join([text_of(piece, 80) for piece in await render_plain(make_view(words), client, now_ns, 80)])
        for words in STANDING
    }


async def recorded(base: Base, path: Path) -> dict[str, str]:
    """All screens, seen once and recorded."""
    began = time.time_ns()
    recorder = SessionRecorder(path, began)
    async with RecordingClient(recorder, base.url, None, compressed=False) as client:
        found = await texts(client, began)
    recorder.close()
    return found


async def test_every_screen_is_played_as_it_was_seen(world: World, tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl.gz"
    seen = await recorded(world.base, path)
    recording = load(path)
    async with ReplayClient(recording, ReplayClock(recording, at_end=True)) as client:
        assert await texts(client, recording.began_ns) == seen


async def test_a_question_gets_the_last_answer_until_then(world: World, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl.gz"
    recorder = SessionRecorder(path, time.time_ns())
    async with RecordingClient(recorder, world.url, None, compressed=False) as client:
        before = (await client.queue()).waiting
        between = time.time_ns()
        await client.enqueue([RolloutSpec(id="in-between", input=1)])
        after = (await client.queue()).waiting
        await client.cancel("in-between")
    recorder.close()
    assert before != after
    recording = load(path)
    clock = ReplayClock(recording, at_end=True)
    async with ReplayClient(recording, clock) as client:
        assert (await client.queue()).waiting == after
        recording.ended_ns = between - recording.began_ns
        assert (await client.queue()).waiting == before
        recording.ended_ns = 0
        assert (await client.queue()).waiting == before, "the first answer stands for the time before it"


async def test_digests_and_refusals_are_played_too(world: World, tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl.gz"
    recorder = SessionRecorder(path, time.time_ns())
    async with RecordingClient(recorder, world.url, None, compressed=False) as client:
        with pytest.raises(ClientError, match="nobody"):
            await client.rollout("nobody")
        cursor = (await client.stats(spans=0)).cursor
        await client.enqueue([RolloutSpec(id="told", input=1)])
        seen = await anext(client.digests(cursor, every_s=0.1))
        await client.cancel("told")
    recorder.close()
    assert seen.rollouts == ["told"]
    recording = load(path)
    async with ReplayClient(recording, ReplayClock(recording)) as client:
        with pytest.raises(ClientError, match="nobody") as caught:
            await client.rollout("nobody")
        assert caught.value.status == 404
        assert await anext(client.digests()) == seen


async def test_nothing_is_changed_in_a_recording_and_what_it_lacks_is_said(world: World, tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl.gz"
    await recorded(world.base, path)
    recording = load(path)
    async with ReplayClient(recording, ReplayClock(recording)) as client:
        with pytest.raises(ClientError, match="nothing can be changed in it"):
            await client.set_queue("paused")
        with pytest.raises(ClientError, match="does not hold /api/runs/none: it holds what was opened"):
            await client.run("none")


async def test_filters_hold_in_a_recording(world: World, tmp_path: Path) -> None:
    path = tmp_path / "filtered.jsonl.gz"
    await recorded(world.base, path)
    recording = load(path)
    async with ReplayClient(recording, ReplayClock(recording, at_end=True)) as client:
        known = (await client.rollout_page("", 100, None)).rollouts
        failed = [row.id for row in known if row.status == "failed"]
        assert 0 < len(failed) < len(known)
        assert [row.id for row in (await client.rollout_page("status:failed", 100, None)).rollouts] == failed
        assert [row.id for row in await client.rollouts_by_id([row.id for row in known], "status:failed")] == failed
        assert (await client.rollout_page("group:nobody", 100, None)).rollouts == []
        with pytest.raises(ClientError, match="'statu'"):
            await client.rollout_page("statu:failed", 100, None)


async def test_a_recording_that_was_cut_off_is_played_as_far_as_it_goes(world: World, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    await recorded(world.base, path)
    whole = load(path)
    path.write_bytes(path.read_bytes()[:-200])
    cut = load(path)
    assert cut.answers
    assert set(cut.answers) <= set(whole.answers)


async def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(world: World, tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl.gz"
    recorder = SessionRecorder(path, time.time_ns())
    assert recorder.note == f"recording to {path}"
    limit_files(os.getpid(), path.stat().st_size + 1000)
    try:
        async with RecordingClient(recorder, world.url, None, compressed=False) as client:
            await client.queue()
            for _ in range(3):
                assert len((await client.rollout_page("", 60, None)).rollouts) >= len(world.rollouts)
        recorder.close()
    finally:
        limit_files(os.getpid(), None)
    assert recorder.note == "not recorded any more: File too large"
    assert recorder.problem == f"--record: {path} ends before its end: File too large"
    assert "GET /api/queue" in load(path).answers


HEAD = {"format": FORMAT, "began_ns": 1}


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(json.dumps(HEAD).encode() + b"\n{}\n"),
        gzip.compress(json.dumps(HEAD).encode() + b"\n[]\n"),
        gzip.compress(json.dumps(HEAD).encode() + b'\n{"at_ns": "x", "question": "q", "text": ""}\n'),
        gzip.compress(json.dumps(HEAD).encode() + b"\n\xff\n"),
        gzip.compress(json.dumps(HEAD).encode() + b"\n" + b"[" * 100_000),
        gzip.compress(json.dumps(HEAD).encode())[:12] + b"\xff" * 40,
    ],
    ids=["an empty line", "a list", "no time", "no text", "deep", "no deflate"],
)
def test_a_damaged_recording_is_told_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"is damaged: |is not a recording"):
        load(path)


def test_no_key_stands_in_a_recording(world: World, tmp_path: Path) -> None:
    path = tmp_path / "key.jsonl.gz"
    recorder = SessionRecorder(path, 0)
    _ = RecordingClient(recorder, world.url, "the-secret-key", compressed=True)
    recorder.add("GET /api/queue", b"{}", 1)
    recorder.close()
    assert b"the-secret-key" not in gzip.decompress(path.read_bytes())


# With names: made of the bytes they would differ from process to process, because gzip writes the time.
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"not json"),
        gzip.compress(json.dumps({"format": "x"}).encode()),
        gzip.compress(b"[1]"),
    ],
    ids=["nothing", "not gzip", "not JSON", "another format", "a list"],
)
def test_what_is_no_recording_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"is not a recording of `penstock tui --record`"):
        load(path)


def test_a_file_that_cannot_be_read_or_is_there_already_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"--play: .*missing cannot be read: No such file"):
        load(tmp_path / "missing")
    (tmp_path / "there").touch()
    with pytest.raises(RecordingError, match=r"--record: .*there is there already; name a new file"):
        SessionRecorder(tmp_path / "there", 0)
    with pytest.raises(RecordingError, match="cannot be written: No such file"):
        SessionRecorder(tmp_path / "no" / "folder", 0)
