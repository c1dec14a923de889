"""A server that offers everything the conformance suite asks for, on the official SDK.

    python -m conformance.server

Prints its URL when it listens, on a free port of loopback. It speaks both lifecycles: 2025-11-25 with sessions, and
2026-07-28 without.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import warnings
from itertools import count
from typing import Any

import mcp_types as types
import uvicorn
from conformance import fixtures, rounds
from conformance.fixtures import NOTHING, Context
from mcp.server.lowlevel import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, PromptsListChanged, ToolsListChanged
from mcp.shared.exceptions import MCPError

RETRY_MS = 100
"""How long a client is told to wait before it resumes a stream."""
AWAY_S = 0.3
"""How long a tool works after it has closed its stream."""


class Events(EventStore):
    """What was sent on each stream of a session, to be sent again to clients that resume."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._sent: list[tuple[EventId, StreamId, types.JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: StreamId, message: types.JSONRPCMessage | None) -> EventId:
        event_id = str(next(self._numbers))
        self._sent.append((event_id, stream_id, message))
        return event_id

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        streams = {event_id: stream for event_id, stream, _ in self._sent}
        wanted = streams.get(last_event_id)
        if wanted is None:
            return None
        for event_id, stream, message in list(self._sent):
            if stream == wanted and int(event_id) > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, event_id))
        return wanted


class Everything:
    """The handlers of the server, and what its lists hold at the moment."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._more_tools = self._more_prompts = False
        """Whether the lists are longer by one just now. They change when a test asks for it."""

    def server(self) -> Server[Any]:
        made = Server[Any](
            "everything",
            version="1.0.0",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_subscribe_resource=self._accept,
            on_unsubscribe_resource=self._accept,
            on_set_logging_level=self._accept,
            on_completion=self._complete,
            on_subscriptions_listen=ListenHandler(self._bus),
        )
        made.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=made.name))
        return made

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        schemas = {name: schema for name, (_, schema) in fixtures.TOOLS.items()}
        schemas |= dict.fromkeys([*rounds.TOOLS, *CONNECTED], NOTHING)
        if self._more_tools:
            schemas["test_tool_that_came_later"] = NOTHING
        return types.ListToolsResult(
            tools=[
                types.Tool(name=name, description=name.replace("_", " "), input_schema=schema)
                for name, schema in schemas.items()
            ]
        )

    async def _call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        if tool := fixtures.TOOLS.get(params.name):
            return await tool[0](ctx, params.arguments or {})
        if asking := rounds.TOOLS.get(params.name):
            return asking(ctx, params.input_responses or {}, params.request_state)
        match params.name:
            case "test_reconnection":
                await self._leave(ctx)
            case "test_trigger_tool_change":
                self._more_tools = not self._more_tools
                await self._bus.publish(ToolsListChanged())
            case "test_trigger_prompt_change":
                self._more_prompts = not self._more_prompts
                await self._bus.publish(PromptsListChanged())
            case _:
                raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")
        return fixtures.said("Done.")

    async def _leave(self, ctx: Context) -> None:
        """Closes the stream in the middle of the call: the client has to come back for the answer."""
        if ctx.close_sse_stream is not None:
            await ctx.close_sse_stream()
        await asyncio.sleep(AWAY_S)

    async def _list_prompts(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        prompts = [*fixtures.PROMPTS, fixtures.named(rounds.PROMPT)]
        if self._more_prompts:
            prompts.append(fixtures.named("test_prompt_that_came_later"))
        return types.ListPromptsResult(prompts=prompts)

    async def _get_prompt(
        self, ctx: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult | types.InputRequiredResult:
        if params.name == rounds.PROMPT:
            return rounds.prompt(params.input_responses or {})
        return fixtures.prompt(params.name, params.arguments or {})

    async def _list_resources(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=fixtures.RESOURCES)

    async def _list_templates(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=fixtures.TEMPLATES)

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        return fixtures.read(params.uri)

    async def _accept(self, ctx: Context, params: object) -> types.EmptyResult:
        return types.EmptyResult()

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        values = [f"{params.argument.value}-{ending}" for ending in ("one", "two")]
        return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


CONNECTED = ("test_reconnection", "test_trigger_tool_change", "test_trigger_prompt_change")
"""Tools that do something to the connection or to the lists; `Everything` calls them itself."""


async def main() -> None:
    with warnings.catch_warnings():
        # Logging is deprecated since 2026-07-28, and the suite of 2025-11-25 asks for it.
        warnings.simplefilter("ignore")
        server = Everything().server()
    listening = socket.create_server(("127.0.0.1", 0))
    app = server.streamable_http_app(event_store=Events(), retry_interval=RETRY_MS)
    # Its other parser leaves spaces at the end of a header's value, which one scenario sends.
    config = uvicorn.Config(app, http="h11", log_level="warning", timeout_graceful_shutdown=1)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
