"""Connections of a sidecar (CONNECT): the agent's bytes go to the host that it wants, as they came, and belong to one
rollout whatever they say."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.odd import request, send
from fakes.raw import Wire
from fakes.rig import GOOD, Rig, based
from fakes.tape import Tape

from penstock.gateway.traffic.calls.call_request import host_of

ASK = b'{"model":"m","messages":[]}'
AGREED = b"HTTP/1.1 200 OK\r\n\r\n"


def connect(rig: Rig, *lines: str, host: str | None = None) -> bytes:
    head = [f"CONNECT {host or rig.host} HTTP/1.1", f"Host: {host or rig.host}", *lines, "", ""]
    return "\r\n".join(head).encode()


async def token_for(rig: Rig, rollout: str) -> str:
    async with rig.tape.http.post(rig.base.url + "/api/tokens", json={"rollout": rollout}) as made:
        return (await made.json())["token"]


async def opened(client: Wire, rig: Rig) -> None:
    client.send(connect(rig, f"x-rollout-id: {rig.rollout}"))
    await client.until(AGREED)


def call(*headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", *headers, f"Content-Length: {len(ASK)}", "", ""]
    return "\r\n".join(lines).encode() + ASK


async def test_bytes_go_as_they_came_and_belong_to_the_rollout(rig: Rig) -> None:
    odd = call("hOsT: h", "Connection: keep-alive", "TE: trailers", "X-Odd:  a b", "Authorization: Bearer k")
    async with rig.upstream([request(), send(GOOD), request(), send(GOOD)]) as upstream, rig.client() as client:
        # The first request comes in the same packet.
        client.send(connect(rig, f"x-rollout-id: {rig.rollout}") + odd)
        await client.until(AGREED + GOOD)
        client.send(odd)
        await client.until(GOOD)
        first, second = (await upstream.connection(0)).requests
    assert first == second == odd.replace(b"X-Odd:  a b", b"X-Odd: a b")
    spans = await rig.tape.spans(rig.rollout, 2)
    assert [(span.dialect, span.status, span.upstream) for span in spans] == [("chat", "ok", "up")] * 2


async def test_nothing_in_it_names_another_rollout(rig: Rig) -> None:
    async with rig.upstream([request(), send(GOOD), request(), send(GOOD)]) as upstream, rig.client() as client:
        await opened(client, rig)
        client.send(call("Host: h", "x-rollout-id: other", "baggage: penstock.rollout_id=other"))
        await client.until(GOOD)
        client.send(call("Host: h", path="/rollout/other/attempt/a1/v1/chat/completions"))
        await client.until(GOOD)
        assert b"\r\nx-rollout-id: other\r\n" in (await upstream.connection(0)).requests[0]
    spans = await rig.tape.spans(rig.rollout, 2)
    assert spans[1].path == "/rollout/other/attempt/a1/v1/chat/completions"


@pytest.mark.parametrize("path", ["/api/rollouts", "/metrics", "/", "/healthz", "/api/hello"])
async def test_the_control_api_is_out_of_reach(rig: Rig, path: str) -> None:
    async with rig.upstream([request(), send(GOOD)]) as upstream, rig.client() as client:
        await opened(client, rig)
        client.send(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        await client.until(GOOD)
        assert (await upstream.connection(0)).requests[0].startswith(f"GET {path} HTTP/1.1\r\nHost: h".encode())


@pytest.mark.parametrize(
    ("host", "status", "words"),
    [
        ("169.254.169.254:80", 403, "no calls go to 169.254.169.254:80"),
        ("evil.example:443", 403, "add an [[upstream]] with that host"),
        ("api.openai.com", 400, "is no HOST:PORT"),
        ("http://x/", 400, "is no HOST:PORT"),
    ],
)
async def test_only_hosts_that_are_known(rig: Rig, host: str, status: int, words: str) -> None:
    async with rig.client() as client:
        client.send(connect(rig, host=host))
        await client.until(b"}")
        assert client.received.startswith(b"HTTP/1.1 %d " % status)
        assert words.encode() in client.received


async def test_a_tunnel_has_no_tunnel_in_it(rig: Rig) -> None:
    async with rig.client() as client:
        await opened(client, rig)
        client.send(connect(rig))
        await client.until(b"is a tunnel already")


@pytest.mark.slow
async def test_a_token_says_whose_it_is(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    with based(tmp_path, "require_token = true\n", env={"PENSTOCK_ADMIN_KEY": "boss"}) as base:
        http.headers["Authorization"] = "Bearer boss"
        rig = Rig(base, Tape(base.url, http), "mine")
        foreign = await token_for(rig, "theirs")
        mine = f"Proxy-Authorization: Bearer {(token := await token_for(rig, 'mine'))}"
        async with rig.client() as stranger:
            stranger.send(connect(rig, "x-rollout-id: mine"))
            await stranger.until(b"an agent token is needed")
        # In place of a key it says that as well, and is no key for the provider.
        for key in ("sk-real", token):
            async with rig.upstream([request(), send(GOOD)]) as upstream, rig.client() as client:
                client.send(connect(rig, mine))
                await client.until(AGREED)
                client.send(call("Host: h", f"Authorization: Bearer {key}"))
                await client.until(GOOD)
                assert b"pst_" not in (await upstream.connection(0)).requests[0]
        assert [span.status for span in await rig.tape.spans("mine", 2)] == ["ok", "ok"]
        async with rig.upstream([request(), send(GOOD)]) as upstream, rig.client() as client:
            client.send(connect(rig, mine))
            await client.until(AGREED)
            client.send(call("Host: h", f"x-api-key: {foreign}"))
            await client.until(b"the agent token is for another rollout than 'mine'")
            client.send(call("Host: h", "Authorization: Bearer pst_forged"))
            await client.until(b"is not one of this gateway's")
            assert upstream.connections == []
        async with rig.client() as other:
            other.send(connect(rig, mine, "x-rollout-id: theirs"))
            await other.until(b"the agent token is for another rollout")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("api.openai.com:443", ("api.openai.com", 443)), ("[::1]:80", ("::1", 80)), ("API.x:1", ("api.x", 1)),
        ("x", None), ("x:y", None), ("a b:1", None), ("u@x:1", None), ("x:123456", None),
    ],
)  # fmt: skip
def test_authorities(target: str, host: tuple[str, int] | None) -> None:
    assert host_of(target) == host


async def test_a_token_for_a_key_says_whose_calls_are_of_a_tunnel_that_does_not(rig: Rig) -> None:
    token = await token_for(rig, rig.rollout)
    async with rig.upstream([request(), send(GOOD)]), rig.client() as client:
        client.send(connect(rig))
        await client.until(AGREED)
        client.send(call("Host: h", f"Authorization: Bearer {token}"))
        await client.until(GOOD)
    assert (await rig.span()).status == "ok"
