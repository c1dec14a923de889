"""The client that the suite's scenarios start: does what the scenario of this name wants a client to do.

    MCP_CONFORMANCE_SCENARIO=tools_call python -m conformance.client [--through MODULE:NAME] URL

The suite sets the variable, adds the URL of a server of its own on a free port, and looks at what arrives there. With
`--through`, calls take another way: the function named is given the URL and yields the one to call in its place.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import mcp_types as types
from conformance import oauth
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

Json = dict[str, Any]
Through = Callable[[str], AbstractAsyncContextManager[str]]
STATELESS = "2026-07-28"


class Run:
    """One scenario: where the server is, and what the scenario tells its client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
        self.version = os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"]
        self.given: Json = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))

    @asynccontextmanager
    async def connected(self, **options: Any):
        """A client of the lifecycle that the run is about."""
        async with create_mcp_http_client(auth=await self._auth()) as http:
            transport = streamable_http_client(self.url, http_client=http)
            mode = "auto" if self.version == STATELESS else "legacy"
            async with Client(transport, mode=mode, **options) as client:
                yield client

    async def _auth(self) -> Any:
        match self.scenario:
            case "auth/client-credentials-basic":
                return oauth.by_secret(self.url, self.given)
            case "auth/client-credentials-jwt":
                return oauth.by_key(self.url, self.given)
            case "auth/enterprise-managed-authorization":
                return await oauth.by_enterprise(self.url, self.given)
            case "auth/wif-jwt-bearer":
                return oauth.Workload(self.url, self.given)
            case "auth/dpop" | "auth/dpop-nonce":
                return oauth.Dpop(self.url, self.given)
            case name if name.startswith("auth/"):
                return oauth.by_person(self.url, self.given)
            case _:
                return None


async def tools(run: Run) -> None:
    """Lists the tools and calls the first."""
    async with run.connected() as client:
        listed = (await client.list_tools()).tools
        if listed:
            arguments = {"a": 2, "b": 3} if listed[0].input_schema.get("properties") else {}
            await client.call_tool(listed[0].name, arguments)


async def only_list(run: Run) -> None:
    async with run.connected() as client:
        await client.list_tools()


async def every_kind(run: Run) -> None:
    """One of every request that names what it is about in a header."""
    async with run.connected() as client:
        for tool in (await client.list_tools()).tools:
            await client.call_tool(tool.name, {})
        for resource in (await client.list_resources()).resources:
            await client.read_resource(resource.uri)
        for prompt in (await client.list_prompts()).prompts:
            await client.get_prompt(prompt.name)


async def given_calls(run: Run) -> None:
    """The calls that the scenario hands out; those whose tool the client kept."""
    async with run.connected() as client:
        await client.list_tools()
        for call in run.given["toolCalls"]:
            await client.call_tool(call["name"], call["arguments"])


async def kept_tools(run: Run) -> None:
    """Calls every tool that the client did not throw out."""
    async with run.connected() as client:
        for tool in (await client.list_tools()).tools:
            await client.call_tool(tool.name, {"region": "us-west1"})


async def echoed_schema(run: Run) -> None:
    """Sends a tool's schema back as it was understood."""
    async with run.connected() as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        await client.call_tool("json_schema_echo", {"schema": listed["json_schema_2020_12_tool"].input_schema})


async def defaults(run: Run) -> None:
    """Accepts a form as it is: with its default values."""

    async def accept(_: Any, asked: types.ElicitRequestParams) -> types.ElicitResult:
        assert isinstance(asked, types.ElicitRequestFormParams)
        fields: dict[str, Json] = asked.requested_schema["properties"]
        filled = {name: field["default"] for name, field in fields.items() if "default" in field}
        return types.ElicitResult(action="accept", content=filled)

    async with run.connected(elicitation_callback=accept) as client:
        await client.list_tools()
        await client.call_tool("test_client_elicitation_defaults", {})


async def resumed(run: Run) -> None:
    """Calls a tool whose stream the server closes before it has answered."""
    async with run.connected() as client:
        await client.list_tools()
        await client.call_tool("test_reconnection", {})


async def several_rounds(run: Run) -> None:
    """Answers what tools ask for, and calls another tool before the first has what it asked for."""
    clients: list[Client] = []

    async def confirm(_: Any, asked: types.ElicitRequestParams) -> types.ElicitResult:
        await clients[0].call_tool("test_mrtr_unrelated", {})
        return types.ElicitResult(action="accept", content={"confirmed": True})

    async with run.connected(elicitation_callback=confirm) as client:
        clients.append(client)
        await client.list_tools()
        for tool in ("test_mrtr_echo_state", "test_mrtr_no_state", "test_mrtr_no_result_type"):
            await client.call_tool(tool, {})


async def authorized(run: Run) -> None:
    async with run.connected() as client:
        await client.list_tools()
        await client.call_tool("test-tool", {})


SCENARIOS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "elicitation-sep1034-client-defaults": defaults,
    "http-custom-headers": given_calls,
    "http-invalid-tool-headers": kept_tools,
    "http-standard-headers": every_kind,
    "json-schema-2020-12-preservation": echoed_schema,
    "json-schema-ref-no-deref": only_list,
    "request-metadata": only_list,
    "sep-2322-client-request-state": several_rounds,
    "sse-retry": resumed,
}


def _named(name: str) -> Through:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def main(arguments: list[str]) -> None:
    url = arguments[-1]
    async with AsyncExitStack() as stack:
        if arguments[0] == "--through":
            url = await stack.enter_async_context(_named(arguments[1])(url))
        run = Run(url)
        steps = SCENARIOS.get(run.scenario, authorized if run.scenario.startswith("auth/") else tools)
        await steps(run)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main(sys.argv[1:]))
