"""The part of the typed client for upstreams."""

from __future__ import annotations

from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.model.audit import EMPTY_ACTION, ActionRequest
from penstock.gateway.model.upstream import PauseRequest, UpstreamList, UpstreamView


class UpstreamClient(ApiConnection):
    """Reads, pauses and opens upstreams."""

    async def upstreams(self) -> list[UpstreamView]:
        """All upstreams with their state, by name."""
        return (await self.upstream_list()).upstreams

    async def upstream_list(self) -> UpstreamList:
        """All upstreams, by name, and the routes to them."""
        return await self.get("/api/upstreams", UpstreamList)

    async def pause_upstream(self, name: str, bound_s: float, said: ActionRequest = EMPTY_ACTION) -> UpstreamView:
        """Makes calls to an upstream wait; after `bound_s` seconds they are refused until it is opened or paused
        anew."""
        asked = PauseRequest(bound_s=bound_s, **said.model_dump(exclude_unset=True))
        return await self.post(f"{_path(name)}/pause", UpstreamView, asked)

    async def open_upstream(self, name: str, said: ActionRequest = EMPTY_ACTION) -> UpstreamView:
        """Ends the pause of an upstream: serves the calls that wait for it, and all later ones."""
        return await self.post(f"{_path(name)}/open", UpstreamView, said)


def _path(name: str) -> str:
    return f"/api/upstreams/{quote(name, safe='')}"
