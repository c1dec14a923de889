"""Penstock: a transparent gateway for unmodified agents, and what learns from its tape.

Importing it loads nothing. An agent that you may change reports how it went with `penstock.reward(0.7)`, what happened
with `penstock.event("cart", {"items": 3})`, and what it did with `with penstock.span("search")`. Outside a rollout they
do nothing (`sidecar.run.agent.helper`). `penstock.Client` and `penstock.SyncClient` read and steer a gateway
(`gateway.client.client`); `penstock.graders` has reward functions, and `penstock.Judgement` is a reward
with its reason.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""As in `typing`, which takes longer to import than a small script."""
if TYPE_CHECKING:
    from typing import Any

    from penstock.gateway.client.client import Client
    from penstock.gateway.client.connection import ClientError, Conflict, NotAllowed, NotFound, Refused, Unreachable
    from penstock.gateway.client.sync import SyncClient
    from penstock.gateway.model.rollout import Judgement
    from penstock.sidecar.run.agent.helper import Address, Span, address, event, flush, reward, span

__all__ = [
    "Address", "Client", "ClientError", "Conflict", "Judgement", "NotAllowed", "NotFound", "Refused", "Span",
    "SyncClient", "Unreachable", "address", "event", "flush", "reward", "span",
]  # fmt: skip

_HOMES = {
    "penstock.sidecar.run.agent.helper": ("Address", "Span", "address", "event", "flush", "reward", "span"),
    "penstock.gateway.client.client": ("Client",),
    "penstock.gateway.client.connection": (
        "ClientError", "Conflict", "NotAllowed", "NotFound", "Refused", "Unreachable",
    ),
    "penstock.gateway.client.sync": ("SyncClient",),
    "penstock.gateway.model.rollout": ("Judgement",),
}  # fmt: skip
"""Names by the module that is imported when one of them is first used."""


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(home)
    globals().update({known: getattr(module, known) for known in _HOMES[home]})
    return globals()[name]
