"""No request chooses where it goes: only the settings know upstreams. Nor does an answer: who is moved is told so."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

import aiohttp
import pytest
from conftest import StartGateway
from fakes.odd import Odd, Step, odd, request, send
from fakes.process import ROOT, Gateway, upstream
from fakes.raw import connect, get, head, post, reply
from fakes.rig import CHAT, Rig

from bench.structure import parsed

KEY = "sk-key-of-the-upstream-0123456789abcdef"
SCOPE = "/rollout/r1/attempt/a1"
GOOD: list[Step] = [request(), send(reply(200, b"{}"))]
TARGETS = [
    "http://{evil}/v1/chat/completions",
    "https://{evil}/v1/chat/completions",
    "//{evil}/v1/chat/completions",
    "/@{evil}/v1/chat/completions",
    f"{SCOPE}//{{evil}}/v1/chat/completions",
    f"{SCOPE}/v1@{{evil}}/chat/completions",
    f"{SCOPE}/http://{{evil}}/v1/chat/completions",
    f"{SCOPE}/%2e%2e/%2e%2e/v1/chat/completions",
    f"{SCOPE}/..%2f..%2f{{evil}}/v1/chat/completions",
    f"{SCOPE}/v1/chat/completions?url=http://{{evil}}&host={{evil}}",
    f"{SCOPE}/v1/chat/completions#@{{evil}}",
    "\\\\{evil}\\v1",
    "{evil}",
    "*",
]
HEADERS = ["X-Forwarded-Host", "X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "X-Original-URL", "X-Rewrite-URL",
           "X-Host", "X-Upstream", "X-Base-Url", "X-Target-Url", "X-Portkey-Custom-Host", "api-base"]  # fmt: skip
VERBS = {"request", "get", "post", "put", "patch", "delete", "head", "options"}
FIELDS = ["api_base", "base_url", "url", "endpoint", "upstream", "custom_llm_provider", "proxy"]


async def started(start: StartGateway, good: Odd) -> Gateway:
    text = upstream("good", f"{good.url}/v1", "openai", "UPSTREAM_KEY")
    return await start(text, env={"UPSTREAM_KEY": KEY})


async def answered(gateway: Gateway, sent: bytes) -> int:
    async with connect(gateway.url) as client:
        client.send(sent)
        return int((await client.message()).split(b" ", 2)[1])


async def test_no_request_leads_elsewhere(start_gateway: StartGateway) -> None:
    async with odd([]) as evil, odd(GOOD * 60) as good:
        gateway, netloc = await started(start_gateway, good), evil.url.partition("//")[2]
        for target in TARGETS:
            line = f"POST {target.format(evil=netloc)} HTTP/1.1"
            sent = head(line, [("Host", "localhost"), ("Content-Length", "2")]) + b"{}"
            assert await answered(gateway, sent) in (200, 400, 404), target
        for name in HEADERS:
            assert await answered(gateway, post(SCOPE + CHAT, b"{}", [(name, evil.url)], host="localhost")) == 200
        for field in FIELDS:
            body = json.dumps({"model": "m", field: evil.url}).encode()
            assert await answered(gateway, post(SCOPE + CHAT, body, host="localhost")) == 200
        for model in (evil.url, f"//{netloc}", f"openai@{netloc}", "../../evil", "m\r\nHost: evil"):
            body = json.dumps({"model": model}).encode()
            assert await answered(gateway, post(SCOPE + CHAT, body, host="localhost")) == 200
        # Whose name it is does not make it an upstream.
        assert await answered(gateway, post(SCOPE + CHAT, b"{}", host=netloc)) == 200
        assert await answered(gateway, post(f"{SCOPE}/other", b"{}", host=netloc)) == 200
        refused = head(f"CONNECT {netloc} HTTP/1.1", [("Host", netloc)])
        assert await answered(gateway, refused) == 403
        assert evil.connections == []
        heads = [sent.partition(b"\r\n\r\n")[0] for one in good.connections for sent in one.requests]
    lines = {sent.partition(b"\r\n")[0].split(b" ")[1][:4] for sent in heads}
    assert lines <= {b"/v1/", b"/v1@"}, "every one is below the base URL of its upstream"
    host = good.url.partition("//")[2].encode()
    assert all(sent.count(b"\r\nHost: ") == 1 and b"\r\nHost: " + host in sent for sent in heads)


async def test_a_redirection_is_passed_on_and_not_followed(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    statuses = (300, 301, 302, 303, 307, 308)
    async with odd([]) as evil:
        location = f"{evil.url}/v1/chat/completions"
        moved = [
            [request(), send(head(f"HTTP/1.1 {status} Moved", [("Location", location), ("Set-Cookie", "a=b"),
                                                                 ("Content-Length", "0")]))]
            for status in statuses
        ]  # fmt: skip
        async with odd([step for one in moved for step in one]) as good:
            gateway = await started(start_gateway, good)
            for status in statuses:
                url = f"{gateway.url}{SCOPE}{CHAT}"
                async with http.post(url, json={"model": "m"}, allow_redirects=False) as answer:
                    assert (answer.status, answer.headers["Location"]) == (status, location)
            asked = b"".join(sent for one in good.connections for sent in one.requests).lower()
        assert evil.connections == [], "its key would have gone there"
    assert asked.count(KEY.encode()) == len(statuses)
    assert b"cookie" not in asked, "what an upstream sets is kept by no gateway"


def test_nothing_that_the_gateway_asks_by_itself_follows_one() -> None:
    """Engines of exact routes, replays, checks, adapters, webhooks, collectors: the library would, with its headers."""
    asked = {
        f"{path.name}:{call.lineno}": {word.arg: ast.unparse(word.value) for word in call.keywords}
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        if path.relative_to(ROOT).parts[1] not in ("client", "demo")
        # A session of a hosted MCP server is asked through its pipe.
        if path.name != "bridge.py" and "session" in (text := path.read_text(encoding="utf-8"))
        for call in requests(parsed(text))
    }
    assert len(asked) >= 6
    assert [place for place, words in asked.items() if words.get("allow_redirects") != "False"] == []


def requests(tree: ast.Module) -> Iterator[ast.Call]:
    """What is asked of a session of aiohttp."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            method, of = call.func.attr, ast.unparse(call.func.value)
            if method in VERBS and of.removesuffix("()").endswith("session"):
                yield call


