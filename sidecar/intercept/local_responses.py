"""Answers of the front itself: refusals, and its description of itself at the address `CHECK`."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from penstock.sidecar.intercept.egress import ConnectionRefusal, EgressConnector
from penstock.sidecar.intercept.rules import InterceptPolicy
from penstock.sidecar.intercept.splice import SpliceEnd

_REASONS: Final = {200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 502: b"Bad Gateway", 504: b"Gateway Timeout"}
_LARGEST: Final = 64 << 10
"""The most bytes of a request's head."""


def http_response(status: int, message: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    """A complete HTTP response of the front itself."""
    body = message.encode() + b"\n"
    head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, _REASONS[status], kind.encode(), len(body)) + body


class TargetReader(SpliceEnd):
    """The agent's end of a connection that the front answers itself: reads the target of its request."""

    def __init__(self) -> None:
        super().__init__()
        self.target: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        if self.target.done():
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            words = self._head.split(b" ", 2)
            self.target.set_result(words[1].decode("latin-1") if len(words) > 2 else "/")
        elif len(self._head) > _LARGEST:
            self.target.set_exception(ConnectionRefusal(400, "the head of the request is too large"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.target.cancel()
        super().connection_lost(exc)


async def status_response(target: str, policy: InterceptPolicy, ways: EgressConnector) -> bytes:
    """The response that names the bound rollout; for the target `/hosts` also, for each model host, the problem that
    keeps its calls from the gateway, or null.
    """
    known = dict(ways.binding.headers) if ways.binding is not None else {}
    said: dict[str, object] = {"penstock": "sidecar", "bound": ways.binding is not None}
    said |= {"rollout": known.get("x-rollout-id"), "attempt": known.get("x-attempt-id")}
    if target == "/hosts":
        hosts = sorted(policy.hosts)
        found = await asyncio.gather(*(ways.problem(host, port) for host, port in hosts))
        said["hosts"] = {f"{host}:{port}": problem for (host, port), problem in zip(hosts, found, strict=True)}
    return http_response(200, json.dumps(said), "application/json")
