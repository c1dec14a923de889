"""What a server says of itself becomes what stands for it below an address, and nothing else changes."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from conftest import StartGateway
from fakes.mcp_wire import McpServer, call, config
from fakes.tape import Tape

from penstock.gateway.http.request import Request
from penstock.gateway.mcp.oauth import Own
from penstock.gateway.mcp.servers import ServerPool
from penstock.gateway.model.server_settings import McpServer as Configured

WELL_KNOWN = "/.well-known/oauth-protected-resource"
OURS = "http://gw:4747"


def own(path: str = "/rollout/r1/mcp/s", url: str = "https://tools.example/mcp", proto: str | None = None) -> Own:
    request = Request()
    request.target = path.encode()
    request.headers = [(b"host", b"Host", b"gw:4747")]
    if proto is not None:
        request.headers.append((b"x-forwarded-proto", b"X-Forwarded-Proto", proto.encode()))
    below = path[path.index("/mcp/") :]
    return Own(
        request, (WELL_KNOWN if path.startswith(WELL_KNOWN) else "") + below, ServerPool("s", Configured(url=url), ())
    )


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        (f"https://tools.example{WELL_KNOWN}/mcp", f"{OURS}{WELL_KNOWN}/rollout/r1/mcp/s"),
        (f"https://tools.example{WELL_KNOWN}", f"{OURS}{WELL_KNOWN}/rollout/r1/mcp/s"),
        ("https://tools.example/custom/metadata.json", f"{OURS}/rollout/r1/mcp/s/@/custom/metadata.json"),
        (f"https://other.example{WELL_KNOWN}/mcp", f"https://other.example{WELL_KNOWN}/mcp"),
        (f"http://tools.example{WELL_KNOWN}/mcp", f"http://tools.example{WELL_KNOWN}/mcp"),
        ("nonsense", "nonsense"),
    ],
)
def test_the_place_of_metadata(url: str, ours: str) -> None:
    head = b'HTTP/1.1 401 U\r\nX-A: 1\r\nwww-authenticate: Bearer error="e", resource_metadata="%b", scope="a"\r\n\r\n'
    assert own().challenge(head % url.encode()) == head % ours.encode()


def test_a_gateway_behind_tls_says_so() -> None:
    assert own(proto="https").metadata(f"https://tools.example{WELL_KNOWN}/mcp").startswith("https://gw:4747/")


@pytest.mark.parametrize(
    ("resource", "ours"),
    [
        ("https://tools.example/mcp", f"{OURS}/rollout/r1/mcp/s"),
        ("https://tools.example", f"{OURS}/rollout/r1/mcp/s"),
        ("https://evil.example/mcp", "https://evil.example/mcp"),
    ],
)
@pytest.mark.parametrize("path", ["/rollout/r1/mcp/s", f"{WELL_KNOWN}/rollout/r1/mcp/s"])
def test_the_resource_of_metadata(resource: str, ours: str, path: str) -> None:
    body = {"resource": resource, "authorization_servers": ["https://tools.example/as"], "x": 1}
    assert json.loads(own(path).document(json.dumps(body).encode())) == body | {"resource": ours}


@pytest.mark.parametrize("body", [b'{"resource": "https://tools.example/mcp"}', b"[]", b"\xff", b""])
def test_other_documents_stay(body: bytes) -> None:
    assert own().document(body) == body


@pytest.mark.parametrize("on_change", ["warn", "hold"])
async def test_a_client_finds_the_metadata_at_the_root_of_the_gateway(
    start_gateway: StartGateway, http: aiohttp.ClientSession, on_change: str
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/mcp":
            named = f'Bearer resource_metadata="http://{request.host}{WELL_KNOWN}/mcp"'
            return web.Response(status=401, headers={"WWW-Authenticate": named})
        if request.path != WELL_KNOWN:
            return web.Response(status=404)
        return web.json_response({"resource": f"http://{request.host}/mcp", "authorization_servers": ["http://as"]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        table = f'[mcp.servers.s]\nurl = "http://127.0.0.1:{port}/mcp"\non_change = "{on_change}"\n'
        gateway = await start_gateway(table)
        async with http.post(f"{gateway.url}/rollout/r1/mcp/s", json=call("echo")) as refused:
            assert refused.status == 401
            place = refused.headers["WWW-Authenticate"].split('"')[1]
        assert place == f"{gateway.url}{WELL_KNOWN}/rollout/r1/mcp/s"
        async with http.get(place) as found:
            assert found.status == 200
            assert (await found.json())["resource"] == f"{gateway.url}/rollout/r1/mcp/s"
        assert asked == ["/mcp", f"{WELL_KNOWN}/mcp", WELL_KNOWN]
        async with http.get(gateway.url + WELL_KNOWN) as nothing:
            assert nothing.status == 404
        _, span = await Tape(gateway.url, http).spans("r1", 2)
        assert (span.name, span.kind, span.status) == ("metadata", "mcp", "ok")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example.com"}, 403),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:6274"}, 200),
        ({}, 200),
    ],
)
async def test_a_page_of_another_site_reaches_no_server_of_this_machine(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession, headers: dict[str, str], status: int
) -> None:
    server.sessions = False
    gateway = await start_gateway(config(server))
    async with http.post(f"{gateway.url}/mcp/tools", json=call("echo"), headers=headers) as reply:
        assert reply.status == status
        if status == 403:
            assert (await reply.json())["error"]["data"] == {"reason": "origin"}
    assert len(server.asked) == (status == 200)