@pytest.mark.parametrize(
    "value", ["r1\nX-Evil: 1", "r1\rX-Evil: 1", "r1%0d%0aX-Evil:%201", "r1\0", "r\x7f", "../r2", "ř"]
)
async def test_no_id_becomes_a_header(rig: Rig, value: str) -> None:
    """Nor a path, nor a key of the tape: it is refused before anything is sent."""
    async with rig.upstream([request()]) as upstream:
        for name in ("x-rollout-id", "x-attempt-id", "x-agent-id"):
            named = b"" if name == "x-rollout-id" else b"x-rollout-id: r1\r\n"
            start = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n" % CHAT.encode()
            answer = await told(rig, b"%b%b%b: %b\r\n\r\n" % (start, named, name.encode(), value.encode()))
            assert answer.startswith(b"HTTP/1.1 400 "), (name, answer)
            assert b"X-Evil:" not in answer.partition(b"\r\n\r\n")[0]
        if value.isascii() and value.isprintable():
            for target in (f"/rollout/{value}{CHAT}", f"/rollout/r1/attempt/{value}{CHAT}"):
                assert (await told(rig, get(target))).startswith(b"HTTP/1.1 400 "), target
        assert upstream.connections == []


async def told(rig: Rig, sent: bytes) -> bytes:
    async with rig.client() as client:
        client.send(sent)
        return await client.message()
