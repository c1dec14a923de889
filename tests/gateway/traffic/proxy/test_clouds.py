"""The official clients of Azure, Foundry, Vertex and Gemini's OpenAI endpoint: their calls are read."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
from anthropic.lib.google_cloud import AsyncAnthropicGoogleCloud
from anthropic.lib.vertex import AsyncAnthropicVertex
from fakes.background import SAID, background_host
from fakes.budgets import budget, toml
from fakes.clouds import FORBIDDEN, KEY, TOKEN, CloudHost, cloud_host
from fakes.experiment import prompt
from fakes.local import Local, locally
from fakes.process import upstream
from fakes.responses_websocket import websocket_host
from fakes.tape import Tape
from openai.providers import vertex
from websockets.asyncio.client import connect

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import RolloutConfig

PROJECT = "/v1/projects/p/locations/global"
VERSION = "2025-04-01-preview"
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
MESSAGES_TOOL: Any = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


class World(NamedTuple):
    """A gateway in front of the clouds."""

    gateway: Local
    host: CloudHost
    tape: Tape
    stack: AsyncExitStack

    def kept(self, client: Any) -> Any:
        """A client that is closed at the end."""
        _ = self.stack.push_async_callback(client.close)
        return client

    @property
    def base(self) -> str:
        return f"{self.gateway.url}/rollout/r/attempt/a1"

    @property
    def azure(self) -> Any:
        return self.kept(
            openai.AsyncAzureOpenAI(azure_endpoint=self.base, api_key=KEY, api_version=VERSION, max_retries=0)
        )

    def openai(self, path: str, key: str) -> Any:
        return self.kept(openai.AsyncOpenAI(base_url=self.base + path, api_key=key, max_retries=0))

    def foundry(self, **key: Any) -> Any:
        url = f"{self.base}/anthropic/"
        return self.kept(anthropic.AsyncAnthropicFoundry(base_url=url, max_retries=0, **(key or {"api_key": KEY})))

    @property
    def claude(self) -> Any:
        url = f"{self.base}/v1"
        options: Any = {"access_token": TOKEN, "project_id": "p", "region": "global", "max_retries": 0}
        return self.kept(AsyncAnthropicVertex(base_url=url, **options))

    async def read(self) -> tuple[Any, Any]:
        """The only span, and its turn."""
        (span,) = await self.tape.spans("r", 1)
        return span, (await self.tape.detail(span)).turn


@asynccontextmanager
async def world(
    home: Path, http: aiohttp.ClientSession, more: str = "", clouds: tuple[str, ...] = ("azure", "vertex", "gemini"),
    key_env: str | None = None,
) -> AsyncGenerator[World]:  # fmt: skip
    """A gateway that has upstreams of these families, or one of OpenAI's."""
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(cloud_host())
        named = "".join(upstream(it, host.url, it, key_env) for it in clouds or ("openai",))
        gateway = await stack.enter_async_context(locally(home, named + more))
        yield World(gateway, host, Tape(gateway.url, http), stack)


