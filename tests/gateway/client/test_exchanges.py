"""Many calls in one answer: however it is cut up on its way, every byte comes back."""

from __future__ import annotations

import gzip
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.turns import plain_bodies
from penstock.gateway.client.exchanges import RECORDS, Recorded, Unpacker, pack
from penstock.gateway.model.exchange import Exchange

calls = st.builds(
    Recorded, st.text(max_size=8), st.integers(1, 2**32 - 1), st.binary(max_size=300), st.binary(max_size=300)
)


@given(st.lists(calls, max_size=6), st.lists(st.integers(0, 2000), max_size=12))
def test_records_are_found_wherever_they_are_cut(made: list[Recorded], cuts: list[int]) -> None:
    data = b"".join(map(pack, made))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    unpacker = Unpacker(RECORDS)
    found = [call for start, end in pairwise(edges) for call in unpacker.feed(data[start:end])]
    assert found == made


def test_a_record_that_is_cut_off_is_not_given() -> None:
    data = pack(Recorded("a1", 1, b"request", b"response"))
    assert list(Unpacker(RECORDS).feed(data[:-1])) == []


def test_content_encodings_are_undone() -> None:
    exchange = Exchange(
        url="",
        request_headers=[("Content-Encoding", "gzip")],
        request_body=gzip.compress(b"asked"),
        response_headers=[("content-encoding", "compress")],
        response_body=b"unknown encodings stay",
    )
    assert plain_bodies(exchange) == (b"asked", b"unknown encodings stay")
