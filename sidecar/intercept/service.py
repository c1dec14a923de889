"""Fronts for several agents whose rollouts are bound later: a port for each agent, one authority, one folder of files.

A place is free, then bound to a rollout, then released. Calls wait while it is free. When a place is released, the
connections of its rollout are closed, and an account of them is on the tape.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from penstock.sidecar.intercept import trust
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import failure_reason
from penstock.sidecar.intercept.egress_report import AgentIdentity, EgressLedger, report_egress
from penstock.sidecar.intercept.policy import InterceptPolicy
from penstock.sidecar.intercept.reachability import SidecarUnreachable, query_sidecar

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
        bundle, own = trust.write(self._folder, authority.pem)
        for number, wanted in enumerate(ports, 1):
            ledger = EgressLedger()
            front = AgentProxy(self.gateway, self._policy, authority, ledger.add, ours=self.reserved_ports)
            if self.mode == "env":
                port = await front.start(port=wanted)
                variables = trust.variables(bundle, own, port, self._policy.names)
            else:
                port = front.start_redirected(wanted)
                variables = trust.certificates(bundle, own)
            self.slots[port] = AgentSlot(port, front, ledger)
            lines = [f"{name}={value}\n" for name, value in variables.items()]
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