CLIENTS: dict[str, Callable[[World], Any]] = {
    "azure": lambda it: it.azure,
    "v1": lambda it: it.openai("/openai/v1", KEY),
    "foundry": lambda it: it.foundry(),
    "vertex": lambda it: it.claude,
    "vertex' gpt": lambda it: it.kept(
        openai.AsyncOpenAI(provider=vertex(base_url=f"{it.base}{GPT}", token_provider=lambda: TOKEN))
    ),
    "vertex' chat": lambda it: it.openai(f"{PROJECT}/endpoints/openapi", TOKEN),
    "own endpoint": lambda it: it.openai(f"{PROJECT}/endpoints/77", TOKEN),
    "google cloud": lambda it: it.kept(
        AsyncAnthropicGoogleCloud(base_url=it.base + INVOKE, token_provider=lambda: TOKEN, max_retries=0)
    ),
    "gemini": lambda it: it.openai("/v1beta/openai", TOKEN),
}
GPT, INVOKE, CLAUDE = (
    f"{PROJECT}/publishers/openai/v1",
    f"{PROJECT}/workspaces/w/invoke",
    f"{PROJECT}/publishers/anthropic",
)
CHAT, MESSAGES, RESPONSES = "chat.completions.create", "messages.create", "responses.create"
SAY: Any = {"messages": ASKED}
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}
DEPLOYED, API = "/openai/deployments", f"?api-version={VERSION}"
CALLS: list[tuple[str, str, str, Any, str, str]] = [
    ("azure", CHAT, "prod", {**SAY, "tools": [TOOL]}, "chat", f"{DEPLOYED}/prod/chat/completions{API}"),
    ("azure", CHAT, "prod", {**SAY, "tools": [TOOL], **USAGE}, "chat", f"{DEPLOYED}/prod/chat/completions{API}"),
    ("azure", "completions.create", "old", {"prompt": "Paris?"}, "completions", f"{DEPLOYED}/old/completions{API}"),
    ("azure", "embeddings.create", "b c", {"input": "Paris?"}, "embeddings", f"{DEPLOYED}/b%20c/embeddings{API}"),
    (
        "azure",
        RESPONSES,
        "prod",
        {"input": "Paris?", "tools": [RESPONSES_TOOL]},
        "responses",
        f"/openai/responses{API}",
    ),
    ("v1", RESPONSES, "prod", {"input": "Paris?", "stream": True}, "responses", "/openai/v1/responses"),
    ("v1", CHAT, "prod", SAY, "chat", "/openai/v1/chat/completions"),
    ("foundry", MESSAGES, "claude-x", {**SAY, "tools": [MESSAGES_TOOL]}, "messages", "/anthropic/v1/messages"),
    ("foundry", MESSAGES, "claude-x", {**SAY, "stream": True}, "messages", "/anthropic/v1/messages"),
    ("foundry", "messages.count_tokens", "claude-x", SAY, "count_tokens", "/anthropic/v1/messages/count_tokens"),
    ("vertex", MESSAGES, "x@1", {**SAY, "tools": [MESSAGES_TOOL]}, "messages", f"{CLAUDE}/models/x@1:rawPredict"),
    ("vertex", MESSAGES, "x@1", {**SAY, "stream": True}, "messages", f"{CLAUDE}/models/x@1:streamRawPredict"),
    ("vertex", "messages.count_tokens", "x", SAY, "count_tokens", f"{CLAUDE}/models/count-tokens:rawPredict"),
    ("vertex' gpt", RESPONSES, "gpt-x", {"input": "Paris?"}, "responses", f"{GPT}/responses"),
    ("vertex' chat", CHAT, "meta/llama", SAY, "chat", f"{PROJECT}/endpoints/openapi/chat/completions"),
    ("own endpoint", CHAT, "", SAY, "chat", f"{PROJECT}/endpoints/77/chat/completions"),
    ("google cloud", MESSAGES, "claude-x", SAY, "messages", f"{INVOKE}/v1/messages"),
    ("gemini", CHAT, "gemini-x", SAY, "chat", "/v1beta/openai/chat/completions"),
]


@pytest.mark.parametrize(("client", "method", "model", "asked", "dialect", "path"), CALLS)
async def test_official_clients_are_read(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    client: str,
    method: str,
    model: str,
    asked: Any,
    dialect: str,
    path: str,
) -> None:
    async with world(tmp_path, http) as made:
        more = {"max_tokens": 99} if method == MESSAGES else {}
        said = await attrgetter(method)(CLIENTS[client](made))(model=model, **asked, **more)
        if "stream" in asked:
            assert [event async for event in said]
        span, turn = await made.read()
        (sent,) = made.host.seen
        assert (sent.path, sent.body) == (path, await made.tape.raw(span, "request"))
        assert (span.dialect, span.model, span.status) == (dialect, model or "endpoints/77", "ok")
        assert (turn.problems, turn.messages[0].parts[0].text[-6:]) == ([], "Paris?")
        assert (span.attributes, span.stream) == (None, "stream" in asked)
        if dialect == "count_tokens":
            assert span.usage is None
        else:
            assert span.model_served == f"{model}-served"
            assert span.usage.input_tokens
        if span.dialect not in ("embeddings", "count_tokens"):
            called = [part.name for choice in turn.choices for part in choice.message.parts if part.type == "tool_call"]
            assert called == ["weather"] * len(turn.tools) == ["weather"] * span.tool_calls
            assert called or turn.choices[0].message.parts[0].text.startswith("You said: ")


