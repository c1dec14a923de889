"""Agent Lightning 1.0's server API, below `/agl1`: its controllers, its trainer and its agents work unchanged.

Its own paths begin with `/api`, as those of the control API do and with other meanings, so that its base URL has a
prefix here: `http://GATEWAY/agl1`. Its clients append their paths to any base URL. Model calls below
`/agl1/proxy/rollout/` are calls like all others (`traffic.calls.call_request`).

Requests are answered where they were parsed, as those of version 0.3 (`api.lightning`), in the shapes and with the
statuses of its 1.0.2 server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel

from penstock.gateway.api.guard import ApiError, Control
from penstock.gateway.api.lightning import LightningService
from penstock.gateway.api.lightning_events import LightningServerReader
from penstock.gateway.api.lightning_reads import LightningReader
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.lightning import Json
from penstock.gateway.model.lightning_server import (
    EventListing,
    ServerEvent,
    ServerListing,
    ServerModels,
    ServerPatch,
    ServerPause,
    ServerTasks,
    StatusPatch,
    TerminalListing,
)
from penstock.gateway.model.state import LONGEST_HOLD_S, UpstreamView
from penstock.gateway.traffic.calls.call_request import LIGHTNING_BASE as BASE
from penstock.gateway.work.lightning_server import LightningServerOperations

PATH: Final = BASE.encode()
CALLS: Final = PATH + b"/proxy/rollout/"
"""Prefix of paths below it that are calls."""
_CREATED: Final = frozenset({"agl1_enqueue", "agl1_register_models"})
_BODILESS: Final = frozenset({"agl1_pause", "agl1_resume"})


class LightningServer(LightningService):
    """Serves Agent Lightning's server API."""

    created, bodiless = _CREATED, _BODILESS

    def __init__(
        self,
        control: Control,
        reader: LightningReader,
        server: LightningServerReader,
        upstreams: Sequence[UpstreamSettings],
    ) -> None:
        """`upstreams`: those of the settings, without public endpoints."""
        super().__init__(control, reader, ROUTES)
        self.server = server
        self._upstreams = {_address(one.base_url): one.name for one in upstreams}
        self._urls = {one.name: one.base_url for one in upstreams}
        self._retry_s, self._reason = 5, None
        self._cleared = False

    # -- models ------------------------------------------------------------------------------------------------------

    async def register(self, asked: ServerModels) -> list[Json]:
        """Keep which engines serve which models; raises `ApiError` for one that calls of its model do not reach."""
        engines = [one.model_dump() | {"upstream": self._upstream_of(one.model, one.endpoint)} for one in asked.root]
        before = self._engines()
        kept = {} if self._cleared else {(one["model"], one["upstream"]): one for one in before}
        kept |= {(one["model"], one["upstream"]): one for one in engines}
        self._cleared = False
        if (now_kept := list(kept.values())) != before:
            dispatcher = self.control.dispatcher
            now = dispatcher.now_ns()
            await dispatcher.run(lambda tape: LightningServerOperations(tape).put_models(now_kept, now))
        return [one.model_dump() for one in asked.root]

    def forget_models(self) -> None:
        """Begin anew with the next engine that is registered. Until then calls go where they went."""
        self._cleared = True

    def _engines(self) -> list[Json]:
        found = self.server.models()
        return list(found[-1][1].values()) if found else []

    def _upstream_of(self, model: str, endpoint: str) -> str:
        name = self._upstreams.get(_address(endpoint))
        if name is None:
            known = ", ".join(f"{name} ({url})" for name, url in self._urls.items()) or "none"
            message = (
                f"endpoint: {endpoint[:200]!r} is no upstream of the gateway (there are: {known}); add an [[upstream]] "
                "with this base_url to the settings and reload them"
            )
            raise ApiError(422, message, "endpoint", endpoint)
        route = next((one for one in self.control.routes if one.matches(model)), None)
        if route is None or name not in route.upstream or not route.train:
            message = (
                f"model: calls of {model!r} do not reach upstream {name!r} as those of a model in training; add a "
                f'[[route]] with model = "{model}" (or "*"), upstream = "{name}" and train = true to the settings'
            )
            raise ApiError(422, message, "model", model)
        return name

    # -- the pause ---------------------------------------------------------------------------------------------------

    async def pause(self, asked: ServerPause) -> Json:
        """Let calls of the models in training wait."""
        self._retry_s, self._reason = asked.retry_after_seconds, asked.reason
        views = await self._views()
        for name in views:
            await self.control.team.pause(name, LONGEST_HOLD_S)
        if not all(one.paused for one in views.values()):
            await self._log("pause_upstream", views, asked.reason)
        return await self.state()

    async def resume(self) -> Json:
        """Let the calls that wait go on."""
        self._reason = None
        views = await self._views()
        for name in views:
            await self.control.team.open(name)
        if any(one.paused for one in views.values()):
            await self._log("open_upstream", views, None)
        return await self.state()

    async def state(self) -> Json:
        """Say whether calls wait, and how many run."""
        views = (await self._views()).values()
        paused = any(one.paused for one in views)
        return {
            "paused": paused,
            "retry_after_seconds": self._retry_s,
            "reason": self._reason if paused else None,
            "inflight": sum(one.running for one in views),
        }

    async def _views(self) -> dict[str, UpstreamView]:
        """The upstreams whose weights change: those of registered engines, else those of routes in training."""
        names = {one["upstream"] for one in self._engines()} & self._urls.keys()
        names = names or {name for route in self.control.routes if route.train for name in route.upstream}
        return {name: one for name, one in (await self.control.team.upstreams()).items() if name in names}

    async def _log(self, what: str, views: dict[str, UpstreamView], reason: str | None) -> None:
        for name in views:
            await self.control.audit_log.record(ActionRequest(why=reason or ""), what, name)


