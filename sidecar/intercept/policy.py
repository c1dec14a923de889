"""Decides the fate of each connection that an agent opens. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

ConnectionAction = Literal["intercept", "tunnel", "deny", "unrecorded", "check"]
"""The treatment of a connection. `unrecorded`: of an intercepted host, but sent straight to it, because the gateway was
away and the run may go past it. `check`: answered by the sidecar itself.
"""
CHECK: Final = ("192.0.2.1", 443)
"""An address for documentation (RFC 5737), which no host has: an answer of the sidecar there proves that connections
reach it.
"""
HOSTS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "chatgpt.com",
)
"""The well-known model hosts."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True, slots=True)
class InterceptPolicy:
    """The rules of a run for its connections."""

    hosts: frozenset[tuple[str, int]]
    """Hosts and ports whose calls go through the gateway; their TLS ends here."""
    unknown: Literal["tunnel", "deny"] = "tunnel"
    """The fate of connections to all other hosts."""
    fail: Literal["closed", "open"] = "closed"
    """Calls while the gateway cannot be reached: refused (closed), or sent straight to their host (open)."""

    def action_for(self, host: str, port: int) -> ConnectionAction:
        """The fate of a connection to a host."""
        if (host, port) == CHECK:
            return "check"
        return "intercept" if (host, port) in self.hosts else self.unknown

    @property
    def names(self) -> list[str]:
        """The names of all hosts that need certificates."""
        return sorted({host for host, _ in self.hosts} | {CHECK[0]})


def intercepted_hosts(more: Iterable[str] = ()) -> frozenset[tuple[str, int]]:
    """The known model hosts, and more hosts given as `HOST` or `HOST:PORT`; raises `ValueError`."""
    return frozenset(map(_address, (*HOSTS, *more)))


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":") if re.search(r"[^:]:[0-9]*$|]:[0-9]*$", value) else (value, "", "443")
    if _NAME.fullmatch(host) is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--intercept {value!r} is no HOST or HOST:PORT")
    return host.lower().strip("[]"), int(port)
