"""Messages of WebSockets, against a library's writer: whatever the frames, cuts and compression, they are read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode

from penstock.gateway.wire.http.websocket import (
    CLOSE,
    TEXT,
    DeflateParameters,
    WebSocketMessage,
    WebSocketReader,
    close_frame,
    frame,
    negotiated_deflate,
    supports_extensions,
)

LIMIT = 1 << 20
MESSAGES = st.lists(
    st.tuples(
        st.lists(st.binary(max_size=300) | st.sampled_from([b"", b"abc" * 30_000]), min_size=1, max_size=4),
        st.booleans(),
    ),
    max_size=5,
)


def written(messages: list[tuple[list[bytes], bool]], mask: bool, deflate: PerMessageDeflate | None) -> bytes:
    """Fragments, each followed by a ping where the message has that."""
    out = b""
    extensions = [] if deflate is None else [deflate]
    for pieces, pings in messages:
        for number, piece in enumerate(pieces):
            kind = Opcode.TEXT if number == 0 else Opcode.CONT
            fin = number == len(pieces) - 1
            out += Frame(kind, piece, fin).serialize(mask=mask, extensions=extensions)
            if pings:
                out += Frame(Opcode.PING, b"p").serialize(mask=mask, extensions=extensions)
    return out


@settings(max_examples=150, deadline=None)
@given(MESSAGES, st.booleans(), st.sampled_from([None, False, True]), st.data())
def test_every_message_is_read(
    messages: list[tuple[list[bytes], bool]], mask: bool, alone: bool | None, data: st.DataObject
) -> None:
    deflate = None if alone is None else PerMessageDeflate(alone, alone, 15, 15)
    reader = WebSocketReader(LIMIT, None if alone is None else DeflateParameters(alone))
    out = written(messages, mask, deflate)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(out)), max_size=8)))
    found: list[WebSocketMessage] = []
    for begin, end in zip([0, *cuts], [*cuts, len(out)], strict=True):
        found += reader.feed(out[begin:end])
        assert reader.whole <= end
    assert reader.problem is None
    texts = [message.body for message in found if message.kind == TEXT]
    assert texts == [b"".join(pieces) for pieces, _ in messages]
    assert reader.whole == len(out)
    assert reader.between_messages
    pings = [message.body for message in found if message.kind == Opcode.PING]
    assert pings == [b"p"] * sum(len(pieces) for pieces, pinged in messages if pinged)
    assert len(found) == len(texts) + len(pings)
    ends = [message.end for message in found]
    assert ends == sorted(ends)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_whatever_comes_is_read_or_a_problem(noise: bytes, packed: bool) -> None:
    reader = WebSocketReader(1000, DeflateParameters(False) if packed else None)
    for at in range(0, len(noise), 7):
        _ = reader.feed(noise[at : at + 7])
    assert reader.whole <= len(noise)
    if reader.problem is not None:
        assert reader.feed(b"\x81\x01a") == []


def test_a_message_that_would_grow_too_large_is_a_problem() -> None:
    bomb = written([([b"\0" * (LIMIT + 1)], False)], True, PerMessageDeflate(False, False, 15, 15))
    assert len(bomb) < 5000
    reader = WebSocketReader(LIMIT, DeflateParameters(False))
    assert reader.feed(bomb) == []
    assert reader.problem == f"a message is larger than {LIMIT} bytes"
    reader = WebSocketReader(100, None)
    assert reader.feed(written([([b"x" * 60, b"x" * 60], False)], True, None)) == []
    assert reader.problem == "a message is larger than 100 bytes"


def test_what_the_gateway_writes_itself() -> None:
    reader = WebSocketReader(LIMIT, None)
    texts = [b"short", b"l" * 300, b"h" * 70_000]
    frames = b"".join(frame(TEXT, text) for text in texts) + close_frame(1012, "why", masked=True)
    *said, close = reader.feed(frames)
    assert [message.body for message in said] == texts
    assert (close.kind, close.body) == (CLOSE, b"\x03\xf4why")
    assert close.end == len(frames)
    (long_close,) = WebSocketReader(LIMIT, None).feed(close_frame(1000, "\u00fc" * 200))
    assert long_close.body == b"\x03\xe8" + b"?" * 123


@pytest.mark.parametrize(
    ("offers", "known"),
    [
        ([], True),
        ([b"permessage-deflate"], True),
        ([b"permessage-deflate; client_max_window_bits, Permessage-Deflate"], True),
        ([b"permessage-deflate", b"mux"], False),
        ([b"x-webkit-deflate-frame"], False),
    ],
)
def test_extensions(offers: list[bytes], known: bool) -> None:
    assert supports_extensions(offers) == known


def test_what_was_agreed_on() -> None:
    assert negotiated_deflate(b"") == (None, None)
    assert negotiated_deflate(b"permessage-deflate") == (DeflateParameters(False), DeflateParameters(False))
    agreed = b"permessage-deflate; Server_No_Context_Takeover; client_max_window_bits=12"
    assert negotiated_deflate(agreed) == (DeflateParameters(False), DeflateParameters(True))
