"""SQL of a gateway, as people ask it."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.index.sql.views import VIEWS
from penstock.gateway.model.sql import SqlRequest

pq: Any = import_module("pyarrow.parquet")
"""It has no types."""
COUNT = "select agent, count(*) as calls from spans where kind = 'llm' group by agent"


async def called(gateway: Gateway, http: aiohttp.ClientSession, calls: int) -> None:
    """Some calls, all on the tape."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi, there"}]}
    async with Client(gateway.url) as client:
        for _ in range(calls):
            async with http.post(gateway.openai("r1") + "/chat/completions", json=body) as answer:
                assert answer.status == 200
        await client.transcript("r1", "a1")


async def test_a_person_asks(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """On a tape that is too small to have an index, which the first question starts."""
    gateway = await start_gateway(upstreams(openai=provider.openai_url))
    await called(gateway, http, 3)
    shell = Shell(gateway.url, tmp_path)
    found = await shell.run("sql", "select rollout, count(*) as calls from spans where kind = 'llm' group by rollout")
    assert (found.code, found.text) == (0, "rollout  calls\nr1           3\n"), found.err
    await called(gateway, http, 1)
    rows = await shell.run("sql", "select text from messages where role = 'user'", "--json", "--limit", "1")
    assert [json.loads(line) for line in rows.text.splitlines()] == [{"text": "hi, there"}]
    assert rows.err == "There are more than 1 row: --limit 10 asks for more of them.\n"

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
    assert views.text.startswith("rollouts: One task given to one agent, as it stands now.\ncolumn ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["drop table spans"], 1, "penstock: only SELECT, DESCRIBE and SUMMARIZE are answered"),
        (["select * from nothing"], 1, "penstock: there is no view 'nothing': the views are attempts messages"),
        (["select nothing from spans"], 1, 'penstock: Binder Error: Referenced column "nothing" not found'),
        (["select 1", "--timeout", "2h"], 2, "timeout"),
        (["select 1", "--output", "x"], 2, "penstock: --output needs --format csv or --format parquet"),
        (["select 1", "--format", "csv", "-o", "/nowhere/x"], 1, "penstock: /nowhere/x: No such file or directory"),
    ],
)
async def test_what_goes_wrong_is_said(
    gateway: Gateway, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    found = await Shell(gateway.url, tmp_path).run("sql", *arguments)
    assert (found.code, found.text) == (code, "")
    assert said in " ".join(found.err.split())


async def test_a_full_disk_leaves_a_file_as_it_was(gateway: Gateway, tmp_path: Path) -> None:
    shell = Shell(gateway.url, tmp_path)
    (tmp_path / "out.csv").write_text("before")
    query = "select repeat('x', 4000) as much"
    command = f'ulimit -f 1; exec {shell.command[0]} -m penstock sql "{query}" --format csv -o out.csv'
    process = await asyncio.create_subprocess_shell(
        command, env=shell.env, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), shell.patience)
    assert (process.returncode, err) == (1, b"penstock: out.csv: File too large\n")
    assert (tmp_path / "out.csv").read_text() == "before"


async def test_a_key_that_reads_may_ask(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    keys = {"PENSTOCK_ADMIN_KEY": "a" * 32, "PENSTOCK_READ_KEY": "r" * 32}
    gateway = await start_gateway('[index]\nsql = "off"\n', env=keys)
    async with http.post(f"{gateway.url}/api/sql", json={"query": "select 1"}) as answer:
        assert answer.status == 401
    async with Client(gateway.url, "r" * 32) as client:
        assert [view.name for view in (await client.sql_views()).views] == list(VIEWS)
        with pytest.raises(ClientError, match=r"SQL is turned off"):
            await client.sql(SqlRequest(query="select 1"))
