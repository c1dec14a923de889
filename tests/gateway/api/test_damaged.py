"""One damaged record on the tape: lists, searches, figures and the change feed leave it out, and all else is told."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import lmdb
import pytest
from fakes.local import locally
from fakes.process import upstreams
from fakes.provider import serving
from fakes.tape import Tape

ALL = {"r1", "r2", "r3"}
LISTS = (
    "/api/rollouts",
    "/api/rollouts?filter=status:running",
    "/api/rollouts?filter=model:m",
    "/api/rollouts?filter=attempt_status:running",
    "/api/rollouts?ids=r1,r2,r3",
    "/api/spans",
    "/api/spans?filter=model:m",
    "/api/spans?filter=origin:header",
    "/api/spans?filter=text~hello",
    "/api/search?text=hello",
    "/api/changes?follow=false",
)
FIGURES = ("/api/breakdown?by=group", "/api/breakdown?by=tool", "/api/stats")


def harm(data: Path, database: str, value: bytes) -> None:
    """The record of r2, the second of three, is not what it was; empty: it is gone."""
    with lmdb.open(str(data / "tape"), max_dbs=64) as tape, tape.begin(write=True) as txn:
        db = tape.open_db(database.encode(), txn)
        key = [key for key, _ in txn.cursor(db=db)][1]
        assert txn.put(key, value, db=db) if value else txn.delete(key, db=db)


@pytest.mark.parametrize(
    ("database", "value"), [(name, b"\xff\xff") for name in ("rollouts", "attempts", "bodies", "log")] + [("log", b"")]
)
async def test_others_are_there(tmp_path: Path, http: aiohttp.ClientSession, database: str, value: bytes) -> None:
    async with serving() as provider:
        config = upstreams(openai=provider.openai_url)
        async with locally(tmp_path, config) as gateway:
            for name in sorted(ALL):
                await gateway.ask(http, name, said=f"hello from {name}")
                await Tape(gateway.url, http).written()
        harm(gateway.data, database, value)
        async with locally(tmp_path, config) as gateway:
            found: dict[str, set[str]] = {}
            for path in (*LISTS, *FIGURES):
                async with http.get(gateway.url + path) as answer:
                    text = await answer.text()
                    assert answer.status == 200, f"{path}: {text}"
                    found[path] = {name for name in ALL if name in text}
            assert [path for path in LISTS if not found[path] >= ALL - {"r2"}] == []
            assert database != "log" or found["/api/rollouts?ids=r1,r2,r3"] == ALL, "only its cost is unknown"
            await gateway.ask(http, "r4")
            assert len(await Tape(gateway.url, http).spans("r4", 1)) == 1
