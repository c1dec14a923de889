"""Whose API a call is that its path alone does not tell: it goes to that provider, and its key to nobody else."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import zstandard
from fakes.engine import engine
from fakes.provider import Provider, serving
from fakes.rig import CHAT, MESSAGES, Inside, Within

FAMILIES = ("openai", "anthropic", "gemini", "chatgpt")
LOGIN = {"Authorization": "Bearer eyJhbGciOi.J9.c2ln", "ChatGPT-Account-ID": "account-1"}
ASKED = {"model": "gpt-5", "input": "Hello", "stream": True}


@dataclass
class Rig:
    gateway: Inside
    providers: dict[str, Provider]

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[str, str]:
        """Who was asked, and for which path."""
        url = self.gateway.base.url + self.gateway.path(path)
        async with self.gateway.tape.http.request(method, url, data=body, headers=headers) as answer:
            _ = await answer.read()
        ((name, seen),) = [(name, seen) for name, it in self.providers.items() for seen in it.log]
        return name, seen.path


@pytest.fixture
async def rig(within: Within) -> AsyncGenerator[Rig]:
    async with AsyncExitStack() as stack:
        providers = {name: await stack.enter_async_context(serving()) for name in FAMILIES}
        ends = {"openai": "/v1", "chatgpt": "/backend-api/codex"}
        upstreams = [
            {"name": name, "base_url": it.url + ends.get(name, ""), "dialect": name} for name, it in providers.items()
        ]
        yield Rig(await stack.enter_async_context(within(upstream=upstreams)), providers)


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
        ("GET", "/v1/files/f1", {"x-goog-api-key": "k"}, "gemini"),
        ("GET", "/v1/batches?pageSize=10", {"x-goog-api-key": "k"}, "gemini"),
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
    span = await rig.gateway.span()
    assert (span.dialect, span.model, span.upstream, span.status) == ("responses", "gpt-5", "chatgpt", "ok")
    assert span.usage is not None
    assert span.usage.input_tokens
    assert "eyJhbGciOi" not in (await rig.gateway.tape.detail(span)).model_dump_json()


@pytest.mark.parametrize(
    ("body", "served"),
    [(b"{no json", None), (b"{}", "every"), (b'{"model":null}', "every"), (b"[]", None)],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_names_no_model_goes_where_every_model_goes(
    within: Within, body: bytes, served: str | None, path: str
) -> None:
    """What cannot be read may name one, and goes nowhere."""
    async with engine() as first, engine() as every:
        upstreams = [{"name": "first", "base_url": first.openai_url}, {"name": "every", "base_url": every.openai_url}]
        route = [{"model": "gpt-*", "upstream": ["first"]}, {"model": "*", "upstream": ["every"]}]
        async with within(upstream=upstreams, route=route) as made, made.client() as client:
            client.send(made.call(body, below=path))
            _ = await client.message()
            span = await made.span()
    assert (span.upstream, span.error == "unreadable") == (served, served is None)


OPERATES = [
    "/v1/load_lora_adapter", "/v1//load_lora_adapter", "/v1/v1/load_lora_adapter", "/inference//v1/sleep",
    "/v1/load%5Flora_adapter/", "/adapters/x", "/pause?mode=abort", "/v1/reset_prefix_cache",
]  # fmt: skip


async def test_an_agent_cannot_operate_the_server(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have the gateway's own key for that."""
    monkeypatch.setenv("KEY", "sesame")
    async with engine() as vllm:
        vllm.key = "sesame"
        up = {"name": "vllm", "base_url": vllm.openai_url, "key_env": "KEY"}
        async with within(upstream=[up]) as made:
            url, http = made.base.url + made.path(""), made.tape.http
            for path in OPERATES:
                async with http.post(url + path, json={"lora_name": "x@v1", "lora_path": "/x"}) as refused:
                    assert refused.status == 403, await refused.text()
                    assert "operates the model server" in (await refused.json())["error"]["message"]
            assert vllm.asked == []
            async with http.post(f"{url}/v1/fine_tuning/jobs/x/pause", json={}) as passed:
                assert passed.status == 404
            async with http.get(f"{url}/v1/models") as listed:
                assert [card["id"] for card in (await listed.json())["data"]] == ["base"]
