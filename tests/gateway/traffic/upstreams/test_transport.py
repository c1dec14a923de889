"""Upstreams behind a proxy: tunnels of its own for calls, and for what the gateway itself asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from fakes.provider import Provider
from fakes.rig import Inside, Within
from fakes.tls_host import TlsHost, tls_host

from penstock.gateway.config import ConfigError, UpstreamSettings
from penstock.gateway.traffic.upstreams.pool import make_transport
from penstock.sidecar.intercept.certificate_store import CertificateStore

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Proxy:
    url: str = ""
    refusal: bytes = b""
    """What it says in place of a tunnel."""
    asked: list[bytes] = field(default_factory=list[bytes])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head)
        if self.refusal:
            writer.write(self.refusal)
            writer.close()
            return
        host, _, port = head.split()[1].decode().rpartition(":")
        other, its = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: us\r\n\r\n")
        _ = await asyncio.gather(copy(reader, its), copy(other, writer), return_exceptions=True)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@asynccontextmanager
async def proxied(authority: CertificateStore | None = None) -> AsyncGenerator[Proxy]:
    made = Proxy()
    context = None if authority is None else authority.context("localhost")
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    made.url = f"http{'s' if authority else ''}://localhost:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


@pytest.fixture
async def proxy() -> AsyncGenerator[Proxy]:
    async with proxied() as made:
        yield made


@pytest.fixture
async def host(tmp_path: Path) -> AsyncGenerator[TlsHost]:
    async with tls_host(tmp_path) as made:
        yield made


def behind(url: str, proxy: str, **more: str) -> list[dict[str, str]]:
    """The upstream at this URL, behind a proxy."""
    return [{"name": "up", "base_url": f"{url}/v1", "proxy": proxy, **more}]


async def ask(rig: Inside) -> tuple[int, str]:
    async with rig.tape.http.post(rig.base.url + rig.path(), json=ASKED) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("secure", [False, True])
async def test_calls_go_through_a_proxy(
    within: Within, host: TlsHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setenv("P", "me:p@ss")
    authority = CertificateStore.create_in_process(["localhost"]) if secure else None
    bundle = tmp_path / "both.pem"
    bundle.write_text(host.trust.read_text() + ("" if authority is None else authority.pem))
    async with proxied(authority) as proxy:
        up = behind(f"https://{host.name}", proxy.url, ca_file=str(bundle), proxy_auth_env="P")
        async with within(upstream=up) as rig:
            for _ in range(2):
                status, said = await ask(rig)
                assert (status, "hello" in said) == (200, True)
            spans = await rig.tape.spans(rig.rollout, 2)
    assert [span.status for span in spans] == ["ok", "ok"]
    # The connection is kept and used again.
    (head,) = proxy.asked
    assert head.startswith(f"CONNECT {host.name} HTTP/1.1\r\nHost: {host.name}\r\n".encode())
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in head
    assert len(host.asked) == 2
    assert b"roxy-" not in b"".join(host.asked)


async def test_plain_http_goes_through_it_too(within: Within, provider: Provider, proxy: Proxy) -> None:
    async with within(upstream=behind(provider.url, proxy.url)) as rig:
        assert (await ask(rig))[0] == 200
    assert len(proxy.asked) == len(provider.log) == 1


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (b"HTTP/1.1 407 Who\r\nContent-Length: 4\r\n\r\nwho?", " answers 407"),
        (b"SSH-2.0-x\r\n", " closed the connection, or is none"),
        (b"x" * 70_000, " closed the connection, or is none"),
        (None, ""),
    ],
)
async def test_a_proxy_that_refuses_or_is_not_there_is_named(
    within: Within, provider: Provider, proxy: Proxy, refusal: bytes | None, said: str
) -> None:
    proxy.refusal = refusal or b""
    url = "http://localhost:9" if refusal is None else proxy.url
    async with within(upstream=behind(provider.url, url)) as rig:
        status, words = await ask(rig)
    assert (status, f"the proxy {url}{said}" in words) == (502, True)
    assert provider.log == []


async def test_what_the_gateway_asks_itself_goes_through_it(
    http: aiohttp.ClientSession, proxy: Proxy, host: TlsHost
) -> None:
    config = UpstreamSettings(name="up", base_url=f"https://{host.name}", proxy=proxy.url, ca_file=str(host.trust))
    async with http.get(f"https://{host.name}/v1/models", **make_transport(config).options) as answer:
        assert answer.status == 200
    (head,) = proxy.asked
    assert head.startswith(b"CONNECT ")


def test_a_missing_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOBODY", raising=False)
    config = UpstreamSettings(name="up", base_url="http://h", proxy="http://p", proxy_auth_env="NOBODY")
    with pytest.raises(ConfigError, match="upstream 'up': proxy_auth_env names NOBODY, which is not set"):
        _ = make_transport(config)
