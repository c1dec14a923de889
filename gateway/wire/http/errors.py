"""The gateway's own refusals, a class for each party that can be at fault. Each is answered in the error shape of the
API being spoken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class Refusal(Exception):
    """A call that is answered by the gateway itself."""

    code: int | None = None
    """JSON-RPC error code, if this refusal has one of its own."""
    data: Mapping[str, str] = MappingProxyType({})
    """Further members of a JSON-RPC error's `data`, for programs."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the answer."""

    def __init__(self, status: int, kind: str, message: str, field: str | None = None) -> None:
        """`status`: HTTP; `kind`: short reason for the span; `field`: the part of the request that is at fault."""
        super().__init__(message)
        self.status, self.kind, self.message, self.field = status, kind, message, field


class ClientFault(Refusal):
    """The request cannot be served as it is: 4xx."""


class GatewayFault(Refusal):
    """The gateway cannot serve it now: 500, 503."""


class UpstreamFault(Refusal):
    """The upstream could not be reached or did not answer in time: 502, 504."""


def internal_fault() -> Refusal:
    return GatewayFault(500, "internal", "the gateway failed on this call; its log says why")
