"""Penstock's own tools at `/mcp/penstock`: for those who may use the control API, and nobody else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import aiohttp
import httpx2
import pytest
from conftest import StartGateway
from fakes.mcp_wire import INITIALIZE
from fakes.process import PATIENCE, ROOT, beside_an_agent
from fakes.rig import inside
from fakes.tape import Tape
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

KEY = "the-admin-key-of-this-test-1"


async def test_a_coding_agent_reads_the_tape(start_gateway: StartGateway) -> None:
    gateway = await start_gateway("")
    for mode in ("auto", "legacy"):
        async with Client(f"{gateway.url}/mcp/penstock", mode=mode) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            assert "list_rollouts" in tools
            assert not {name for name in tools if "reward" in name}
            told = await client.call_tool("list_rollouts", {})
            assert not told.is_error, told
    assert "Traceback" not in gateway.log


@pytest.mark.slow
async def test_what_lies_in_the_gateways_folder_is_not_run_in_its_place(tmp_path: Path) -> None:
    """An agent's own code, mostly."""
    async with beside_an_agent(tmp_path) as gateway, Client(f"{gateway.url}/mcp/penstock") as client:
        assert "list_rollouts" in {tool.name for tool in (await client.list_tools()).tools}


async def test_it_writes_where_the_configuration_says_so(start_gateway: StartGateway) -> None:
    gateway = await start_gateway("[mcp]\nwrite = true\n")
    async with Client(f"{gateway.url}/mcp/penstock") as client:
        read = {"list_rollouts", "read_transcript"}
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert read < tools
        assert {name for name in tools if "reward" in name}


async def test_only_the_admin_key_opens_it(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    gateway = await start_gateway("", env={"PENSTOCK_ADMIN_KEY": KEY})
    admin = {"Authorization": f"Bearer {KEY}"}
    async with http.post(f"{gateway.url}/api/tokens", json={"rollout": "r1"}, headers=admin) as made:
        token = (await made.json())["token"]
    url = f"{gateway.url}/mcp/penstock"
    for headers in ({}, {"Authorization": "Bearer wrong-key-123456"}):
        async with http.post(url, json=INITIALIZE, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["data"]) == (401, {"reason": "control"})
    for headers in ({"Authorization": f"Bearer {token}"}, {"x-penstock-token": token}):
        async with http.post(f"{gateway.address('r1')}/mcp/penstock", json=INITIALIZE, headers=headers) as response:
            assert response.status == 403
    async with (
        httpx2.AsyncClient(headers=admin, timeout=PATIENCE) as with_key,
        Client(streamable_http_client(url, http_client=with_key)) as client,
    ):
        told = await client.call_tool("list_rollouts", {})
        assert not told.is_error, told
    async with aiohttp.ClientSession(headers=admin) as reader:
        tape = Tape(gateway.url, reader)
        page = await tape.get("/api/spans?limit=100")
        assert page["spans"]
        for span in page["spans"]:
            path = f"/api/rollouts/{span['rollout']}/attempts/{span['attempt']}/spans/{span['sequence']}"
            assert KEY not in json.dumps(await tape.get(path))
    assert KEY not in gateway.log


@pytest.mark.slow
async def test_without_the_extra_the_answer_names_it(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError('', name='mcp')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    async with inside(tmp_path, http) as made, http.post(f"{made.base.url}/mcp/penstock", json=INITIALIZE) as response:
        assert "pip install '.[mcp]'" in (await response.json())["error"]["message"]


@pytest.mark.slow
async def test_a_server_of_that_name_may_be_configured(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    servers = {"penstock": {"command": ["/does/not/exist"]}}
    async with (
        inside(tmp_path, http, mcp={"servers": servers}) as made,
        http.post(f"{made.base.url}/mcp/penstock", json=INITIALIZE) as response,
    ):
        assert "/does/not/exist" in (await response.json())["error"]["message"]
