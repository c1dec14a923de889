"""`--fail open --on-unknown deny` while the gateway is away: calls go to their model host, and to nobody else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest
from fakes.process import PATIENCE
from fakes.tls_host import TlsHost

from penstock.sidecar.intercept import agent_proxy
from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import RolloutBinding
from penstock.sidecar.intercept.rules import InterceptPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

AWAY = "http://127.0.0.1:1"
ELSEWHERE = "127.0.0.2"
"""An address of the agent's own choice. `localhost` has 127.0.0.1."""
ASK = b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 28\r\n\r\n{"model":"m","messages":[]} '


@asynccontextmanager
async def listening(port: int) -> AsyncGenerator[list[tuple[str, int]]]:
    """A server elsewhere, on the port of the model host: who has come there."""
    came: list[tuple[str, int]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(serve, ELSEWHERE, port):
        yield came


@asynccontextmanager
async def standing(port: int, passed: list[ConnectionRecord]) -> AsyncGenerator[AgentProxy]:
    policy = InterceptPolicy(frozenset({("localhost", port)}), unknown="deny", fail="open")
    front = AgentProxy(AWAY, policy, CertificateStore.create_in_process(["localhost"]), passed.append)
    front.bind(RolloutBinding((("x-rollout-id", "r1"),)))
    try:
        yield front
    finally:
        await front.stop()


@pytest.mark.parametrize(
    "ask",
    [
        "CONNECT {there} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://{there}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://{host}@{there}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {there}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET //{there}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT {host}@{there} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://192.0.2.1:443/ HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n",  # where the sidecar answers, by TLS only
    ],
)
async def test_what_an_agent_asks_its_proxy_leads_nowhere_else(host: TlsHost, ask: str) -> None:
    async with listening(host.port) as came, standing(host.port, []) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", await front.start())
        writer.write(ask.format(there=f"{ELSEWHERE}:{host.port}", host=host.name).encode())
        assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))
        writer.close()
        assert came == []


async def test_a_host_header_leads_nowhere_else(host: TlsHost) -> None:
    async with listening(host.port) as came, standing(host.port, []) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", await front.start())
        writer.write(f"GET http://{host.name}/ HTTP/1.1\r\nHost: {ELSEWHERE}:{host.port}\r\n\r\n".encode())
        with suppress(ConnectionError):
            _ = await asyncio.wait_for(reader.read(), PATIENCE)  # the host expects TLS
        writer.close()
        assert came == []


async def test_the_name_of_a_model_host_leads_to_no_other_address(
    host: TlsHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(accepted: socket.socket) -> tuple[str, int]:
        return ELSEWHERE, host.port

    def no(accepted: socket.socket) -> bool:
        return False

    monkeypatch.setattr(agent_proxy, "original_destination", elsewhere)
    monkeypatch.setattr(agent_proxy, "is_own", no)
    passed: list[ConnectionRecord] = []
    async with listening(host.port) as came, standing(host.port, passed) as front:
        context = ssl.create_default_context(cafile=str(host.trust))
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", front.start_redirected(), ssl=context, server_hostname="localhost"
            )
            writer.write(ASK)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        assert host.asked == [ASK]
        assert came == []
    (one,) = passed
    assert (one.host, one.action, one.address) == ("localhost", "unrecorded", None)
