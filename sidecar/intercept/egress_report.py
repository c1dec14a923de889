"""Reports to the gateway which hosts besides its model hosts an agent has contacted: an event on its rollout for each.

Its heavy imports, which would be half of a sidecar's memory, wait until there is something to report.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.egress import RolloutBinding

if TYPE_CHECKING:
    from penstock.gateway.model.queue import Event, Scalar

NAME: Final = "egress"
_SECONDS: Final = 10.0
_MOST: Final = 500
"""The most events in one request, and the most rows of a ledger."""
_OTHERS: Final = "(others)"
_Key = tuple[str, int, str, str | None]
"""Host, port, fate; the address of a redirected connection, else None."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The known identity of an agent: its rollout and attempt, its token, or nothing."""

    rollout: str | None = None
    attempt: str | None = None
    token: str | None = None

    @property
    def rollout_binding(self) -> RolloutBinding:
        """The headers that identify the agent's connections to the gateway."""
        named = {"x-rollout-id": self.rollout, "x-attempt-id": self.attempt}
        key = [] if self.token is None else [("Proxy-Authorization", f"Bearer {self.token}")]
        return RolloutBinding((*((name, value) for name, value in named.items() if value), *key))


class EgressLedger:
    """The connections of one agent, summed by host, port and fate."""

    def __init__(self) -> None:
        self._rows: dict[_Key, tuple[ConnectionRecord, int]] = {}
        """The sum of a row's connections, and their number."""

    def add(self, one: ConnectionRecord) -> None:
        """Add a closed connection. Calls that went to the gateway have spans of their own, so only those that failed to
        are added.
        """
        if (one.action == "intercept" and one.problem is None) or one.action == "check":
            return
        key = (one.host, one.port, one.action, one.address)
        if key not in self._rows and len(self._rows) >= _MOST:
            key = (_OTHERS, 0, one.action, None)
        row, count = self._rows.get(key, (None, 0))
        if row is None:
            self._rows[key] = (one, 1)
            return
        row.started = min(row.started, one.started)
        row.seconds, row.sent, row.received = (
            row.seconds + one.seconds,
            row.sent + one.sent,
            row.received + one.received,
        )
        row.problem = row.problem or one.problem
        self._rows[key] = (row, count + 1)

    @property
    def problems(self) -> list[str]:
        """A line for each host with a problem, for the user."""
        rows = self._rows.items()
        return [f"{host}:{port}: {one.problem}" for (host, port, *_), (one, _) in rows if one.problem is not None]

    def take(self) -> list[Event]:
        """The rows as events; the ledger is empty afterwards."""
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


def _figures(one: ConnectionRecord, count: int) -> dict[str, Scalar]:
    figures: dict[str, Scalar] = {
        "connections": count,
        "bytes_sent": one.sent,
        "bytes_received": one.received,
        "seconds": round(one.seconds, 3),
    }
    return figures if one.problem is None else figures | {"problem": one.problem}


async def report_egress(gateway: str, whose: AgentIdentity, made: list[Event]) -> str | None:
    """Post events to the gateway; return the reason when they could not be stored. Without a rollout there is nothing
    to attach them to: they are dropped.
    """
    if whose.rollout is None or not made:
        return None
    import aiohttp

    from penstock.gateway.client.opener import client_context
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
