"""docs/tape.md is enough to read a tape: its readers read what is written."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
import zstandard
from fakes.entries import call, conversation
from fakes.process import ROOT

from penstock.gateway.app import open_store
from penstock.gateway.tape.store.environment import DATABASES
from penstock.gateway.work.curves import MetricRow, encode_block

DOCS = (ROOT / "docs" / "tape.md").read_text(encoding="utf-8")


class Msgpack:
    """The two names that the documented reader uses, so that the tests need no msgpack package."""

    unpackb = staticmethod(msgspec.msgpack.decode)


def segment(value: bytes) -> list[bytes]:
    """As the section on segments has it."""
    if value.startswith(b"\x28\xb5\x2f\xfd"):
        value = zstandard.ZstdDecompressor().decompress(value)
    return msgspec.msgpack.decode(value)


@pytest.mark.parametrize("together", [False, True])
def test_the_documented_reader_reads(tmp_path: Path, together: bool) -> None:
    long = conversation(9, "r4")
    for number, entry in enumerate(long):
        assert entry.body is not None
        # An event stream is a smaller dictionary than another answer of its length.
        entry.body.response = b"".join(b"data: %d %d\n\n" % (number, at * at) for at in range(3000))
        kind = b"text/event-stream" if number % 2 else b"application/json"
        entry.body.response_headers = b"content-type: %b\r\n" % kind
    entries = [*conversation(70), call("r2", request=b""), *conversation(3, "r3"), *long]
    with open_store(tmp_path) as store:
        for batch in [entries] if together else [[entry] for entry in entries]:
            store.write(batch)
        spans = [store.span(entry.rollout, entry.attempt, entry.sequence) for entry in entries]
    bodies: dict[int, bytes] = {}
    with lmdb.open(str(tmp_path / "tape"), max_dbs=len(DATABASES), readonly=True) as env:
        database = env.open_db(b"bodies", create=False)
        with env.begin(db=database) as txn:
            for key, value in txn.cursor():
                bodies |= {int.from_bytes(key) + at: record for at, record in enumerate(segment(value))}
    code = re.search(r"```python\n(def read.*?)```", DOCS, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"record": bodies.__getitem__, "msgpack": Msgpack, "zstandard": zstandard}
    exec(code[1], names)
    read: Callable[[int], tuple[bytes, bytes]] = names["read"]
    assert len(bodies) == len(entries) + 1  # all but r2 begin alike
    for span, entry in zip(spans, entries, strict=True):
        assert entry.body is not None
        assert span is not None
        assert span.body is not None
        request, rest = read(span.body)
        assert request == entry.body.request
        assert msgspec.msgpack.decode(rest)[5] == entry.body.response


@pytest.mark.parametrize("together", [False, True])
def test_the_documented_reader_of_the_log_reads(tmp_path: Path, together: bool) -> None:
    entries = [call(f"r{at % 7}", f"a{at % 3}") for at in range(90)]
    with open_store(tmp_path) as store:
        for batch in [entries] if together else [entries[at : at + 3] for at in range(0, 90, 3)]:
            store.write(batch)
        with store.view() as view:
            wanted = [view.log_record(at) for at in range(1, view.last("log") + 1)]
    code = re.search(r"```python\n(def whole.*?)```", DOCS, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    found: list[bytes] = []
    with lmdb.open(str(tmp_path / "tape"), max_dbs=len(DATABASES), readonly=True) as env:
        database = env.open_db(b"log", create=False)
        with env.begin(db=database) as txn:
            for _, value in txn.cursor():
                found += names["whole"](segment(value))
    assert found == wanted
    assert sum(record.startswith(b"s") for record in found) == 90


@pytest.mark.parametrize("packed", [False, True])
def test_the_documented_reader_of_points_reads(packed: bool) -> None:
    rows = [
        MetricRow(step, 10**18 + step, {"all": step / 3} | ({"some": -1.5} if step % 3 else {}))
        for step in range(1, 20)
    ]
    code = re.search(r"```python\n(def rows.*?)```", DOCS, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"msgpack": Msgpack, "zstandard": zstandard, "itertools": itertools, "struct": struct}
    exec(code[1], names)
    assert [MetricRow(*row) for row in names["rows"](encode_block(rows, packed))] == rows
