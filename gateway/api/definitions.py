"""The control API of the definitions that MCP servers list."""

from __future__ import annotations

import asyncio

from aiohttp import web

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer, id_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.model.definitions import ApproveRequest, ServerDefinitions, ServerList, ServerView
from penstock.gateway.tools.definitions.service import DefinitionService


async def get_servers(request: web.Request) -> web.Response:
    """Servers of tools that are configured or have listed something, with the versions of what they list. The texts
    are those of each server."""
    definitions = request.app[CONTROL].definitions
    found = {one.server: one for one in await asyncio.to_thread(definitions.reader.servers)}
    for name in definitions.on_change:
        found.setdefault(name, ServerDefinitions(server=name))
    views = [_view(definitions, found[name]) for name in sorted(found)]
    return answer(ServerList(servers=views))


async def get_server(request: web.Request) -> web.Response:
    """What one server lists, in all versions that are kept, with the texts."""
    definitions, name = request.app[CONTROL].definitions, id_of(request, "server")
    found = await asyncio.to_thread(definitions.reader.server, name)
    if found is None and name not in definitions.on_change:
        message = f"there is no MCP server {name!r}; `penstock mcp definitions` lists them"
        raise ApiError(404, message, "server", name)
    view = _view(definitions, found or ServerDefinitions(server=name))
    wanted = {one for version in view.versions for one in version.items.values()}
    view.texts = await asyncio.to_thread(definitions.reader.texts, name, wanted)
    return answer(view)


def _view(definitions: DefinitionService, one: ServerDefinitions) -> ServerView:
    return ServerView(**dict(one), on_change=definitions.on_change.get(one.server))


async def approve(control: Control, ids: Ids, asked: ApproveRequest) -> ServerDefinitions:
    """Approve what a server lists: from now on it is what agents are given, where changes are held or denied. Who
    approved what is kept."""
    return await control.definitions.approve(ids["server"], asked)


_SERVERS = "/api/mcp/definitions"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", _SERVERS, "definitions", "What servers of tools list", ServerList, get_servers),
    ApiRoute("GET", f"{_SERVERS}/{{server}}", "server_definitions", "What one server lists", ServerView, get_server),
    ApiRoute(
        "POST", f"{_SERVERS}/{{server}}/approve", "approve_definitions", "Approve what a server lists",
        ServerDefinitions, approve, body=ApproveRequest, errors=(404,),
    ),
)  # fmt: skip
"""This part of the API."""
