"""SQL of a gateway, as people ask it."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.local import Local, locally
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.followers.index.sql.views import VIEWS
from penstock.gateway.model.state import SqlRequest

pq: Any = import_module("pyarrow.parquet")
"""It has no types."""
COUNT = "select agent, count(*) as calls from spans where kind = 'llm' group by agent"


async def called(local: Local, http: aiohttp.ClientSession, calls: int) -> None:
    """Some calls, all on the tape."""
    async with Client(local.url) as client:
        for _ in range(calls):
            await local.ask(http, "r1", said="hi, there")
        await client.transcript("r1", "a1")


async def test_a_person_asks(local: Local, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """On a tape that is too small to have an index, which the first question starts."""
    await called(local, http, 3)
    shell = Shell(local.url, tmp_path)
    found = await shell.run("sql", "select rollout, count(*) as calls from spans where kind = 'llm' group by rollout")
    assert (found.code, found.text) == (0, "rollout  calls\nr1           3\n"), found.err
    await called(local, http, 1)
    rows = await shell.run("sql", "select text from messages where role = 'user'", "--json", "--limit", "1")
    assert [json.loads(line) for line in rows.text.splitlines()] == [{"text": "hi, there"}]
    assert rows.err.startswith("There are more than 1 row: --limit 10 ")

    async def has_the_last_one() -> bool:
        """A snapshot may be a second old."""
        counted = await shell.run("sql", COUNT, "--json")
        return json.loads(counted.text)["calls"] == 4

    await until(has_the_last_one)
    written = await shell.run("sql", COUNT, "--format", "parquet", "-o", "calls.parquet")
    assert written.err == "1 row is in calls.parquet.\n"
    assert pq.read_table(tmp_path / "calls.parquet").to_pylist()[0]["calls"] == 4
    text = await shell.run("sql", "select text from messages where role = 'user'", "--format", "csv")
    assert text.out == b"text\r\n" + 4 * b'"hi, there"\r\n'
    nothing = await shell.run("sql", "select * from runs")
    assert (nothing.code, nothing.err) == (0, "No rows.\n")
    views = await shell.run("sql")
    assert [line.split()[0] for line in views.text.splitlines()[:2]] == ["rollouts:", "column"]


async def test_what_goes_wrong_is_said(local: Local, tmp_path: Path) -> None:
    shell = Shell(local.url, tmp_path)
    wrong: list[tuple[list[str], int, str]] = [
        (["drop table spans"], 1, "only SELECT, DESCRIBE and SUMMARIZE are answered"),
        (["select * from nothing"], 1, "there is no view 'nothing': the views are attempts messages"),
        (["select nothing from spans"], 1, 'Binder Error: Referenced column "nothing" not found'),
        (["select 1", "--timeout", "2h"], 2, "timeout"),
        (["select 1", "--output", "x"], 2, "--output needs --format csv or --format parquet"),
        (["select 1", "--format", "csv", "-o", "/nowhere/x"], 1, "/nowhere/x: No such file or directory"),
    ]
    for arguments, code, said in wrong:
        found = await shell.run("sql", *arguments)
        assert (found.code, found.text, said in " ".join(found.err.split())) == (code, "", True), found.err


async def test_a_full_disk_leaves_a_file_as_it_was(local: Local, tmp_path: Path) -> None:
    shell = Shell(local.url, tmp_path)
    (tmp_path / "out.csv").write_text("before")
    query = "select repeat('x', 4000) as much"
    command = f'ulimit -f 1; exec {shell.command[0]} -m penstock sql "{query}" --format csv -o out.csv'
    process = await asyncio.create_subprocess_shell(
        command, env=shell.env, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), shell.patience)
    assert (process.returncode, err) == (1, b"penstock: out.csv: File too large\n")
    assert (tmp_path / "out.csv").read_text() == "before"


async def test_a_key_that_reads_may_ask(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADMIN", "READ"):
        monkeypatch.setenv(f"PENSTOCK_{name}_KEY", name * 8)
    async with locally(tmp_path, '[index]\nsql = "off"\n') as gateway:
        async with http.post(f"{gateway.url}/api/sql", json={"query": "select 1"}) as answer:
            assert answer.status == 401
        async with Client(gateway.url, "READ" * 8) as client:
            assert [view.name for view in (await client.sql_views()).views] == list(VIEWS)
            with pytest.raises(ClientError, match=r"SQL is turned off"):
                await client.sql(SqlRequest(query="select 1"))
