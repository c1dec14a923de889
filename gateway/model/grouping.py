"""What figures of calls are broken down by; apart from the nouns, so that the command line loads none of them."""

from __future__ import annotations

from typing import Literal

By = Literal[
    "model", "agent", "tool", "upstream", "dialect", "status", "error", "finish", "version", "arm", "hour", "day",
    "mode", "group", "origin",
]  # fmt: skip
