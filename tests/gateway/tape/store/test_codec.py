"""Records come back as they were written, whatever is in them; and the order of keys is the order of names and numbers,
which is what a range scan of the tape relies on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from fakes.entries import body
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.rollout import Attempt, Rollout, Totals
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Side
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.cache import CachedAttempt, WriterCache
from penstock.gateway.tape.store.codec import DeltaBase, StoredBody
from penstock.gateway.tape.store.reader import exchange
from penstock.gateway.tape.store.records import Origins

long = st.sampled_from([0, 300, 16_384, 27_000]).map(lambda size: (bytes(range(256)) * 128)[:size])
pieces = st.binary(max_size=60) | long
texts = st.lists(pieces, max_size=4).map(b"".join)
bodies = st.builds(
    StoredBody,
    url=st.text(max_size=20),
    request_headers=st.binary(max_size=40),
    request=texts,
    response_headers=st.binary(max_size=40),
    response=texts,
    trailers=st.binary(max_size=10),
    marks=st.lists(st.integers(0, 2**40), max_size=6),
    sides=st.lists(
        st.builds(
            Side,
            who=st.sampled_from(["agent", "engine"]),
            dialect=st.text(max_size=9),
            path=st.text(max_size=9),
            request_body=texts,
            response_body=texts,
        ),
        max_size=2,
    ),
)


@given(st.lists(st.tuples(bodies, st.booleans()), max_size=6))
def test_chains_of_bodies_are_byte_exact(chain: list[tuple[StoredBody, bool]]) -> None:
    written: DeltaBase | None = None
    read: DeltaBase | None = None
    for number, (wanted, alone) in enumerate(chain, 1):
        record, made = codec.pack_body(wanted, number, written, alone)
        assert codec.base_of(record) == (0 if written is None else written.number)
        found, read = codec.unpack_body(record, read, number)
        assert found == wanted
        assert read == made
        written = made


def test_a_continued_conversation_costs_what_is_new() -> None:
    told = bytes(range(256)) * 400
    _, base = codec.pack_body(body(told + b'],"model":"m"}', b"first"), 1, None, alone=True)
    record, _ = codec.pack_body(body(told + b',"more"],"model":"m"}', b"second"), 2, base, alone=True)
    assert len(record) < 100


def test_the_side_of_a_continued_conversation_costs_what_is_new() -> None:
    told = bytes(range(256)) * 400

    def sided(more: bytes) -> StoredBody:
        side = Side(who="agent", dialect="messages", path="/v1/messages", request_body=told + more, response_body=b"")
        return StoredBody("", b"", b"", b"", b"", b"", [], [side])

    _, base = codec.pack_body(sided(b"]"), 1, None, alone=True)
    record, _ = codec.pack_body(sided(b',"more"]'), 2, base, alone=True)
    assert len(record) < 150


def test_a_chain_ends_before_it_costs_too_much_to_read() -> None:
    _, first = codec.pack_body(body(b"one", b""), 1, None, alone=True)
    _, second = codec.pack_body(body(b"two", b""), 2, first, alone=True)
    assert (first.depth, second.depth) == (0, 1)
    for depth, request, carries in (
        (codec.DEPTH - 1, b"short", True), (codec.DEPTH, b"short", False), (9, b"x" * (1 << 20), False)
    ):  # fmt: skip
        live = CachedAttempt(("r", "a1"), [], b"", Origins(1, 0), DeltaBase(1, depth, b"", b""))
        assert (WriterCache(1 << 20).base(live, request) is live.base) == carries


near = st.tuples(texts, texts, texts).map(lambda parts: (parts[0] + parts[1], parts[0] + parts[2]))


@given(near)
def test_common_prefix(pair: tuple[bytes, bytes]) -> None:
    a, b = pair
    naive = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert codec.common_prefix(a, b) == naive


@given(near, st.integers(0, 60_000))
def test_common_suffix(pair: tuple[bytes, bytes], most: int) -> None:
    a, b = (text[::-1] for text in pair)
    most = min(most, len(a), len(b))
    naive = next((at for at in range(most) if a[-1 - at] != b[-1 - at]), most)
    assert codec.common_suffix(a, b, most) == naive


@given(st.lists(st.binary(max_size=3000), max_size=60))
def test_segments_come_back(records: list[bytes]) -> None:
    assert codec.unpack_segment(msgspec.msgpack.encode(records)) == records


@given(st.lists(st.sampled_from([0, 1, 30_000, 131_072, 200_000]), min_size=1, max_size=9))
def test_compressed_segments_come_back_bounded(sizes: list[int]) -> None:
    records = [bytes([at]) * size for at, size in enumerate(sizes)]
    found: list[bytes] = []
    for at, _, segment in codec.pack_segments(records):
        assert at == len(found)
        part = codec.unpack_segment(segment)
        assert len(part) == 1 or sum(map(len, part)) <= 131_072
        found += part
    assert found == records


NAMES = st.sampled_from([b"r\0", b"r1\0", b"r1.2\0", b"a\0"])


def joined(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


RECORDS = st.one_of(
    joined(st.just(b"r"), NAMES),
    joined(st.just(b"a"), NAMES, NAMES),
    joined(st.sampled_from([b"o", b"s"]), NAMES, NAMES, st.binary(min_size=4)),
    joined(st.sampled_from([b"v", b"e", b"t"]), NAMES),
)


@given(st.lists(RECORDS, max_size=150))
def test_records_of_the_log_come_back_with_their_names(records: list[bytes]) -> None:
    segments = list(codec.pack_log(records))
    assert [one for _, _, segment in segments for one in codec.unpack_log(segment)] == records
    assert sum(count for _, count, _ in segments) == len(records)


def test_names_are_written_once_for_records_that_follow_each_other() -> None:
    name, attempt = b"a-long-name-of-a-rollout\0", b"a1\0"
    records = [b"r" + name, b"a" + name + attempt, *(b"s" + name + attempt + bytes(4) + b"head" for _ in range(5))]
    for count in (7, 70):
        segments = [segment for _, _, segment in codec.pack_log(records * (count // 7))]
        assert sum(segment.count(name) for segment in segments) == len(segments)


def test_incompressible_records_stay_readable() -> None:
    noise = [bytes((at * step * 7919 >> 3) & 255 for at in range(500)) for step in range(1, 20)]
    assert [one for _, _, part in codec.pack_segments(noise) for one in codec.unpack_segment(part)] == noise


@given(st.binary(), st.none() | st.binary())
def test_open_calls_come_back(head: bytes, record: bytes | None) -> None:
    assert codec.unpack_open(codec.pack_open(head, record, "a1b2c3d4")) == (head, record)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5)


@given(st.lists(scalars, max_size=6), st.lists(scalars, max_size=6))
def test_only_trailing_defaults_are_cut(values: list[Any], others: list[Any]) -> None:
    defaults = (others + values)[: len(values)]
    stored = codec.decode(codec.encode(values, defaults))
    assert stored + defaults[len(stored) :] == values
    assert not stored or stored[-1] != defaults[len(stored) - 1]


def test_nouns_as_positions() -> None:
    names = codec.fields(Attempt, skip=("rollout", "id"))
    assert "rollout" not in names
    values = codec.values(Attempt(rollout="r", id="a", totals=Totals(calls=3)), names)
    assert values[names.index("totals")] == [3, *[0] * 9, None, 0, 0, 0]
    assert codec.defaults(Rollout, ["id", "origin", "metadata"]) == [None, "header", None]


def test_usage_as_positions_follows_the_model() -> None:
    *counts, last = Usage.model_fields
    usage = Usage.model_validate({name: at for at, name in enumerate(counts)})
    assert codec.usage_values(usage) == list(range(len(counts)))
    assert codec.usage_values(usage.model_copy(update={last: {"cost": 0.1}})) == [*range(len(counts)), {"cost": 0.1}]
    assert codec.usage_values(None) is None


@pytest.mark.parametrize("absurd", [10**30, -1, 2**53])
def test_numbers_that_no_provider_can_mean_are_dropped(absurd: int) -> None:
    assert codec.usage_values(Usage(input_tokens=absurd, output_tokens=2**53 - 1)) == [
        None,
        2**53 - 1,
        None,
        None,
        None,
    ]


def test_an_exchange_shows_headers_and_arrival() -> None:
    stored = StoredBody("u", b"A: 1\r\nb:\xe9 \r\n", b"q", b"", b"answer", b"T: 2\r\n", [5, 4, 9, 2])
    found = exchange(stored)
    assert found.request_headers == [("A", "1"), ("b", "é")]
    assert found.trailers == [("T", "2")]
    assert [(chunk.at_ns, chunk.size) for chunk in found.chunks] == [(5000, 4), (9000, 2)]


@given(st.binary(max_size=80))
def test_junk_is_unreadable_and_nothing_else(junk: bytes) -> None:
    for read in (codec.unpack_segment, codec.unpack_log, codec.unpack_open, codec.base_of):
        with suppress(*codec.DECODE_ERRORS):
            read(junk)
    with suppress(*codec.DECODE_ERRORS):
        codec.unpack_body(junk, None, 1)


@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=20))
def test_small_segments_hold_every_record_in_order_and_fit_into_a_leaf(bodies: list[bytes]) -> None:
    found: list[bytes] = []
    for first, _, segment in codec.pack_small(bodies):
        held = codec.unpack_segment(segment)
        assert first == len(found)
        assert len(segment) <= 2022 or len(held) == 1
        found += held
    assert found == bodies


ids = st.from_regex(ID_PATTERN, fullmatch=True)
u32s = st.integers(0, 0xFFFFFFFF)
u64s = st.integers(0, 0xFFFFFFFFFFFFFFFF)
places = st.tuples(ids, ids, u32s)


@given(places, places)
def test_head_keys_sort_as_their_tuples(a: tuple[str, str, int], b: tuple[str, str, int]) -> None:
    assert (keys.summary_key(*a) < keys.summary_key(*b)) == (a < b)


@given(u64s, ids, u64s, ids)
def test_places_sort_by_number_and_come_back(a: int, first: str, b: int, second: str) -> None:
    one, other = keys.attempt_record_key(a, first), keys.attempt_record_key(b, second)
    assert (one < other) == ((a, first) < (b, second))
    assert (keys.to_number(one), keys.attempt_of_record_key(one)) == (a, first)


@given(u64s, u64s)
def test_numbers_sort(a: int, b: int) -> None:
    assert (keys.number(a) < keys.number(b)) == (a < b)


@given(places, st.binary(max_size=40))
def test_head_keys_come_back_whatever_follows(place: tuple[str, str, int], rest: bytes) -> None:
    key = keys.summary_key(*place)
    assert keys.split_summary_key(key + rest) == place
    assert keys.summary_key_length(key + rest) == len(key)
    assert key == keys.attempt_key(*place[:2]) + keys.u32(place[2])


@given(ids, ids)
def test_attempt_keys_come_back(rollout: str, attempt: str) -> None:
    assert keys.split_attempt_key(keys.attempt_key(rollout, attempt)) == (rollout, attempt)


@given(ids, ids, places)
def test_a_prefix_holds_only_its_own(rollout: str, attempt: str, place: tuple[str, str, int]) -> None:
    assert keys.summary_key(*place).startswith(keys.rollout_key(rollout)) == (place[0] == rollout)
    assert keys.summary_key(*place).startswith(keys.attempt_key(rollout, attempt)) == (place[:2] == (rollout, attempt))


@given(st.lists(u64s))
def test_numbers_in_a_row_come_back(numbers: list[int]) -> None:
    row = keys.numbers(numbers)
    assert keys.to_numbers(row) == numbers
    assert all(keys.to_number(row[8 * at :]) == value for at, value in enumerate(numbers))
