"""Tables of moves as Mermaid state diagrams, as the documentation has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def diagram(begin: str, moves: Mapping[Any, Mapping[Any, str]]) -> str:
    """`moves`: what each state may become, and why."""
    lines = [f"    {before} --> {after}: {why}" for before, ends in moves.items() for after, why in ends.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {begin}", *lines, "```", ""])
