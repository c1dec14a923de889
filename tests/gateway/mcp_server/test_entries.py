"""The entries of clients' settings that mcp-server.md shows: each starts a server that answers."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fakes.mcp_client import answered
from fakes.pages import blocks
from fakes.process import ROOT
from fakes.worlds import world
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

PAGE = ROOT / "docs" / "mcp-server.md"
HERE = 'tests/gateway/mcp_server/test_entries.py holds blocks of "mcp-server.md"'


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


async def test_each_entry_starts_a_server(tmp_path: Path) -> None:
    found = list(entries())
    assert len(found) == 3
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    async with world("worked", tmp_path) as here:
        for entry in found:
            assert entry.env == {"PENSTOCK_GATEWAY": "http://127.0.0.1:4747"}
            env = {"PENSTOCK_GATEWAY": f"http://127.0.0.1:{here.ports[4747]}", "PATH": path, "PYTHONPATH": str(ROOT)}
            command, *rest = entry.command
            async with Client(stdio_client(StdioServerParameters(command=command, args=rest, env=env))) as client:
                told, _ = await answered(client, "list_rollouts", filter="rollout:r1")
                assert [one["id"] for one in told["rollouts"]] == ["r1"]


def test_every_tool_is_on_the_page() -> None:
    from penstock.gateway.mcp_server.tools import TOOLS

    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [tool.name for tool in TOOLS]
