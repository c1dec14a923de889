"""What was handed over is for the process that got it: what that one starts holds neither the port nor the tape."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from fakes.gateway_workers import held, served_by, workers
from fakes.handing_over import END, begin, exit_code, is_parent, streaming, turns_away
from fakes.mcp_hosted import Hosted, config, processes
from fakes.process import Gateway, children, running

pytestmark = pytest.mark.slow

LISTENS = "0A"


def own(gateway: Gateway) -> set[str]:
    """What only processes of the gateway may hold: the sockets of its port, its tape, and the lock of that."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at = f":{gateway.port:04X}"
    files = {str(gateway.data / "lock"), *map(str, (gateway.data / "tape").iterdir())}
    return {f"socket:[{row[9]}]" for row in rows if row[1].endswith(at) and row[3] == LISTENS} | files


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one", "two"])
async def test_what_a_gateway_starts_holds_nothing_of_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    """A server of tools that outlives a killed gateway would keep the port, and the tape from the next one. Nor does
    anybody connect to workers that drain after a reload."""
    mark = uuid4().hex
    # A process that has handed over would wait for clients that keep their connections.
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        streaming() as (odd, up),
        aiohttp.ClientSession(connector=connector) as http,
        running(tmp_path, config(mark) + up, *flags) as gateway,
    ):
        for again in (False, True):
            if again:
                await gateway.reload()
                await is_parent(gateway)
            _ = await Hosted(gateway, http, mark).opened(f"r{again}")
            found = processes(mark)
            assert found, "the test itself: no server runs"
            assert len(own(gateway)) >= 4, "the test itself: the gateway holds nothing"
            assert {name for pid in found for name in held(pid) & own(gateway)} == set()
        (successor,) = children(gateway.pid)
        async with served_by(gateway, workers(successor)[1] if flags else successor) as wire:
            await begin(wire, "r")
            os.kill(gateway.pid, signal.SIGTERM)
            await turns_away(gateway)
            odd.go("go")
            assert await wire.message() == END
        assert await exit_code(gateway) == 0
