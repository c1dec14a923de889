"""A page of a foreign site, in the browser of somebody on this machine, uses neither calls nor the control API.

It cannot leave out where it has come from: `Origin` names its site, and after DNS rebinding `Host` does.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.mistakes import tells
from fakes.odd import request, send
from fakes.raw import error_of, get, head, post
from fakes.rig import CHAT, GOOD, Rig, Within, inside
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.settings import LocalNames

EVIL = "http://evil.example"
HOSTS = {
    "localhost:4747": True,
    "127.0.0.1": True,
    "[::1]:1": True,
    "192.168.1.5:4747": True,
    "host.docker.internal:4747": True,
    "workstation": True,
    "agent.localhost": True,
    "evil.example": False,
    "evil.example:4747": False,
    "localhost.": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "localhost@evil.example": False,
    "evil.example/localhost": False,
    "xinternal.evil": False,
    "0x7f.1": False,
}
ORIGINS = {
    "http://localhost:3000": True,
    "https://[::1]": True,
    "app://obsidian.md": True,
    "vscode-webview://1234": True,
    EVIL: False,
    "https://evil.example": False,
    "http://localhost.evil.example": False,
    "http://localhost@evil.example": False,
    "http://6.6.6.6": False,
    "HTTP://evil.example": False,
    "null": False,
    "file://": False,
}


async def status_of(rig: Rig, sent: bytes) -> int:
    """What is answered to these bytes."""
    async with rig.client() as client:
        client.send(sent)
        return int((await client.message()).split(b" ", 2)[1])


@pytest.mark.parametrize("named", [HOSTS, ORIGINS], ids=["names", "comes from a page of"])
async def test_a_call_is_of_this_machine(rig: Rig, named: dict[str, bool]) -> None:
    for name, passes in named.items():
        host, headers = (name, []) if named is HOSTS else ("localhost", [("Origin", name)])
        async with rig.upstream([request(), send(GOOD)]) as upstream:
            status = await status_of(rig, post(rig.path(), b"{}", headers, host=host))
        assert (status, len(upstream.connections)) == ((200, 1) if passes else (403, 0)), name


UPGRADE = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13"),
           ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]  # fmt: skip


async def test_nothing_that_a_page_can_send_passes(rig: Rig) -> None:
    """Simple requests, a preflight, a WebSocket: none of them has to ask the gateway first."""
    scope = f"/rollout/{rig.rollout}/attempt/a1"
    plain = [("Content-Type", "text/plain"), ("Content-Length", "2"), ("Origin", EVIL), ("Host", "127.0.0.1")]
    async with rig.upstream([request()]) as upstream:
        for sent in (
            head(f"POST {scope}{CHAT} HTTP/1.1", plain) + b"{}",
            head(f"POST {scope}/rewards HTTP/1.1", plain) + b"{}",
            head(f"POST {scope}/v1/traces HTTP/1.1", plain) + b"{}",
            head(f"OPTIONS {scope}{CHAT} HTTP/1.1", [("Origin", EVIL), ("Host", "127.0.0.1")]),
            get(f"{scope}/v1/responses", [*UPGRADE, ("Origin", EVIL)], host="127.0.0.1"),
            get(f"{scope}/v1/models", host="evil.example"),
        ):
            assert await status_of(rig, sent) == 403, sent
        assert upstream.connections == []


async def test_the_refusal_says_the_way_out(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(post(CHAT, b"{}", host="evil.example"))
        error = error_of(await client.message(), 403)
    assert error["param"] == "host"
    assert tells(error["message"], "'evil.example'", "`names` in the settings")


async def test_the_control_api_is_asked_by_no_foreign_page(rig: Rig) -> None:
    asked = post("/api/queue", b'{"state":"paused"}', [("Origin", EVIL)], host="localhost")
    assert await status_of(rig, asked) == 403
    for origin in ("null", "http://6.6.6.6", "file://", "https://localhost.evil.example"):
        assert await status_of(rig, get("/api/queue", [("Origin", origin)], host="localhost")) == 403, origin
    for origin in ("http://localhost:4747", "https://127.0.0.1"):
        assert await status_of(rig, get("/api/queue", [("Origin", origin)], host="localhost")) == 200, origin
    assert (await rig.tape.get("/api/queue"))["state"] == "open"


async def test_names_of_the_settings_are_this_machine(
    within: Within, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a gateway that asks for a key asks for no names: no page has the key."""
    async with within(names=["gate.example"]) as named, named.upstream([request(), send(GOOD)]):
        for target in ("/rollout/r1/v1/models", "/api/queue"):
            for host, origin, wanted in (
                ("Gate.example:80", "https://gate.example", 200),
                ("gate.example.evil.example", "http://localhost", 403),
                ("localhost", "https://not.gate.example", 403),
            ):
                status = await status_of(named, get(target, [("Origin", origin)], host=host))
                assert status == wanted, (target, host, origin)
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "admin-key-of-the-test")
    async with inside(tmp_path / "locked", http, require_token=True) as locked:
        assert await status_of(locked, get("/v1/models", [("Origin", EVIL)], host="evil.example")) == 401


LABEL = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_@/:%[]. ", min_size=1, max_size=20)


@given(LABEL, st.sampled_from(["com", "example", "net", "internal.com", "localhost.org", "test.io", "1a"]))
def test_no_name_that_somebody_can_own_is_asked(label: str, domain: str) -> None:
    names = LocalNames(["gate.org"], ["api.openai.com"])
    host = f"{label}.{domain}"
    assert host in ("api.openai.com", "gate.org") or not names.accepts_host(host)
    assert not names.is_own(host) or host == "gate.org"
    assert not names.accepts_origin(f"http://{host}", "localhost") or host == "gate.org"


def test_what_is_led_here_on_its_way_to_an_upstream() -> None:
    names = LocalNames((), ["api.openai.com"])
    assert names.accepts_host("api.openai.com:443")
    assert not names.is_own("api.openai.com")
    assert not names.accepts_origin("https://api.openai.com.evil.example", "api.openai.com")
