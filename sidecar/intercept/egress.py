"""Tells the gateway where an agent has been besides its model hosts: an event on its rollout for each host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from time import monotonic

import aiohttp

from penstock.gateway.model.queue import Event, EventsRequest, Scalar
from penstock.sidecar.intercept.front import Passed

NAME = "egress"
_SECONDS = 10.0
_MOST = 500
"""Hosts in one request."""


def events(passed: Iterable[Passed]) -> list[Event]:
    """One for each host, port and fate. Calls that went to the gateway have spans of their own; only what kept them
    from it is told."""
    now, wall = monotonic(), time.time_ns()
    found: dict[tuple[str, int, str], list[Passed]] = {}
    for one in passed:
        if one.fate != "intercept" or one.problem is not None:
            found.setdefault((one.host, one.port, one.fate), []).append(one)
    return [
        Event(
            name=NAME,
            time_ns=wall - int((now - min(one.started for one in ones)) * 1e9),
            attributes={"server.address": host, "server.port": port, "fate": fate, **_figures(ones)},
        )
        for (host, port, fate), ones in found.items()
    ]


def _figures(ones: list[Passed]) -> dict[str, Scalar]:
    problem = next((one.problem for one in ones if one.problem is not None), None)
    figures: dict[str, Scalar] = {
        "connections": len(ones),
        "bytes_sent": sum(one.sent for one in ones),
        "bytes_received": sum(one.got for one in ones),
        "seconds": round(sum(one.seconds for one in ones), 3),
    }
    return figures if problem is None else figures | {"problem": problem}


async def tell(url: str, token: str | None, made: list[Event]) -> str | None:
    """Posts events below an attempt's address; why not, where that fails."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            for at in range(0, len(made), _MOST):
                body = EventsRequest(events=made[at : at + _MOST]).model_dump_json(exclude_none=True)
                kind = {"Content-Type": "application/json"}
                async with http.post(f"{url}/events", data=body, headers=kind) as answer:
                    if answer.status >= 400:
                        return f"the gateway answered {answer.status}: {(await answer.text())[:200]}"
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return str(error) or "the gateway did not answer"
    return None
