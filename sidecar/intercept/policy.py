"""What becomes of a connection that an agent opens. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Fate = Literal["intercept", "tunnel", "deny", "unrecorded", "check"]
"""`unrecorded`: its TLS would have ended here, but the gateway was away and the run may go past it. `check`: the
sidecar itself answers."""
CHECK: Final = ("192.0.2.1", 443)
"""An address for documentation (RFC 5737): no host has it, so the sidecar can answer there, and that it does shows that
connections get to it."""
HOSTS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "chatgpt.com",
)
"""Model hosts that everybody knows."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run wants."""

    hosts: frozenset[tuple[str, int]]
    """Hosts and ports whose TLS ends here."""
    unknown: Literal["tunnel", "deny"] = "tunnel"
    """What becomes of all others."""
    fail: Literal["closed", "open"] = "closed"
    """What becomes of calls while the gateway cannot be reached: refused, or straight to their host."""

    def fate(self, host: str, port: int) -> Fate:
        """What becomes of a connection to a host."""
        if (host, port) == CHECK:
            return "check"
        return "intercept" if (host, port) in self.hosts else self.unknown

    @property
    def names(self) -> list[str]:
        """Hosts whose TLS ends here."""
        return sorted({host for host, _ in self.hosts} | {CHECK[0]})


def intercepted(more: Iterable[str] = ()) -> frozenset[tuple[str, int]]:
    """The known model hosts, and others as `HOST` or `HOST:PORT`; raises `ValueError`."""
    return frozenset(map(_address, (*HOSTS, *more)))


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":") if re.search(r"[^:]:[0-9]*$|]:[0-9]*$", value) else (value, "", "443")
    if _NAME.fullmatch(host) is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--intercept {value!r} is no HOST or HOST:PORT")
    return host.lower().strip("[]"), int(port)