def _address(url: str) -> tuple[str, str, int | None, str]:
    """The parts of an engine's base URL that name it; it may end with `/v1` or not."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts.scheme, (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(parts.scheme), path


# -- handlers ----------------------------------------------------------------------------------------------------------


async def get_health(service: LightningServer, ids: Ids, asked: None) -> Json:
    """Answer `ok` as long as the gateway serves."""
    return {"status": "ok"}


async def enqueue(service: LightningServer, ids: Ids, asked: ServerTasks) -> list[Json]:
    """Queue tasks. One whose id is queued already is answered as it stands."""
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    return await dispatcher.change(lambda tape: LightningServerOperations(tape).enqueue(asked.root, now))


async def get_rollouts(service: LightningServer, ids: Ids, asked: ServerListing) -> list[Json]:
    """Rollouts in these states, oldest first."""
    return await service.read(service.server.rollouts, asked)


async def get_terminal(service: LightningServer, ids: Ids, asked: TerminalListing) -> Json:
    """Rollouts in the order in which they ended, after the first so many."""
    return await service.read(service.server.ended, asked)


async def get_rollout(service: LightningServer, ids: Ids, asked: None) -> Json:
    """One rollout, and the names of its attempts."""
    return service.server.rollout(ids["rid"])


async def patch_rollout(service: LightningServer, ids: Ids, asked: ServerPatch) -> Json:
    """Change the status of a rollout. When its end is answered, every earlier call of it is durable."""
    dispatcher, patch = service.control.dispatcher, asked.status or StatusPatch()
    if patch.state in ("succeeded", "failed"):
        _ = await dispatcher.flush_calls()
    now = dispatcher.now_ns()
    return await dispatcher.change(lambda tape: LightningServerOperations(tape).patch(ids["rid"], patch, now))


async def delete_rollout(service: LightningServer, ids: Ids, asked: None) -> None:
    """Leave a rollout out of this API from now on. It stays on the tape; retention forgets it."""
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    await dispatcher.run(lambda tape: LightningServerOperations(tape).hide(ids["rid"], now))


async def add_event(service: LightningServer, ids: Ids, asked: ServerEvent) -> Json:
    """Keep an event of an attempt; the value of a `reward` is its reward."""
    dispatcher, name = service.control.dispatcher, (ids["rid"], ids["aid"])
    now = dispatcher.now_ns()
    return await dispatcher.change(lambda tape: LightningServerOperations(tape).add_event(name, asked, now))


async def get_events(service: LightningServer, ids: Ids, asked: EventListing) -> list[Json]:
    """The events of the last attempt: those that were sent, its model calls, and its rewards, whoever gave them."""
    _ = await service.control.dispatcher.flush_calls()
    return await service.read(service.server.events, ids["rid"], asked)


async def register_models(service: LightningServer, ids: Ids, asked: ServerModels) -> list[Json]:
    """Say which engines serve which models, as which version. Each must be an upstream of the settings."""
    return await service.register(asked)


async def delete_models(service: LightningServer, ids: Ids, asked: None) -> Json:
    """Forget the engines when the next one is registered. Calls do not fail meanwhile."""
    service.forget_models()
    return {"status": "ok"}


async def pause(service: LightningServer, ids: Ids, asked: ServerPause) -> Json:
    """Let calls of models in training wait, for at most an hour. Those under way go on: `inflight` counts them."""
    return await service.pause(asked)


async def resume(service: LightningServer, ids: Ids, asked: ServerPause) -> Json:
    """Let the calls that wait go on."""
    return await service.resume()


async def get_state(service: LightningServer, ids: Ids, asked: None) -> Json:
    """Say whether calls wait, and how many are under way."""
    return await service.state()


# -- the table ---------------------------------------------------------------------------------------------------------

_ROLLOUTS: Final = f"{BASE}/api/rollouts"
_ROLLOUT: Final = f"{_ROLLOUTS}/{{rid}}"


def _route(
    method: str,
    path: str,
    handler: Any,
    body: type[BaseModel] | None = None,
    query: type[BaseModel] | None = None,
    public: bool = False,
) -> ApiRoute:
    name = f"agl1_{handler.__name__}"
    return ApiRoute(method, path, name, "", "application/json", handler, query, body, public=public, often=body is None)


ROUTES: Final[tuple[ApiRoute, ...]] = (
    _route("GET", f"{BASE}/healthz", get_health, public=True),
    _route("POST", _ROLLOUTS, enqueue, ServerTasks),
    _route("GET", _ROLLOUTS, get_rollouts, query=ServerListing),
    _route("GET", f"{_ROLLOUTS}/terminal", get_terminal, query=TerminalListing),
    _route("GET", _ROLLOUT, get_rollout),
    _route("PATCH", _ROLLOUT, patch_rollout, ServerPatch),
    _route("DELETE", _ROLLOUT, delete_rollout),
    _route("POST", f"{_ROLLOUT}/attempt/{{aid}}/events", add_event, ServerEvent),
    _route("GET", f"{_ROLLOUT}/events", get_events, query=EventListing),
    _route("POST", f"{BASE}/api/models", register_models, ServerModels),
    _route("DELETE", f"{BASE}/api/models", delete_models),
    _route("POST", f"{BASE}/proxy/pause", pause, ServerPause),
    _route("POST", f"{BASE}/proxy/resume", resume, ServerPause),
    _route("GET", f"{BASE}/proxy/state", get_state),
)
"""The API: a path's fixed words are tried before its ids."""
