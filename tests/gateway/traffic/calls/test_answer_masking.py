"""The gateway's own keys on their way to the agent: gone from errors, and nothing else about them changes."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard
from fakes import framed
from fakes.raw import body_of, chunk, reply
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.reading.turns import LIMIT
from penstock.gateway.traffic.calls.answer_masking import HELD, mask_recorded_body, masking_framing, rescaled
from penstock.gateway.traffic.proxy.translation.framing import BufferedTranslationFraming as Told
from penstock.gateway.traffic.trials.sender import Reply
from penstock.gateway.traffic.trials.tool_player import RehearsalAnswer
from penstock.gateway.wire.dialects.family import ANTHROPIC

KEY = b"sk-own-0123456789abcdef"
OWN = Secrets([KEY])
GONE = b"*" * len(KEY)
HEAD = b"HTTP/1.1 401 Unauthorized\r\nX-Seen: " + KEY + b"\r\n"
CLEAN = b"HTTP/1.1 401 Unauthorized\r\nX-Seen: " + GONE + b"\r\n"


def received(reads: Sequence[bytes], lost: bool = False) -> list[bytes]:
    """What the client has got of each read, and of the end."""
    return framed.received(lambda connection: masking_framing(OWN, connection, connection.chunked), reads, lost)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The data in pieces that end at these places."""
    ends = sorted({place % len(data) for place in places} | {0, len(data)}) if data else []
    return [data[start:end] for start, end in pairwise(ends)]


PARTS = st.sampled_from([KEY, KEY[:9], KEY[:1], KEY[5:], b"sk-", b"\r\n0\r\n\r\n"])
PAYLOADS = st.lists(PARTS | st.just(KEY) | st.binary(max_size=9), max_size=8).map(b"".join)
PLACES = st.lists(st.integers(0, 500), max_size=8)


@given(PAYLOADS, PLACES)
def test_a_plain_error_in_any_reads(payload: bytes, places: Sequence[int]) -> None:
    wire = HEAD + b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    wanted = CLEAN + b"Content-Length: %d\r\n\r\n" % len(payload) + OWN.hide(payload)
    assert b"".join(received(cut(wire, places))) == wanted


@given(PAYLOADS, PLACES, PLACES)
def test_a_chunked_error_keeps_its_chunks(payload: bytes, chunks: Sequence[int], places: Sequence[int]) -> None:
    def framed(body: bytes, trailer: bytes) -> bytes:
        return b"".join([*map(chunk, cut(body, chunks)), b"0\r\nX-Trailer: ", trailer, b"\r\n\r\n"])

    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed(payload, KEY)
    wanted = CLEAN + b"Transfer-Encoding: chunked\r\n\r\n" + framed(OWN.hide(payload), GONE)
    assert b"".join(received(cut(wire, places))) == wanted


def test_only_what_may_be_a_key_is_held_back() -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    got = received([head, chunk(b"abc"), chunk(b"the sk-own-01"), chunk(b"02 x")])
    assert got[1:] == [chunk(b"abc"), b"d\r\nthe ", b"sk-own-01\r\n" + chunk(b"02 x")]


@pytest.mark.parametrize(("size", "shown"), [(7, b"sk-own-"), (20, b"*" * 20)])
def test_what_was_held_back_of_one_that_breaks_off(size: int, shown: bytes) -> None:
    got = received([HEAD + b"Content-Length: 99\r\n\r\nis " + KEY[:size]], lost=True)
    assert b"".join(got) == CLEAN + b"Content-Length: 99\r\n\r\nis " + shown


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("chunked", [False, True])
def test_an_encoded_error(name: str, chunked: bool) -> None:
    made = ENCODINGS[name](b"wrong key: " + KEY)
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(made)
    wire = HEAD + framing + b"\r\nContent-Encoding: %b\r\n\r\n" % name.encode()
    wire += chunk(made) + chunk(b"") if chunked else made
    got = b"".join(received(cut(wire, [50, 90, len(wire) - 8])))
    assert got.startswith(CLEAN)
    assert b"ncoding: " + name.encode() not in got
    assert body_of(got) == b"wrong key: " + GONE
    assert chunked or b"Content-Length: %d\r\n" % len(body_of(got)) in got


def test_an_error_without_a_key_passes_as_it_came() -> None:
    wire = reply(404, b"no such path")
    assert b"".join(received([wire])) == wire
    made = gzip.compress(b"no such model")
    rest = b"Content-Length: %d\r\nContent-Encoding: gzip\r\n\r\n" % len(made) + made
    assert b"".join(received(cut(HEAD + rest, [70, 140]))) == CLEAN + rest


