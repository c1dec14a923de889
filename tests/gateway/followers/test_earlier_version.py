"""What an earlier Penstock wrote is read: a tape, an index and a lake made by f9813d87, before facts had a table.

Its tape has two rollouts of real calls (plain, streamed, refused; a reward; one from the queue). `shown.json` is what
`/api/rollouts/ROLLOUT/attempts/a1/transcript` answered then.
"""

from __future__ import annotations

import json
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.local import locally
from fakes.process import ROOT, upstreams
from fakes.provider import Provider

from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.followers.lake.lake import Lake
from penstock.gateway.followers.lake.location import LakeLocation
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.sql import SqlRequest
from penstock.gateway.model.transcript import Transcript

deltalake: Any = import_module("deltalake")
QUERY = "select span, rollout, model, input_tokens, stream, error from spans where kind = 'llm' order by span"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "goldens" / "f9813d87.tar.xz") as file:
        file.extractall(tmp_path / "data", filter="data")
    return tmp_path


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
