"""The judge of what Claude Code has answered to a customer of `examples.shop`."""

from __future__ import annotations

from typing import Any

from examples import shop


def reward(task: dict[str, Any], output: dict[str, Any], transcript: object) -> dict[str, Any]:
    """The share of what is wanted, and what is missing."""
    return shop.reward(task, {"answer": output["result"]}, transcript)
