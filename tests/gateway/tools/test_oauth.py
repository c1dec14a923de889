"""What a server says of itself becomes what stands for it below an address, and nothing else changes."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from conftest import StartGateway
from fakes.mcp_wire import McpServer, call
from fakes.process import Gateway
from fakes.tape import Tape
from fakes.web_site import everywhere, site

from penstock.gateway.model.settings import McpServer as Configured
from penstock.gateway.tools.oauth import PublicUrls, origin_of
from penstock.gateway.tools.servers import ServerPool
from penstock.gateway.wire.http.request import HttpRequest

WELL_KNOWN = "/.well-known/oauth-protected-resource"
OURS = "http://gw:4747"


def own(path: str = "/rollout/r1/mcp/s", url: str = "https://tools.example/mcp") -> PublicUrls:
    request = HttpRequest()
    request.target = path.encode()
    request.headers = [(b"host", b"Host", b"gw:4747")]
    below = path[path.index("/mcp/") :]
    return PublicUrls(
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


FORWARDED: list[tuple[list[tuple[str, str]], str]] = [
    ([], "http://gw:4747"),
    ([("x-forwarded-proto", "https")], "https://gw:4747"),
    ([("x-forwarded-proto", "https, http"), ("x-forwarded-host", "a.example:8443, inner")], "https://a.example:8443"),
    ([("forwarded", "proto=https;host=a.example")], "https://a.example"),
    ([("forwarded", 'For="[2001:db8::1]:4711"; Proto=HTTPS ;Host="a.example:8443", proto=http;host=inner')],
     "https://a.example:8443"),
    ([("forwarded", "for=192.0.2.1"), ("forwarded", "for=10.0.0.1;host=\"[::1]:80\";proto=https")], "https://[::1]:80"),
    ([("forwarded", "proto=https"), ("x-forwarded-proto", "http"), ("x-forwarded-host", "b.example")],
     "https://b.example"),
    ([("forwarded", 'proto=javascript;host="a b/c"'), ("x-forwarded-host", "evil.example/x")], "http://gw:4747"),
    ([("forwarded", "by=_x;secret=\"a;proto=https\""), ("x-forwarded-proto", "")], "http://gw:4747"),
]  # fmt: skip


@pytest.mark.parametrize(("told", "origin"), FORWARDED)
def test_the_scheme_and_host_are_those_that_proxies_tell(told: list[tuple[str, str]], origin: str) -> None:
    headers = [(name.encode(), name.encode(), value.encode()) for name, value in [("host", "gw:4747"), *told]]
    assert origin_of(headers, "http") == origin


@pytest.mark.parametrize("called", ["/rollout/r1/mcp/s/", "/mcp/s/", "/mcp/s?tools=a", "/rollout/r1/attempt/a2/mcp/s/"])
def test_the_url_is_named_as_the_client_writes_it(called: str) -> None:
    body = b'{"resource": "https://tools.example/mcp", "authorization_servers": []}'
    assert json.loads(own(WELL_KNOWN + called).document(body))["resource"] == OURS + called
    assert own(called).metadata(f"https://tools.example{WELL_KNOWN}/mcp") == OURS + WELL_KNOWN + called
    # Metadata at a place of the server's own name the URL by which that place was told.
    path = called.partition("?")[0]
    place = own(called).metadata("https://tools.example/custom.json?v=1")
    assert place == f"{OURS}{path}/@/custom.json?v=1"
    assert json.loads(own(place.removeprefix(OURS)).document(body))["resource"] == OURS + path


def test_a_place_of_the_servers_own_is_found_behind_a_slash() -> None:
    server = ServerPool("s", Configured(url="https://tools.example/mcp"), ())
    assert server.register_path("/custom.json") == "/mcp/s/@/custom.json"
    assert [server.target(f"/mcp/s{slash}/@/custom.json") for slash in ("", "/")] == ["/custom.json"] * 2


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

    async with site(everywhere(answer)) as url:
        table = f'[mcp.servers.s]\nurl = "{url}/mcp"\non_change = "{on_change}"\n'
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


async def test_a_page_of_another_site_reaches_no_server_of_this_machine(
    gateway: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    server.sessions = False
    for headers in (
        {"Host": "evil.example.com"},
        {"Origin": "http://evil.example.com"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "null"},
    ):
        async with http.post(f"{gateway.url}/mcp/tools", json=call("echo"), headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["data"]) == (403, {"reason": "origin"}), headers
    assert server.asked == []
    for headers in ({"Origin": "http://localhost:6274"}, {}):
        async with http.post(f"{gateway.url}/mcp/tools", json=call("echo"), headers=headers) as reply:
            assert reply.status == 200
    assert len(server.asked) == 2
