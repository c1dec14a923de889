"""The API by which a runner assigns rollouts to the ports of a running sidecar. Its requests carry a token.

    GET    /ready          serving? For probes, without the token
    GET    /agents         the ports, and the rollouts that they have
    PUT    /agents/PORT    {"rollout": "r1", "attempt": "a1", "token": "pst_..."}
    DELETE /agents/PORT    the rollout is over

It listens on a socket or a port of its own. Agents reach neither through their fronts, and do not know the token.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.gateway.model.base import ID_PATTERN
from penstock.sidecar.intercept.egress_report import AgentIdentity
from penstock.sidecar.intercept.service import SidecarService, SlotConflict

_LARGEST: Final = 64 << 10
TOKEN: Final = "PENSTOCK_SIDECAR_TOKEN"
"""The variable that holds the token, for the sidecar and for the runner."""
SHORTEST: Final = 16
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BindRequest(BaseModel):
    """What a runner says."""

    model_config = ConfigDict(extra="forbid")

    rollout: str = Field(pattern=ID_PATTERN)
    attempt: str | None = Field(None, pattern=ID_PATTERN)
    token: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,4096}$")
    """The rollout's agent token."""


class AdminServer:
    """The server of this API."""

    def __init__(self, service: SidecarService, token: str) -> None:
        self._service, self._token = service, token.encode()
        app = web.Application(client_max_size=_LARGEST, middlewares=[self._known])
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/agents", self._list),
                web.put("/agents/{port}", self._bind),
                web.delete("/agents/{port}", self._release),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, address: str) -> str:
        """Listen on HOST:PORT, or on a Unix socket if the address has a slash. Return the address, with the chosen
        port.
        """
        await self._runner.setup()
        if "/" in address:
            _vacate(address)
            before = os.umask(0o177)
            try:
                await web.UnixSite(self._runner, address).start()
            finally:
                os.umask(before)
            return address
        host, _, port = address.rpartition(":")
        await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        chosen = self._runner.addresses[0][1]
        self._service.reserved_ports.add(chosen)
        return f"{host}:{chosen}"

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    @web.middleware
    async def _known(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if request.path != "/ready" and not hmac.compare_digest(shown, self._token):
            return _said(401, f"the sidecar's token is needed: Authorization: Bearer, and the value of {TOKEN}")
        return await handler(request)

    async def _ready(self, _: web.Request) -> web.Response:
        away = await self._service.unready_reason()
        return _said(200, "serving") if away is None else _said(503, away)

    async def _list(self, _: web.Request) -> web.Response:
        places = self._service.slots.values()
        rows = [(place.port, place.identity or AgentIdentity()) for place in places]
        found = [{"port": port, "rollout": whose.rollout, "attempt": whose.attempt} for port, whose in rows]
        return web.json_response({"agents": found})

    async def _bind(self, request: web.Request) -> web.Response:
        try:
            port = self._port(request)
            said = BindRequest.model_validate_json(await request.read())
            await self._service.bind(port, AgentIdentity(said.rollout, said.attempt, said.token))
        except ValidationError as error:
            one = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, one["loc"])) or "the body"
            return _said(400, f"{where}: {one['msg']}; send JSON with rollout, and attempt and token if need be")
        except SlotConflict as taken:
            return _said(409, str(taken))
        return _said(200, f"port {port} has rollout {said.rollout}")

    async def _release(self, request: web.Request) -> web.Response:
        port = self._port(request)
        untold = await self._service.release(port)
        if untold is not None:
            return _said(200, f"port {port} is free; where the agent has been is not on the tape: {untold}")
        return _said(200, f"port {port} is free")

    def _port(self, request: web.Request) -> int:
        given = request.match_info["port"]
        found = next((port for port in self._service.slots if str(port) == given), None)
        if found is not None:
            return found
        ports = ", ".join(map(str, self._service.slots))
        raise web.HTTPNotFound(text=f"there is no agent on port {given}: there are {ports}\n")


def _vacate(path: str) -> None:
    """Remove the socket of a sidecar that was killed, but no other kind of file."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _said(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=f"{message}\n")
