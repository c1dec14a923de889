"""A client's messages as they pass, and with some of them left out: nothing else changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode

from penstock.gateway.traffic.proxy.websocket.connection import (
    DATA,
    ClientMessageForwarder,
    UpstreamMessageForwarder,
)
from penstock.gateway.wire.http.websocket import TEXT, DeflateParameters, WebSocketMessage, WebSocketReader, frame

TEXTS = st.sampled_from([b"", b"text text text", b"another text", b"x" * 300])
STORY = st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=3), st.booleans(), st.booleans()), max_size=6)
"""The pieces of a message, whether a ping follows each, whether it is dropped."""


@given(STORY, st.booleans(), st.data())
def test_what_is_not_dropped_arrives(
    story: list[tuple[list[bytes], bool, bool]], packed: bool, data: st.DataObject
) -> None:
    writer = PerMessageDeflate(False, False, 15, 15)
    out = b""
    for pieces, pings, _ in story:
        for number, piece in enumerate(pieces):
            kind = Opcode.TEXT if number == 0 else Opcode.CONT
            one = Frame(kind, piece, number == len(pieces) - 1)
            out += one.serialize(mask=True, extensions=[writer] if packed else [])
            out += Frame(Opcode.PING, b"p").serialize(mask=True, extensions=[]) if pings else b""
    written = bytearray()
    packing = DeflateParameters(False) if packed else None
    way = ClientMessageForwarder(1 << 20, packing, written.extend)
    drops = iter([dropped for _, _, dropped in story])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(out)), max_size=8)))
    for begin, end in zip([0, *cuts], [*cuts, len(out)], strict=True):
        for message in way.feed(out[begin:end]):
            (way.drop if message.kind in DATA and next(drops) else way.forward)(message)
        way.forward_rest()
    assert way.held == 0
    arrived = WebSocketReader(1 << 20, packing).feed(bytes(written))
    kept = [b"".join(pieces) for pieces, _, dropped in story if not dropped]
    assert [one.body for one in arrived if one.kind == TEXT] == kept
    pings = sum(len(pieces) for pieces, pinged, _ in story if pinged)
    assert [one.body for one in arrived if one.kind == Opcode.PING] == [b"p"] * pings
    if len(kept) == len(story):
        assert bytes(written) == out


@given(st.lists(TEXTS, max_size=5), st.data())
def test_what_the_gateway_says_stands_between_two_messages(texts: list[bytes], data: st.DataObject) -> None:
    out = b"".join(frame(TEXT, text) for text in texts)
    way, got, said = UpstreamMessageForwarder(1 << 20, None), b"", 0
    cuts = sorted(data.draw(st.lists(st.integers(0, len(out)), max_size=6)))
    found: list[WebSocketMessage] = []
    for begin, end in zip([0, *cuts], [*cuts, len(out)], strict=True):
        messages, passed = way.feed(out[begin:end])
        found += messages
        got += passed
        if data.draw(st.booleans()):
            said += 1
            got += way.inject(b"own")
    got_texts = [one.body for one in WebSocketReader(1 << 20, None).feed(got)]
    assert got_texts.count(b"own") == said
    assert [text for text in got_texts if text != b"own"] == texts == [one.body for one in found]
