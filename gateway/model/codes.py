"""Closed sets of words that documents, commands and nouns share; apart from the nouns, so that the command line need
not load these.
"""

from __future__ import annotations

from typing import Literal

SequenceStart = Literal["first", "forked", "retokenised", "template", "compacted"]
"""Why a training sequence begins; `gateway.reading.diagnosis.rows` defines each."""
FindingCode = Literal[
    "no_reward",
    "untrusted_reward",
    "unfinished",
    "gap",
    "ambiguous",
    "mixed_versions",
    "for_release",
    "no_generation",
    "session",
    "error",
    "refused",
    "interrupted",
    "cancelled",
    "retry",
    "late",
    "other_model",
    "unattributed",
    "truncated",
    "unreadable",
    "unread",
    "no_token_ids",
    "no_logprobs",
    "token_counts",
    "cut_off",
    "retokenised",
    "template",
    "forced",
    "sampling",
    "tool_unanswered",
    "tool_failed",
    "tool_denied",
    "tool_ambiguous",
    "base_url",
    "inlined_tools",
    "no_websocket",
]
"""Why a call cannot be trained on, or is worth a look; `docs/doctor.md` explains each."""


BreakdownDimension = Literal[
    "model", "agent", "tool", "upstream", "dialect", "status", "error", "finish", "version", "arm", "minute",
    "hour", "day", "mode", "group", "origin",
]  # fmt: skip
"""The values by which figures of calls are grouped."""


Extra = Literal[
    "apo", "clouds", "demo", "index", "kubernetes", "lake", "masking", "mcp", "mlflow", "parquet", "plots", "providers",
    "ray", "samples", "train", "tui", "verl", "yaml",
]  # fmt: skip
"""Extras that commands and settings ask for."""


def install_hint(*extras: Extra) -> str:
    """The command that installs what is missing. It names the checkout: no package index has Penstock yet."""
    return f"pip install '.[{','.join(extras)}]' in Penstock's checkout"
