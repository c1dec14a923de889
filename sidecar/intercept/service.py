"""Fronts for several agents whose rollouts are bound later: a port for each agent, one authority, one folder of files.

A place is free, then bound to a rollout, then released. Calls wait while it is free. When a place is released, the
connections of its rollout are closed, and an account of them is on the tape.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.gateway.model.base import ID_PATTERN
from penstock.sidecar.intercept import session
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import failure_reason
from penstock.sidecar.intercept.environment_check import SidecarUnreachable, query_sidecar
from penstock.sidecar.intercept.rules import HINTS, InterceptPolicy
from penstock.sidecar.intercept.session import AgentIdentity, EgressLedger, close_memory, report_egress

Mode = Literal["env", "transparent"]
"""How connections reach the fronts: by variables of the agents, or by the kernel's rules (`rules`), for one agent only.
"""


class SlotConflict(Exception):
    """Raised for a place that has another rollout."""


@dataclass(slots=True)
class AgentSlot:
    """The place of one agent: its port, front, ledger and rollout (None while free)."""

    port: int
    front: AgentProxy
    ledger: EgressLedger
    identity: AgentIdentity | None = None


class SidecarService:
    """The places of all agents."""

    def __init__(self, gateway: str, policy: InterceptPolicy, folder: Path, mode: Mode = "env") -> None:
        self.gateway = gateway
        self.mode: Mode = mode
        self.slots: dict[int, AgentSlot] = {}
        self.reserved_ports: set[int] = set()
        """Ports that no agent may reach through a front."""
        self._policy, self._folder = policy, folder
        self._own = ""
        self._turn = asyncio.Lock()

    async def start(self, ports: list[int]) -> None:
        """Listen for an agent on each port, and write the files for agents into the folder."""
        authority = await CertificateStore.create(self._policy.names)
        self._own = authority.pem
        self._folder.mkdir(parents=True, exist_ok=True)
        bundle, own = session.write(self._folder, authority.pem)
        for number, wanted in enumerate(ports, 1):
            ledger = EgressLedger()
            front = AgentProxy(self.gateway, self._policy, authority, ledger.add, ours=self.reserved_ports)
            if self.mode == "env":
                port = await front.start(port=wanted)
                variables = session.variables(bundle, own, port, self._policy.names)
            else:
                port = front.start_redirected(wanted)
                variables = session.certificates(bundle, own)
            self.slots[port] = AgentSlot(port, front, ledger)
            lines = [f"{name}={value}\n" for name, value in {**HINTS, **variables}.items()]
            (self._folder / f"agent-{number}.env").write_text("".join(lines))

    async def bind(self, port: int, whose: AgentIdentity) -> None:
        """Bind a place to a rollout. Binding the same one again changes nothing; raises `SlotConflict` for another, and
        `KeyError` when there is no such place.
        """
        place = self.slots[port]
        async with self._turn:
            if place.identity not in (None, whose):
                assert place.identity is not None
                raise SlotConflict(f"port {port} has rollout {place.identity.rollout}: release it first")
            place.identity = whose
            place.front.bind(whose.rollout_binding)

    async def release(self, port: int) -> str | None:
        """Close the connections of a place's rollout, and report its ledger to the gateway; return the reason when that
        fails.
        """
        place = self.slots[port]
        async with self._turn:
            await place.front.release()
            whose, place.identity = place.identity, None
            made = place.ledger.take()
        return None if whose is None else await report_egress(self.gateway, whose, made)

    async def stop(self) -> list[str]:
        """Close all places; return the problems to report to the user."""
        problems: list[str] = []
        for port, place in self.slots.items():
            if (untold := await self.release(port)) is not None:
                problems.append(f"port {port}: where the agent has been is not on the tape: {untold}")
            await place.front.stop()
        return problems

    async def unready_reason(self) -> str | None:
        """The reason why no calls pass: agents' connections do not reach the fronts, or the gateway cannot be reached.
        None when calls pass, or when they may go past the gateway.
        """
        ways = [None] if self.mode == "transparent" else [f"http://127.0.0.1:{port}" for port in self.slots]
        try:
            for proxy in ways:
                _ = await query_sidecar(proxy, self._own)
        except SidecarUnreachable as problem:
            return f"connections of agents do not get here: {problem}"
        if misled := next(filter(None, (place.front.redirect_loop for place in self.slots.values())), None):
            return misled
        if self._policy.fail == "open":
            return None
        parts = urlsplit(self.gateway)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            return f"the gateway {host}:{port} cannot be reached: {failure_reason(error) or 'no answer'}"
        writer.close()
        return None


# The API by which a runner assigns rollouts to the ports of a running sidecar. Its requests carry a token.
#
#     GET    /ready          serving? For probes, without the token
#     GET    /agents         the ports, and the rollouts that they have
#     PUT    /agents/PORT    {"rollout": "r1", "attempt": "a1", "token": "pst_..."}
#     DELETE /agents/PORT    the rollout is over
#
# It listens on a socket or a port of its own. Agents reach neither through their fronts, and do not know the token.

_LARGEST: Final = 64 << 10
TOKEN: Final = "PENSTOCK_SIDECAR_TOKEN"
"""The variable that holds the token, for the sidecar and for the runner."""
SHORTEST: Final = 16
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BindRequest(BaseModel):
    """The rollout that a runner assigns to a port."""

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


# The process of a sidecar that serves several agents, and the client of its admin API.

_SECONDS: Final = 30.0


async def serve(
    service: SidecarService, ports: list[int], admin: str, token: str, whose: AgentIdentity | None
) -> list[str]:
    """Serve until SIGTERM or SIGINT; return the problems to report to the user. `whose`: the rollout of the only agent,
    if it is known. Raises OSError when it cannot listen.
    """
    close_memory()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, over.set)
    listening = AdminServer(service, token)
    try:
        await service.start(ports)
        if whose is not None:
            await service.bind(min(service.slots), whose)
        where = await listening.start(admin)
        print(f"agents on {', '.join(map(str, service.slots))}; rollouts at {where}", flush=True)
        await over.wait()
    finally:
        await listening.stop()
        problems = await service.stop()
    return problems


async def request_admin(method: str, path: str, admin: str, said: dict[str, str] | None) -> tuple[int, str]:
    """Send a request to a sidecar's admin API: (status, text of the answer). The status is 0 when it cannot be
    reached.
    """
    connector = aiohttp.UnixConnector(admin) if "/" in admin else None
    url = f"http://sidecar{path}" if "/" in admin else f"http://{admin}{path}"
    headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '')}"}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http,
            http.request(method, url, json=said, allow_redirects=False) as answer,
        ):
            return answer.status, (await answer.text()).strip()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        return 0, f"the sidecar at {admin} cannot be reached: {str(error) or 'it did not answer'}"
