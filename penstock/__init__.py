"""Penstock: a transparent gateway for unmodified agents, and what learns from its tape.

Importing it loads nothing. An agent that you may change reports how it went with `penstock.reward(0.7)`, and what
happened with `penstock.event("cart", items=3)`; outside a rollout both do nothing (`sidecar.agent.helper`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sidecar.agent.helper import event, reward

__all__ = ["event", "reward"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("penstock.sidecar.agent.helper"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
