"""Tells the gateway where an agent has been besides its model hosts: an event on its rollout for each host.

What that takes is imported when there is something to tell: it would be half of a sidecar's memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from penstock.sidecar.intercept.visit import Passed
from penstock.sidecar.intercept.ways import Binding

if TYPE_CHECKING:
    from penstock.gateway.model.queue import Event, Scalar

NAME: Final = "egress"
_SECONDS: Final = 10.0
_MOST: Final = 500
"""Events in one request, and hosts that are told apart."""
_OTHERS: Final = "(others)"
_Key = tuple[str, int, str, str | None]
"""Host, port, fate; the address of a redirected connection."""


@dataclass(frozen=True, slots=True)
class Whose:
    """What is known of the agent's rollout: its ids, its token, or neither."""

    rollout: str | None = None
    attempt: str | None = None
    token: str | None = None

    @property
    def binding(self) -> Binding:
        """What the gateway is told of its connections."""
        named = {"x-rollout-id": self.rollout, "x-attempt-id": self.attempt}
        key = [] if self.token is None else [("Proxy-Authorization", f"Bearer {self.token}")]
        return Binding((*((name, value) for name, value in named.items() if value), *key))


class Ledger:
    """Where one agent has been: a row for each host, port and fate."""

    def __init__(self) -> None:
        self._rows: dict[_Key, tuple[Passed, int]] = {}
        """The sum of its connections, and how many there were."""

    def add(self, one: Passed) -> None:
        """A connection that is over. Calls that went to the gateway have spans of their own; only what kept them from
        it is told."""
        if (one.fate == "intercept" and one.problem is None) or one.fate == "check":
            return
        key = (one.host, one.port, one.fate, one.address)
        if key not in self._rows and len(self._rows) >= _MOST:
            key = (_OTHERS, 0, one.fate, None)
        row, count = self._rows.get(key, (None, 0))
        if row is None:
            self._rows[key] = (one, 1)
            return
        row.started = min(row.started, one.started)
        row.seconds, row.sent, row.got = row.seconds + one.seconds, row.sent + one.sent, row.got + one.got
        row.problem = row.problem or one.problem
        self._rows[key] = (row, count + 1)

    @property
    def problems(self) -> list[str]:
        """What its owner should know."""
        rows = self._rows.items()
        return [f"{host}:{port}: {one.problem}" for (host, port, *_), (one, _) in rows if one.problem is not None]

    def take(self) -> list[Event]:
        """All of it as events; the ledger is empty afterwards."""
        if not self._rows:
            return []
        from penstock.gateway.model.queue import Event

        rows, self._rows = self._rows, {}
        now, wall = monotonic(), time.time_ns()
        return [
            Event(
                name=NAME,
                time_ns=wall - int((now - one.started) * 1e9),
                attributes={"server.address": host, "server.port": port, "fate": fate, **_figures(one, count)}
                | ({} if address in (None, host) else {"network.peer.address": address}),
            )
            for (host, port, fate, address), (one, count) in rows.items()
        ]


def _figures(one: Passed, count: int) -> dict[str, Scalar]:
    figures: dict[str, Scalar] = {
        "connections": count,
        "bytes_sent": one.sent,
        "bytes_received": one.got,
        "seconds": round(one.seconds, 3),
    }
    return figures if one.problem is None else figures | {"problem": one.problem}


async def tell(gateway: str, whose: Whose, made: list[Event]) -> str | None:
    """Posts events to the gateway; why they are not on the tape, where that fails. Without a rollout there is nothing
    to put them on."""
    if whose.rollout is None or not made:
        return None
    import aiohttp

    from penstock.gateway.client.tls import client_context
    from penstock.gateway.model.queue import EventsRequest

    url = f"{gateway}/rollout/{whose.rollout}/attempt/{whose.attempt or 'a1'}/events"
    headers = {} if whose.token is None else {"Authorization": f"Bearer {whose.token}"}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        connector = aiohttp.TCPConnector(ssl=client_context() if gateway.startswith("https:") else True)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            for at in range(0, len(made), _MOST):
                body = EventsRequest(events=made[at : at + _MOST]).model_dump_json(exclude_none=True)
                kind = {"Content-Type": "application/json"}
                async with http.post(url, data=body, headers=kind, allow_redirects=False) as answer:
                    if answer.status >= 300:
                        return f"the gateway answered {answer.status}: {(await answer.text(errors='replace'))[:200]}"
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return str(error) or "the gateway did not answer"
    return None
