"""A WebSocket of an agent behind a sidecar: its host gets what it would get without one, and each answer is a call."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway
from fakes.responses_websocket import Host, websocket_host
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.websocket_agent import WEBSOCKET_AGENT
from websockets.datastructures import Headers

from penstock.sidecar.intercept.authority import Authority


@dataclass
class Rig:
    host: Host
    gateway: Gateway
    folder: Path
    trust: Path

    @property
    def agent(self) -> tuple[str, ...]:
        return (sys.executable, "-c", WEBSOCKET_AGENT.replace("HOST", self.host.url.partition("://")[2]))

    def seen(self) -> tuple[list[tuple[str, list[tuple[str, str]]]], object]:
        """What the host got, without the key of an opening, which is random."""
        opened = [(path, still(headers)) for path, headers in self.host.opened]
        return opened, self.host.asked


def still(headers: Headers) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.raw_items() if name != "Sec-WebSocket-Key"]


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path) -> AsyncGenerator[Rig]:
    authority, trust = Authority.here(["localhost"]), tmp_path / "host.pem"
    trust.write_text(authority.pem)
    async with websocket_host(authority.context("localhost")) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\nca_file = "{trust}"\n'
        yield Rig(host, await start_gateway(text), tmp_path, trust)


async def test_a_websocket_passes(rig: Rig, http: aiohttp.ClientSession) -> None:
    direct = await Shell(rig.gateway.url, rig.folder, rig.agent[:1]).run(*rig.agent[1:], SSL_CERT_FILE=str(rig.trust))
    assert (direct.code, direct.text) == (0, "said 1\nsaid 2\n"), direct.err
    first = rig.seen()
    rig.host.opened, rig.host.asked = [], []
    host = rig.host.url.partition("://")[2]
    shell = Shell(rig.gateway.url, rig.folder, PENSTOCK)
    done = await shell.run("sidecar", "--rollout", "r1", "--intercept", host, "--", *rig.agent)
    assert (done.code, done.out, done.err) == (0, direct.out, "")
    assert rig.seen() == first
    spans = await Tape(rig.gateway.url, http).spans("r1", 2)
    assert [(span.dialect, span.http_status, span.status) for span in spans] == [("responses", 101, "ok")] * 2
