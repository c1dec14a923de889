"""Facts of a span are shown wherever they should be, and what an earlier Penstock wrote is read.

`f9813d87.tar.xz` holds a tape, an index and a lake that Penstock made before facts had a table. The tape has two
rollouts of real calls (plain, streamed, refused; a reward; one from the queue). `shown.json` is what
`/api/rollouts/ROLLOUT/attempts/a1/transcript` answered then.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.entries import call
from fakes.goldens import text_of
from fakes.indexing import caught_up
from fakes.local import locally
from fakes.process import ROOT, upstreams
from fakes.provider import Provider

from penstock.console.views.rollout_tree import call_tree
from penstock.gateway.api.pagination import recent_walk, scan
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import FindRequest
from penstock.gateway.followers.index.sql.views import statements
from penstock.gateway.followers.lake.lake import Lake
from penstock.gateway.followers.lake.location import LakeLocation
from penstock.gateway.followers.otlp.span_export import SpanPlacement, of_call
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.facts import QUEUE_MS
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.state import SqlRequest
from penstock.gateway.model.turn import Transcript
from penstock.gateway.reading.filters import parse
from penstock.gateway.tape.store import Store

deltalake: Any = import_module("deltalake")
duckdb: Any = import_module("duckdb")
QUERY = "select span, rollout, model, input_tokens, stream, error from spans where kind = 'llm' order by span"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "tape") as made:
        made.secret()
        yield made


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "goldens" / "f9813d87.tar.xz") as file:
        file.extractall(tmp_path / "data", filter="data")
    return tmp_path


@pytest.mark.slow  # the index is a process
async def test_what_an_earlier_version_wrote_is_read(
    earlier: Path, provider: Provider, http: aiohttp.ClientSession
) -> None:
    data = earlier / "data"
    config = upstreams(openai=provider.openai_url) + '\n[index]\nwhen = "always"\n'
    async with locally(earlier, config) as gateway, Client(gateway.url) as client:
        for rollout, shown in json.loads((data / "shown.json").read_text()).items():
            assert await client.transcript(rollout, "a1") == Transcript.model_validate(shown)
        await gateway.ask(http, "r1")
        # It is of other columns, so it is made anew.
        rows = (await client.sql(SqlRequest(query=QUERY))).rows
        assert [row[1:] for row in rows][:4] == [
            ["r1", "gpt-4.1", 9, False, None],
            ["r1", "gpt-4.1", 14, True, None],
            ["r1", "gpt-4.1", None, False, "http_429"],
            ["q1", "gpt-4.1", 9, False, None],
        ]
    with open_store(data) as store:
        lake = Lake(store, LakeLocation(str(data / "lake")), Prices())
        while lake.step() is not None:
            pass
    table = deltalake.DeltaTable(str(data / "lake" / "spans")).to_pyarrow_table().sort_by("span").to_pylist()
    assert [(row["span"], row["rollout"]) for row in table if row["kind"] == "llm"] == [tuple(row[:2]) for row in rows]


def test_a_fact_is_shown_everywhere(store: Store, tmp_path: Path) -> None:
    waited = call()
    waited.attributes = {QUEUE_MS: 1250.5}
    store.write([call(), waited])
    index = TapeIndex(store, tmp_path / "index")
    caught_up(index)
    for text, found in (("queue_ms>1000", [2]), ("queue_ms<1000", []), ("not queue_ms>=0", [1])):
        query = parse(text)
        assert [it.sequence for _, it in recent_walk(store, query, Prices(), scan)(None) if it is not None] == found
        assert len(index.find(FindRequest("spans", text, 0, None, 10)).positions) == len(found)
    duck = duckdb.connect()
    for statement in statements(index.files()):
        if " from _" not in statement:
            duck.execute(statement)
    assert duck.execute("select queue_ms from spans order by span").fetchall() == [(None,), (1250.5,)]
    index.close()
    lake = Lake(store, LakeLocation(str(tmp_path / "lake")), Prices())
    while lake.step() is not None:
        pass
    table = deltalake.DeltaTable(str(tmp_path / "lake" / "spans")).to_pyarrow_table().sort_by("span").to_pylist()
    assert [row["queue_ms"] for row in table] == [None, 1250.5]
    spans = list(store.spans("r1"))
    exported = [of_call(it, None, SpanPlacement(it.trace_id or "", None)).attributes for it in spans]
    assert [[pair.value.double_value for pair in it if pair.key == QUEUE_MS] for it in exported] == [[], [1250.5]]
    shown = [text_of(call_tree(SpanDetail(span=it))) for it in spans]
    assert ["waited  1.25 s" in it for it in shown] == [False, True]
