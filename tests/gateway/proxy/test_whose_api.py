"""Whose API a call is that its path alone does not tell: it goes to that provider, and its key to nobody else."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import pytest
import zstandard
from conftest import StartGateway
from fakes.process import Gateway
from fakes.provider import Provider, serving
from fakes.tape import Tape

FAMILIES = ("openai", "anthropic", "gemini", "chatgpt")
LOGIN = {"Authorization": "Bearer eyJhbGciOi.J9.c2ln", "ChatGPT-Account-ID": "account-1"}
ASKED = {"model": "gpt-5", "input": "Hello", "stream": True}


@dataclass
class Rig:
    gateway: Gateway
    providers: dict[str, Provider]
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[str, str]:
        """Who was asked, and for which path."""
        url = self.gateway.url + "/rollout/r1/attempt/a1" + path
        async with self.http.request(method, url, data=body, headers=headers) as answer:
            _ = await answer.read()
        ((name, seen),) = [(name, seen) for name, it in self.providers.items() for seen in it.log]
        return name, seen.path


@pytest.fixture
async def rig(start_gateway: StartGateway, http: aiohttp.ClientSession) -> AsyncGenerator[Rig]:
    async with AsyncExitStack() as stack:
        providers = {name: await stack.enter_async_context(serving()) for name in FAMILIES}
        ends = {"openai": "/v1", "chatgpt": "/backend-api/codex"}
        gateway = await start_gateway(
            "".join(
                f'[[upstream]]\nname = "{name}"\nbase_url = "{it.url}{ends.get(name, "")}"\ndialect = "{name}"\n'
                for name, it in providers.items()
            )
        )
        yield Rig(gateway, providers, http)


@pytest.mark.parametrize(
    ("method", "path", "headers", "name"),
    [
        ("HEAD", "/api/hello", {}, "anthropic"),
        ("GET", "/api/claude_cli/bootstrap", {}, "anthropic"),
        ("POST", "/any", {"Authorization": "Bearer sk-ant-oat01-x"}, "anthropic"),
        ("POST", "/any", {"x-goog-api-key": "k"}, "gemini"),
        ("GET", "/v1beta/cachedContents", {}, "gemini"),
        ("GET", "/backend-api/wham/accounts/check", {"Authorization": "Bearer eyJ"}, "chatgpt"),
        ("GET", "/v1/files", {"Authorization": "Bearer sk-proj-x"}, "openai"),
        ("GET", "/v1/models/m", LOGIN | {"OpenAI-Beta": "x"}, "chatgpt"),
        ("POST", "/tokenize", {"Authorization": "Bearer of-whom"}, "openai"),
        ("GET", "/v1/skills", {"Authorization": "Bearer of-whom"}, "openai"),
        ("GET", "/v1/skills", {"Authorization": "Bearer of-whom", "anthropic-version": "2026-10-21"}, "anthropic"),
    ],
)
async def test_an_unknown_path_goes_to_whom_it_belongs(
    rig: Rig, method: str, path: str, headers: dict[str, str], name: str
) -> None:
    asked, there = await rig.ask(method, path, b"", **headers)
    below = there.removeprefix("/backend-api/codex").removeprefix("/v1")
    assert (asked, below) == (name, path.removeprefix("/v1"))


async def test_an_unknown_path_goes_to_the_host_that_it_names(rig: Rig) -> None:
    host = rig.providers["gemini"].url.partition("://")[2]
    assert await rig.ask("GET", "/any", Host=host) == ("gemini", "/any")


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/backend-api/codex/responses"])
async def test_a_chatgpt_login_is_understood_and_goes_to_its_host(rig: Rig, path: str) -> None:
    body = zstandard.compress(json.dumps(ASKED).encode())
    headers = LOGIN | {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    assert await rig.ask("POST", path, body, **headers) == ("chatgpt", "/backend-api/codex/responses")
    (seen,) = rig.providers["chatgpt"].log
    assert (seen.body, seen.header("chatgpt-account-id")) == (body, "account-1")
    tape = Tape(rig.gateway.url, rig.http)
    (span,) = await tape.spans("r1", 1)
    assert (span.dialect, span.model, span.upstream, span.status) == ("responses", "gpt-5", "chatgpt", "ok")
    assert span.usage is not None
    assert span.usage.input_tokens
    assert "eyJhbGciOi" not in (await tape.detail(span)).model_dump_json()
