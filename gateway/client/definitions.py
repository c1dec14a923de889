"""The part of the typed client for the definitions that servers of tools list."""

from __future__ import annotations

from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.model.definitions import ApproveRequest, ServerDefinitions, ServerList, ServerView


class DefinitionClient(ApiConnection):
    """Reads and approves the definitions that servers of tools list."""

    async def definitions(self) -> list[ServerView]:
        """All servers of tools, by name, without the texts of their definitions."""
        return (await self.get("/api/mcp/definitions", ServerList)).servers

    async def server_definitions(self, name: str) -> ServerView:
        """The definitions that one server lists, with their texts."""
        return await self.get(_path(name), ServerView)

    async def approve_definitions(self, name: str, asked: ApproveRequest) -> ServerDefinitions:
        """Approves the definitions that a server lists."""
        return await self.post(f"{_path(name)}/approve", ServerDefinitions, asked)


def _path(name: str) -> str:
    return f"/api/mcp/definitions/{quote(name, safe='')}"
