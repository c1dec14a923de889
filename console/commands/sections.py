"""The sections of `penstock --help`."""

from __future__ import annotations

from typing import Final

SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Serve and look": (
        "serve",
        "rollouts",
        "spans",
        "search",
        "show",
        "tools",
        "stats",
        "unread",
        "prices",
        "budgets",
        "sql",
        "upstreams",
        "sessions",
        "changes",
        "audit",
        "mcp",
        "policy",
        "masking",
        "tui",
        "token",
        "key",
        "completion",
    ),
    "Work": (
        "enqueue",
        "run",
        "sidecar",
        "queue",
        "workers",
        "pause",
        "resume",
        "drain",
        "cancel",
        "requeue",
        "reward",
    ),
    "Releases": ("resource", "prompts", "release", "webhook"),
    "Training": ("doctor", "samples", "runs", "train"),
    "Tape": ("export", "lake", "index", "forget", "hold", "retention", "check", "backup", "restore"),
}
"""Titles, and the commands below each."""
