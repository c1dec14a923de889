"""The process of a sidecar that serves several agents, and the client of its admin API."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

import aiohttp

from penstock.sidecar.intercept.admin import TOKEN, AdminServer
from penstock.sidecar.intercept.egress_report import AgentIdentity
from penstock.sidecar.intercept.service import SidecarService
from penstock.sidecar.intercept.trust import close_memory

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
