"""What becomes of a connection that an agent opens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Fate = Literal["intercept", "tunnel", "deny"]
HOSTS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
)
"""Model hosts that everybody knows."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run wants."""

    hosts: frozenset[tuple[str, int]]
    """Hosts and ports whose TLS ends here."""
    unknown: Literal["tunnel", "deny"] = "tunnel"
    """What becomes of all others."""
    own: frozenset[tuple[str, int]] = frozenset()
    """Addresses of the front itself, and of what only the runner may reach: nobody gets there through it."""

    def fate(self, host: str, port: int) -> Fate:
        """What becomes of a connection to a host."""
        if (host, port) in self.own:
            return "deny"
        return "intercept" if (host, port) in self.hosts else self.unknown