def test_what_cannot_be_decoded_or_never_comes_passes_as_it_came() -> None:
    begun = b"Content-Encoding: gzip\r\nContent-Length: 99\r\n\r\n"
    assert b"".join(received([HEAD + begun + b"\x1f"], lost=True)) == CLEAN + begun
    for name, body in ((b"odd", b"?" * 100), (b"gzip", b"not gzip"), (b"gzip", b"\x1f\x8b" + b"z" * (HELD + 1))):
        rest = b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (name, len(body)) + body
        assert b"".join(received(cut(HEAD + rest, [70, 140]))) == CLEAN + rest


def test_what_is_kept() -> None:
    plain = b"the key " + KEY
    assert mask_recorded_body(OWN, plain, None) == (b"the key " + GONE, b"the key " + GONE, False, None)
    assert mask_recorded_body(OWN, gzip.compress(plain), "gzip") == (b"the key " + GONE, b"the key " + GONE, True, None)
    body = gzip.compress(b"nothing")
    kept = mask_recorded_body(OWN, body, "gzip")
    assert kept.body is body
    assert kept[1:] == (b"nothing", False, None)


def test_what_is_larger_than_is_decoded_is_searched_on() -> None:
    text = random.Random(1).randbytes(LIMIT * 5 // 8).hex().encode()
    packed = zstandard.compress(text, 1)
    kept = mask_recorded_body(OWN, packed, "zstd")
    assert kept.body is packed
    assert not kept.in_part
    assert len(kept.plain) == LIMIT
    assert kept.problem == f"zstd: larger than {LIMIT} bytes once decoded"
    told = mask_recorded_body(OWN, zstandard.compress(text + KEY, 1), "zstd")
    assert told == (text[:LIMIT], text[:LIMIT], True, kept.problem)


LARGE, LAST = gzip.compress(bytes(4 << 20) + KEY), gzip.compress(KEY)
MANY = gzip.compress(bytes(1 << 20)) * 2 + gzip.compress(b"") * 20_000 + LAST
UNREAD = {
    "tight": (LARGE, "gzip", bytes(1 << 20)),
    "twice": (zstandard.compress(LARGE), "gzip, zstd", bytes(1 << 20)),
    "in members": (gzip.compress(b"x") * 20_000 + LAST, "gzip", b"x" * 16_385),
    "large and in members": (MANY, "gzip", bytes(2 << 20)),
}


@pytest.mark.parametrize("how", UNREAD)
def test_of_what_nobody_reads_to_its_end_only_what_was_read_is_kept(how: str) -> None:
    """What stands behind that is nobody's to say."""
    packed, encoding, read = UNREAD[how]
    kept = mask_recorded_body(OWN, packed, encoding)
    assert kept.body == kept.plain == read
    assert kept.in_part
    assert mask_recorded_body(NO_SECRETS, packed, encoding).body is packed, (
        "where nothing is secret it stays as it came"
    )


@given(st.lists(st.integers(0, 200), max_size=6), st.booleans(), st.integers(0, 150))
def test_a_key_is_found_wherever_pieces_are_cut(places: list[int], there: bool, at: int) -> None:
    text = b"x" * at + (KEY if there else b"") + b"y" * (150 - at)
    cuts = sorted({0, *(min(place, len(text)) for place in places), len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    assert OWN.absent(pieces, len(text)) is not there
    assert not OWN.absent(pieces, len(text) - 1)


def test_a_key_between_two_blocks_is_found() -> None:
    for before in range((64 << 10) - 40, (64 << 10) + 80, 7):
        text = b"x" * before + KEY + b"y" * (70 << 10)
        pieces = [text[start : start + 1000] for start in range(0, len(text), 1000)]
        assert not OWN.absent(pieces, len(text))
        assert OWN.absent([b"x" * len(piece) for piece in pieces], len(text))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1), st.integers(0, 9999))
def test_arrivals_add_up_to_another_size(marks: list[tuple[int, int]], size: int) -> None:
    flat = [value for mark in marks for value in mark]
    made = rescaled(flat, size)
    assert made[::2] == flat[::2]
    assert sum(made[1::2]) == size
    assert min(made[1::2]) >= 0


def test_an_error_that_is_told_in_another_format() -> None:
    """The key stands where what is shown of an error ends: no part of it is left."""
    body = b"x" * 490 + KEY
    connection = SimpleNamespace(
        status=401, done=True, pieces=[body], encoding=None, events=False, chunked=False, headers=[(b"X-Seen", KEY)]
    )
    told = Told(cast(Any, None), ANTHROPIC, False, OWN).begin(cast(Any, connection), HEAD + b"\r\n", body)
    assert b"sk-own" not in told
    assert b"X-Seen: " + GONE + b"\r\n" in told


def test_an_error_to_an_agent_in_rehearsal() -> None:
    body = gzip.compress(KEY)
    headers = [(b"Content-Encoding", b"gzip"), (b"X-Seen", KEY)]
    played = RehearsalAnswer(Reply([], 401, headers, [body])).without(OWN)
    assert played.reply.body == GONE
    assert played.headers == [(b"Content-Encoding", b"identity"), (b"X-Seen", GONE)]
