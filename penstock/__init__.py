"""Penstock: a transparent gateway for unmodified agents, and what learns from its tape.

Importing it loads nothing. An agent that you may change reports how it went with `penstock.reward(0.7)`, what happened
with `penstock.event("cart", {"items": 3})`, and what it did with `with penstock.span("search")`. Outside a rollout they
do nothing (`sidecar.run.agent.helper`).
"""

from __future__ import annotations

TYPE_CHECKING = False
"""As in `typing`, which takes longer to import than a small script."""
if TYPE_CHECKING:
    from typing import Any

    from penstock.sidecar.run.agent.helper import Address, Span, address, event, flush, reward, span

__all__ = ["Address", "Span", "address", "event", "flush", "reward", "span"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from penstock.sidecar.run.agent import helper

    globals().update({known: getattr(helper, known) for known in __all__})
    return globals()[name]