async def test_the_filter_s_refusal_is_an_error_of_the_api(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as made:
        with pytest.raises(openai.BadRequestError) as caught:
            await made.azure.chat.completions.create(model="prod", messages=[{"role": "user", "content": FORBIDDEN}])
        assert caught.value.code == "content_filter"
        span, turn = await made.read()
        assert (span.status, span.error, turn.problems) == ("error", "http_400", [])
        assert "content management policy" in (turn.error or "")


async def test_the_gateway_s_own_errors_have_the_shape_of_the_format(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, http, clouds=()) as made:
        with pytest.raises(openai.NotFoundError) as told:
            await made.azure.chat.completions.create(model="prod", messages=ASKED)
        assert (told.value.code, 'dialect = "azure"' in str(told.value)) == ("upstream", True)
        for client, family in ((made.foundry(), "azure"), (made.claude, "vertex")):
            with pytest.raises(anthropic.NotFoundError) as refused:
                await client.messages.create(model="claude-x", max_tokens=9, messages=ASKED)
            body: Any = refused.value.body
            assert body["error"]["type"] == "not_found_error"
            assert f'dialect = "{family}"' in str(refused.value)


@pytest.mark.parametrize("alias", ['"other one"', '{ azure = "other one" }'])
async def test_a_route_s_alias_stands_in_the_path(tmp_path: Path, http: aiohttp.ClientSession, alias: str) -> None:
    routes = "".join(
        f'[[route]]\nmodel = "{model}"\nupstream = "{upstream}"\nalias = {alias.replace("azure", upstream)}\n'
        for model, upstream in (("gpt-*", "azure"), ("claude-*", "vertex"))
    )
    async with world(tmp_path, http, routes) as made:
        said = await made.azure.chat.completions.create(model="gpt-prod", messages=ASKED)
        _ = await made.azure.chat.completions.create(model="prod", messages=ASKED)
        _ = await made.claude.messages.create(model="claude-x", max_tokens=99, messages=ASKED)
        deployment, other, claude = made.host.seen
        assert deployment.path == f"/openai/deployments/other%20one/chat/completions?api-version={VERSION}"
        assert json.loads(deployment.body)["model"] == "other one"
        assert other.path == f"/openai/deployments/prod/chat/completions?api-version={VERSION}"
        assert claude.path == f"{PROJECT}/publishers/anthropic/models/other%20one:rawPredict"
        assert said.model == "other one-served"
        spans = await made.tape.spans("r", 3)
        assert [span.model for span in spans] == ["gpt-prod", "prod", "claude-x"]
        assert [span.path for span in spans] == [it.path for it in made.host.seen]


async def test_a_release_changes_their_prompts(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    old, new = "You are a guide of Paris.", "You are a friendly guide of Paris."
    route = '[[route]]\nmodel = "prod"\nupstream = "azure"\nalias = "next"\n'
    async with world(tmp_path, http, route) as made, Client(made.gateway.url) as client:
        _ = await client.add_version("guide", prompt(old, sent=True, version="v1"))
        _ = await client.add_version("guide", prompt(new, version="v2"))
        _ = await client.enqueue([RolloutSpec(id="r", input="r", config=RolloutConfig(versions={"guide": "v2"}))])
        said: list[Any] = [{"role": "system", "content": old}, *ASKED]
        _ = await made.azure.chat.completions.create(model="prod", messages=said)
        for create in (made.claude.messages.create, made.foundry().messages.create):
            _ = await create(model="claude-x", max_tokens=99, system=old, messages=ASKED)
        assert [new in it.body.decode() and old not in it.body.decode() for it in made.host.seen] == [True] * 3
        assert made.host.seen[0].path.startswith("/openai/deployments/next/")
        spans = await made.tape.spans("r", 3)
        assert [(span.versions, span.model) for span in spans] == [
            ({"guide": "v2"}, it) for it in ("prod", "claude-x", "claude-x")
        ]


@pytest.mark.parametrize("below", ["/openai/v1", f"{PROJECT}/publishers/openai/v1"])
async def test_an_answer_in_the_background(tmp_path: Path, http: aiohttp.ClientSession, below: str) -> None:
    async with background_host(below) as host, AsyncExitStack() as stack:
        config = upstream("cloud", host.url.removesuffix(below), "azure" if below == "/openai/v1" else "vertex")
        gateway = await stack.enter_async_context(locally(tmp_path, config))
        made = World(gateway, CloudHost(), Tape(gateway.url, http), stack)
        asked = await made.openai(below, KEY).responses.create(model="o3", input="Paris?", background=True)
        found: Any = await made.openai(below, KEY).responses.retrieve(asked.id)
        assert (found.output_text, found.usage.output_tokens) == (SAID, 7900)
        spans = [(span.dialect, span.usage and span.usage.output_tokens) for span in await made.tape.spans("r", 2)]
        assert spans == [("responses", 7900), ("retrieval", None)]


async def test_responses_on_a_websocket(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with websocket_host() as host, locally(tmp_path, upstream("azure", host.url, "azure")) as gateway:
        url = gateway.url.replace("http", "ws") + "/rollout/r/attempt/a1/openai/v1/responses"
        async with connect(url, additional_headers={"api-key": KEY}, proxy=None) as connection:
            await connection.send(json.dumps({"type": "response.create", "model": "prod", "input": "Paris?"}))
            while json.loads(await connection.recv())["type"] != "response.completed":
                pass
        ((path, headers),) = host.opened
        assert (path, headers["api-key"]) == ("/openai/v1/responses", KEY)
        (span,) = await Tape(gateway.url, http).spans("r", 1)
        assert (span.dialect, span.model, span.status) == ("responses", "prod", "ok")


async def test_budgets_count_them(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    capped = toml(budget(name="cap", unit="tokens", limit=9000, model="prod"))
    async with world(tmp_path, http, capped) as made:
        for _ in range(2):
            _ = await made.azure.chat.completions.create(model="prod", messages=ASKED, max_tokens=100)
        with pytest.raises(openai.RateLimitError):
            await made.azure.chat.completions.create(model="prod", messages=ASKED, max_tokens=9000)
        _ = await made.azure.chat.completions.create(model="other", messages=ASKED, max_tokens=9000)
        assert len(made.host.seen) == 3


async def test_the_gateway_s_key_replaces_the_agent_s(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUD", KEY)
    async with world(tmp_path, http, clouds=("azure",), key_env="CLOUD") as made:
        login = openai.AsyncAzureOpenAI(azure_endpoint=made.base, azure_ad_token="eyJhbGciOi.x", api_version=VERSION)
        _ = await made.kept(login).chat.completions.create(model="prod", messages=ASKED)
        _ = await made.foundry(api_key="own").messages.create(model="claude-x", max_tokens=9, messages=ASKED)
        names = ("api-key", "x-api-key", "authorization")
        sent = [{name: it.headers.get(name) for name in names} for it in made.host.seen]
        assert sent == [{"api-key": KEY, "x-api-key": KEY, "authorization": None}] * 2


async def test_foundry_s_login_goes_to_nobody_else(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as made:
        client = made.foundry(azure_ad_token_provider=lambda: KEY)
        _ = await client.messages.create(model="claude-x", max_tokens=9, messages=ASKED)
        span, _turn = await made.read()
        assert (span.upstream, made.host.seen[0].headers["authorization"]) == ("azure", f"Bearer {KEY}")
