"""The values by which figures of calls are grouped; apart from the nouns, so that the command line need not load
these."""

from __future__ import annotations

from typing import Literal

BreakdownDimension = Literal[
    "model", "agent", "tool", "upstream", "dialect", "status", "error", "finish", "version", "arm", "hour", "day",
    "mode", "group", "origin",
]  # fmt: skip
