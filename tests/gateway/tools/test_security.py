"""What a hostile agent, or a page that it shows, cannot do: reach anything but the server, or another's spans."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Client, McpServer, call, config
from fakes.odd import close, odd, request, send
from fakes.process import Gateway
from fakes.raw import connect, get, head, post
from fakes.tape import Tape

ADMIN = "admin-key-of-the-test-0123"
KEY = "sk-key-of-the-server-0123456789abcdef"
OAUTH = "oauth-token-4711-of-the-agent"
TOOLS = "/rollout/r1/mcp/tools"
WELL_KNOWN = "/.well-known/oauth-protected-resource"
PATHS = [
    "/mcp/tools/@/admin",
    "/mcp/tools/@@127.0.0.1/",
    "/mcp/tools/@//evil.test/x",
    "/mcp/tools/@http://evil.test/x",
    "/mcp/tools@evil.test/",
    "/mcp/tools:80@evil.test/",
    "/mcp/tools/%40/messages",
    "/mcp/http://evil.test/",
    "/mcp/evil.test",
    "/mcp//evil.test/",
    "/mcp/tools/%2e%2e/admin",
    "/mcp/tools/../admin",
    "/mcp/tools/@/../admin",
    "/mcp/tools%00",
    "/mcp/",
    f"{WELL_KNOWN}/mcp/evil.test",
    f"{WELL_KNOWN}/mcp/tools/../../admin",
    f"{WELL_KNOWN}//evil.test/mcp",
]


async def status_of(gateway: Gateway, sent: bytes) -> int:
    """What is answered to these bytes."""
    async with connect(gateway.url) as client:
        client.send(sent)
        return int((await client.message()).split(b" ", 2)[1])


async def test_no_path_leads_past_the_endpoint(gateway: Gateway, server: McpServer) -> None:
    for path in PATHS:
        assert await status_of(gateway, get(path, host="localhost")) in (400, 404), path
    # Of whatever stands behind the name of a server its own metadata are asked for, and by nothing but reading.
    assert {path for _, path, _, _ in server.asked} <= {f"{WELL_KNOWN}/mcp", WELL_KNOWN}
    before = len(server.asked)
    assert await status_of(gateway, post(f"{WELL_KNOWN}/mcp/tools", b"{}", host="localhost")) == 400
    assert len(server.asked) == before


async def test_no_header_and_no_target_chooses_the_server(client: Client, gateway: Gateway, server: McpServer) -> None:
    await client.open()
    for name in ("X-Forwarded-Host", "X-Original-URL", "X-Rewrite-URL", "Forwarded", "X-Upstream"):
        async with client.post(call("echo"), **{name: "http://evil.test/x"}) as reply:
            assert reply.status == 200
        assert (server.asked[-1][1], server.asked[-1][2]["host"]) == ("/mcp", server.url.split("/")[2])
    before = len(server.asked)
    for target in ("http://evil.test/mcp/tools", "*", "evil.test:443"):
        assert await status_of(gateway, head(f"OPTIONS {target} HTTP/1.1", [("Host", "localhost")])) == 400, target
    assert len(server.asked) == before


async def test_a_redirection_is_not_followed(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    statuses = (301, 302, 303, 307, 308)
    headers = [("Location", server.url), ("Content-Length", "0"), ("Connection", "close")]
    scripts = [[request(), send(head(f"HTTP/1.1 {status} Moved", headers)), close()] for status in statuses]
    async with odd(*scripts) as upstream:
        gateway = await start_gateway(f'[mcp.servers.tools]\nurl = "{upstream.url}/mcp"\n')
        for status in statuses:
            async with http.post(gateway.url + TOOLS, json=call("echo"), allow_redirects=False) as reply:
                assert (reply.status, reply.headers["Location"]) == (status, server.url)
    assert server.asked == []


HOSTS = {
    "localhost:99999": 200,  # of this machine whatever the port, and nothing can listen there
    "LOCALHOST": 200,
    "[::1]:1234": 200,
    "localhost.": 403,
    "localhost.evil.test": 403,
    "evil.test://localhost": 403,
    "localhost@evil.test": 403,
    "[::ffff:127.0.0.1]": 403,
    "0.0.0.0": 403,
    "127.0.0.1.evil.test": 403,
}
ORIGINS = {
    "https://[::1]:8443": 200,
    "vscode-webview://localhost": 200,
    "null": 403,
    "file://": 403,
    "http://localhost.": 403,
    "http://localhost:80.evil.test": 403,
    "http://evil.test://localhost": 403,
    "http://localhost:1 http://evil.test": 403,
    "http://[::ffff:127.0.0.1]": 403,
    "http://[::1].evil.test": 403,
}


async def test_only_names_of_this_machine_are_answered(gateway: Gateway, server: McpServer) -> None:
    server.sessions = False
    body = json.dumps(call("echo")).encode()
    for host, status in HOSTS.items():
        assert await status_of(gateway, post(TOOLS, body, host=host)) == status, host
    for origin, status in ORIGINS.items():
        assert await status_of(gateway, post(TOOLS, body, [("Origin", origin)], host="localhost")) == status, origin
    assert len(server.asked) == 5


TE = ("Transfer-Encoding", "chunked")
SMUGGLERS: list[tuple[list[tuple[str, str]], bytes]] = [
    ([("Content-Length", "5"), TE], b"0\r\n\r\n"),
    ([("Content-Length", "0"), ("Content-Length", "5")], b""),
    ([("Transfer-Encoding", "\x0bchunked")], b"0\r\n\r\n"),
    ([("Transfer-Encoding ", "chunked")], b"0\r\n\r\n"),
    ([("X-A", "1\nTransfer-Encoding: chunked")], b"0\r\n\r\n"),
    ([("Mcp-Session-Id", "a\0b")], b""),
    ([("Mcp-Session-Id", "a\rMcp-Name: b")], b""),
    ([("Mcp-Session-Id", "a\nMcp-Name: b")], b""),
    ([TE], b"5\r\nhelloXX0\r\n\r\n"),
]


async def test_smuggling_to_a_server_is_refused(gateway: Gateway, server: McpServer) -> None:
    """All ways are in tests/gateway/wire/http/test_client_connection.py: the same parser stands before every call."""
    hidden = post(TOOLS, b"{}", host="localhost")
    for headers, body in SMUGGLERS:
        async with connect(gateway.url) as client:
            client.send(head(f"POST {TOOLS} HTTP/1.1", [("Host", "localhost"), *headers]) + body + hidden)
            answer = await client.rest()
            assert (answer.startswith(b"HTTP/1.1 400 "), answer.count(b"HTTP/1.1 ")) == (True, 1), headers
    assert server.asked == []


@pytest.fixture
async def admin() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as made:
        yield made


async def token_for(gateway: Gateway, admin: aiohttp.ClientSession, rollout: str) -> str:
    async with admin.post(f"{gateway.url}/api/tokens", json={"rollout": rollout}) as made:
        return (await made.json())["token"]


async def test_a_token_writes_into_its_own_rollout_and_no_other(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession, admin: aiohttp.ClientSession
) -> None:
    env = {"PENSTOCK_ADMIN_KEY": ADMIN, "TOOLS_KEY": KEY}
    locked = await start_gateway("require_token = true\n" + config(server, 'key_env = "TOOLS_KEY"'), env=env)
    tokens = [await token_for(locked, admin, rollout) for rollout in ("r1", "r2")]
    r1, r2 = (Client(f"{locked.url}/mcp/tools", http, {"Authorization": f"Bearer {token}"}) for token in tokens)
    await r1.open()
    await r2.open()
    theirs = r2.headers["Mcp-Session-Id"]
    # Its path and its headers name another rollout.
    async with http.post(f"{locked.address('r2')}/mcp/tools", json=call("echo"), headers=r1.headers) as reply:
        assert reply.status == 403
    for name, value in (("X-Rollout-Id", "r2"), ("baggage", "penstock.rollout_id=r2")):
        async with r1.post(call("echo"), **{name: value}) as reply:
            assert reply.status == 403, name
    # It has stolen the session of the other: what it does there is its own.
    async with r1.post(call("echo", id=66), **{"Mcp-Session-Id": theirs}) as reply:
        assert reply.status == 200
    for headers in ({}, {"Authorization": "Bearer pst_forged"}, {"Mcp-Session-Id": theirs}):
        async with http.post(f"{locked.url}/mcp/tools", json=call("echo"), headers=headers) as reply:
            assert reply.status == 401
    tape = Tape(locked.url, admin)
    assert [span.name for span in await tape.spans("r1", 2)] == ["initialize", "tools/call echo"]
    assert [span.name for span in await tape.spans("r2", 1)] == ["initialize"]
    assert all(seen["authorization"] == f"Bearer {KEY}" for _, _, seen, _ in server.asked)


async def test_an_address_counts_more_than_a_session(gateway: Gateway, http: aiohttp.ClientSession, tape: Tape) -> None:
    owner = Client(f"{gateway.address('r1')}/mcp/tools", http, {})
    await owner.open()
    guest = Client(f"{gateway.address('r2')}/mcp/tools", http, dict(owner.headers))
    assert (await guest.say(call("echo", id=2)))[0] == 200
    nobody = Client(f"{gateway.url}/mcp/tools", http, dict(owner.headers))
    assert (await nobody.say(call("echo", id=3)))[0] == 200
    told = [(span.attributes or {})["jsonrpc.request.id"] for span in await tape.spans("r1", 2)]
    assert told == ["0", "3"]
    assert [(span.attributes or {})["jsonrpc.request.id"] for span in await tape.spans("r2", 1)] == ["2"]


async def test_no_secret_is_on_the_tape_or_in_the_log(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(config(server, 'key_env = "TOOLS_KEY"'), env={"TOOLS_KEY": KEY})
    client = Client(f"{gateway.address('r1')}/mcp/tools", http, {"Authorization": f"Bearer {OAUTH}"})
    await client.open()
    _ = await client.say(call("echo"))
    _ = await client.say(call("later", id=2))
    async with client.listen(**{"Last-Event-ID": "1"}) as stream:
        _ = await stream.content.readuntil(b"\n\n")
    async with http.delete(client.url, headers=client.headers):
        pass
    authorized = {"Authorization": f"Bearer {OAUTH}"}
    async with http.get(f"{gateway.address('r1')}/mcp/old", headers=authorized) as stream:
        path = (await stream.content.readuntil(b"\n\n")).split(b"data: ")[1].strip().decode()
        async with http.post(gateway.url + path, json=call("echo", id=3), headers=authorized) as reply:
            assert reply.status == 202
        _ = await stream.content.readuntil(b"\n\n")
    session, older = client.headers["Mcp-Session-Id"], path.rpartition("=")[2]
    assert older in server.open
    tape = Tape(gateway.url, http)
    found = await tape.spans("r1", 7)
    told = [str(await tape.get(f"/api/rollouts/r1/attempts/a1/spans/{span.sequence}")) for span in found]
    assert any("Mcp-Session-Id" in one for one in told), "that of a header is masked, not left out"
    await gateway.terminate()
    kept = b"".join(path.read_bytes() for path in gateway.data.rglob("*") if path.is_file())
    for secret in (session, older, KEY, OAUTH):
        assert not any(secret in one for one in told), secret
        assert secret not in gateway.log
        assert secret.encode() not in kept
