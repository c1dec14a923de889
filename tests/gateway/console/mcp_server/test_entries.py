"""The entries of clients' settings that mcp-server.md shows: each starts a server that answers."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from conftest import StartGateway
from fakes.mcp_client import answered
from fakes.pages import blocks
from fakes.process import ROOT
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

PAGE = ROOT / "docs" / "mcp-server.md"
HERE = 'tests/gateway/console/mcp_server/test_entries.py holds blocks of "mcp-server.md"'


class Entry(NamedTuple):
    """How a client starts a server."""

    command: list[str]
    env: dict[str, str]


def entries() -> Iterator[Entry]:
    """All that the page shows."""
    for block in blocks(PAGE):
        if block.language in ("json", "toml"):
            read: dict[str, Any] = (json.loads if block.language == "json" else tomllib.loads)(block.text)
            (servers,) = read.values()
            found = servers["penstock"]
            words = found["command"] if isinstance(found["command"], list) else [found["command"], *found["args"]]
            yield Entry(words, found.get("env") or found["environment"])


async def test_each_entry_starts_a_server(start_gateway: StartGateway) -> None:
    found = list(entries())
    assert len(found) == 3
    distinct = {(tuple(entry.command), tuple(entry.env.items())): entry for entry in found}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    gateway = await start_gateway("")
    for entry in distinct.values():
        assert entry.env == {"PENSTOCK_GATEWAY": "http://127.0.0.1:4747"}
        env = {"PENSTOCK_GATEWAY": gateway.url, "PATH": path, "PYTHONPATH": str(ROOT)}
        command, *rest = entry.command
        async with Client(stdio_client(StdioServerParameters(command=command, args=rest, env=env))) as client:
            assert (await answered(client, "show_queue"))[0]["state"] == "open"


def test_every_tool_is_on_the_page() -> None:
    from penstock.console.mcp_server.server import TOOLS

    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [tool.name for tool in TOOLS]
