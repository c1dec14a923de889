"""A running stream's events are taken as they come, whatever its pieces, its encoding, and what fails meanwhile."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.traffic.calls import session_stream
from penstock.gateway.traffic.calls.session_stream import SessionStream
from penstock.gateway.wire.dialects.sse import events

MOST = 1 << 16
NOBODY: Any = None


class Call:
    """A call that notes what it is given."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def hide_events(self, events: bytes) -> bytes:
        return events.replace(b"secret", b"******")

    def event_operation(self, stream: SessionStream, events: bytes, now: float) -> Callable[[Transaction], None]:
        return lambda _: self.told.extend(one.data for one in _events(events))


def _events(body: bytes) -> list[Any]:
    return [*events(body)]


@pytest.fixture(autouse=True)
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_stream, "_INTERVAL_S", 0.0)


def announced(stream: SessionStream, call: Call, fails: bool) -> None:
    """The recorder writes what is due; or fails to."""
    if not stream.is_due():
        return
    operation = stream.entry(final=False)
    assert isinstance(operation, QueuedOperation | None)
    if operation is not None and not fails:
        operation.run(NOBODY)
    stream.on_recorded(not fails)


def packed(parts: list[bytes], encoding: bytes | None) -> bytes:
    """The parts as a server sends them, each flushed."""
    if encoding == b"gzip":
        packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
        return b"".join(packer.compress(one) + packer.flush(zlib.Z_SYNC_FLUSH) for one in parts)
    if encoding == b"br":
        made = brotli.Compressor()
        return b"".join(made.process(one) + made.flush() for one in parts)
    if encoding == b"zstd":
        zipper = zstandard.ZstdCompressor().compressobj()
        flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        return b"".join(zipper.compress(one) + zipper.flush(flush) for one in parts)
    return b"".join(parts)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["a secret", "ü", "x" * 300, ""]), min_size=1, max_size=20),
    st.sampled_from([None, b"gzip", b"br", b"zstd"]), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data(),
)  # fmt: skip
def test_every_event_once_in_order(said: list[str], encoding: bytes | None, end: bytes, data: st.DataObject) -> None:
    told = [f"{number} {one}" for number, one in enumerate(said)]
    body = packed([f"data: {one}".encode() + end * 2 for one in told], encoding)
    call, at = Call(), 0
    stream = SessionStream(call, encoding)
    while at < len(body):
        size = data.draw(st.integers(1, 400))
        stream.add([body[at : at + size]], len(body[at : at + size]), MOST)
        at += size
        announced(stream, call, fails=data.draw(st.booleans()))
    announced(stream, call, fails=False)
    assert call.told == [one.replace("secret", "******") for one in told]


def test_what_cannot_be_written_is_bounded() -> None:
    """A tape that fails for hours lets the oldest go, and a recorder that stands still the newest."""
    call = Call()
    stream = SessionStream(call, None)
    event = b"data: " + b"x" * 1000 + b"\n\n"
    for _ in range(100):
        stream.add([event], len(event), 10_000)
        announced(stream, call, fails=True)
        assert len(stream.untaken()) <= 10_000
    announced(stream, call, fails=False)
    assert 0 < len(call.told) < 10
    for _ in range(100):
        stream.add([event], len(event), 10_000)
    assert not stream.is_due()
    assert stream.untaken() == b""


def test_what_cannot_be_decoded_is_left_to_the_end() -> None:
    for encoding in (b"gzip", b"compress", b"gzip, br"):
        stream = SessionStream(Call(), encoding)
        stream.add([b"data: {}\n\n"], 10, MOST)
        assert stream.is_due()
        assert stream.entry(final=False) is None
        stream.on_recorded(True)
        stream.add([b"data: {}\n\n"], 10, MOST)
        assert not stream.is_due()
