"""The official clients of Azure, Foundry, Vertex and Gemini's OpenAI endpoint: their calls are read."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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

    async def post(self, path: str, **asked: Any) -> None:
        """A call without a client."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.tape.http.post(self.base + path, json=asked, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

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


async def drained(stream: Any) -> Any:
    """The events of a stream."""
    return [event async for event in await stream]


async def whole(manager: Any) -> Any:
    """The message of a stream of Anthropic's client."""
    async with manager as stream:
        return await stream.get_final_message()


CALLS: dict[str, tuple[Callable[[World], Awaitable[Any]], str, str, str]] = {
    "deployment": (
        lambda it: it.azure.chat.completions.create(model="prod", messages=ASKED, tools=[TOOL]),
        "chat", "prod", f"/openai/deployments/prod/chat/completions?api-version={VERSION}",
    ),
    "deployment, streamed": (
        lambda it: drained(it.azure.chat.completions.create(model="prod", messages=ASKED, tools=[TOOL], stream=True,
                                                            stream_options={"include_usage": True})),
        "chat", "prod", f"/openai/deployments/prod/chat/completions?api-version={VERSION}",
    ),
    "text": (
        lambda it: it.azure.completions.create(model="old", prompt="Paris?"),
        "completions", "old", f"/openai/deployments/old/completions?api-version={VERSION}",
    ),
    "embeddings": (
        lambda it: it.azure.embeddings.create(model="small one", input="Paris?"),
        "embeddings", "small one", f"/openai/deployments/small%20one/embeddings?api-version={VERSION}",
    ),
    "responses": (
        lambda it: it.azure.responses.create(model="prod", input="Paris?", tools=[RESPONSES_TOOL]),
        "responses", "prod", f"/openai/responses?api-version={VERSION}",
    ),
    "v1, streamed": (
        lambda it: drained(it.openai("/openai/v1", KEY).responses.create(model="prod", input="Paris?", stream=True)),
        "responses", "prod", "/openai/v1/responses",
    ),
    "v1 chat": (
        lambda it: it.openai("/openai/v1", KEY).chat.completions.create(model="prod", messages=ASKED),
        "chat", "prod", "/openai/v1/chat/completions",
    ),
    "Foundry": (
        lambda it: it.foundry().messages.create(model="claude-x", max_tokens=99, messages=ASKED, tools=[MESSAGES_TOOL]),
        "messages", "claude-x", "/anthropic/v1/messages",
    ),
    "Foundry, streamed": (
        lambda it: whole(it.foundry().messages.stream(model="claude-x", max_tokens=99, messages=ASKED)),
        "messages", "claude-x", "/anthropic/v1/messages",
    ),
    "Foundry's count": (
        lambda it: it.foundry().messages.count_tokens(model="claude-x", messages=ASKED),
        "count_tokens", "claude-x", "/anthropic/v1/messages/count_tokens",
    ),
    "Vertex": (
        lambda it: it.claude.messages.create(model="claude-x@1", max_tokens=99, messages=ASKED, tools=[MESSAGES_TOOL]),
        "messages", "claude-x@1", f"{PROJECT}/publishers/anthropic/models/claude-x@1:rawPredict",
    ),
    "Vertex, streamed": (
        lambda it: whole(it.claude.messages.stream(model="claude-x@1", max_tokens=99, messages=ASKED)),
        "messages", "claude-x@1", f"{PROJECT}/publishers/anthropic/models/claude-x@1:streamRawPredict",
    ),
    "Vertex' count": (
        lambda it: it.claude.messages.count_tokens(model="claude-x@1", messages=ASKED),
        "count_tokens", "claude-x@1", f"{PROJECT}/publishers/anthropic/models/count-tokens:rawPredict",
    ),
    "Vertex' Mistral": (
        lambda it: it.post(f"{PROJECT}/publishers/mistralai/models/mistral-x:rawPredict", model="x", messages=ASKED),
        "chat", "mistral-x", f"{PROJECT}/publishers/mistralai/models/mistral-x:rawPredict",
    ),
    "Vertex' OpenAI models": (
        lambda it: it.kept(openai.AsyncOpenAI(
            provider=vertex(base_url=f"{it.base}{PROJECT}/publishers/openai/v1", token_provider=lambda: TOKEN)
        )).responses.create(model="gpt-x", input="Paris?"),
        "responses", "gpt-x", f"{PROJECT}/publishers/openai/v1/responses",
    ),
    "Vertex' chat": (
        lambda it: it.openai(f"{PROJECT}/endpoints/openapi", TOKEN).chat.completions.create(
            model="meta/llama", messages=ASKED),
        "chat", "meta/llama", f"{PROJECT}/endpoints/openapi/chat/completions",
    ),
    "an endpoint of one's own": (
        lambda it: it.openai(f"{PROJECT}/endpoints/77", TOKEN).chat.completions.create(model="", messages=ASKED),
        "chat", "endpoints/77", f"{PROJECT}/endpoints/77/chat/completions",
    ),
    "Claude Platform on Google Cloud": (
        lambda it: it.kept(AsyncAnthropicGoogleCloud(
            base_url=f"{it.base}{PROJECT}/workspaces/w/invoke", token_provider=lambda: TOKEN, max_retries=0
        )).messages.create(model="claude-x", max_tokens=99, messages=ASKED),
        "messages", "claude-x", f"{PROJECT}/workspaces/w/invoke/v1/messages",
    ),
    "Gemini": (
        lambda it: it.openai("/v1beta/openai", TOKEN).chat.completions.create(model="gemini-x", messages=ASKED),
        "chat", "gemini-x", "/v1beta/openai/chat/completions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
async def test_official_clients_are_read(tmp_path: Path, http: aiohttp.ClientSession, name: str) -> None:
    ask, dialect, model, path = CALLS[name]
    async with world(tmp_path, http) as made:
        await ask(made)
        span, turn = await made.read()
        (sent,) = made.host.seen
        assert (sent.path, sent.body) == (path, await made.tape.raw(span, "request"))
        assert (span.dialect, span.model, span.status, span.attributes) == (dialect, model, "ok", None)
        assert (turn.problems, turn.messages[0].parts[0].text[-6:]) == ([], "Paris?")
        assert span.stream == ("streamed" in name)
        if dialect == "count_tokens":
            assert span.usage is None
        else:
            assert span.model_served in (f"{model}-served", "-served"), "an endpoint is asked for no model"
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
