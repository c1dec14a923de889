"""The agent of `examples.shop` without its SDK, whose import and whose clients take most of what a rollout costs.

For `penstock run`, in processes of its own: tests of what is around the agent.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

sys.modules.setdefault("openai", cast(Any, SimpleNamespace(OpenAI=None)))

from fakes.asking import asked  # noqa: E402

from examples.shop import MODEL, PROMPT, reward  # noqa: E402

__all__ = ["agent", "reward"]


def agent(task: dict[str, Any]) -> dict[str, Any]:
    """One task: its question, asked and answered."""
    system = {"role": "system", "content": PROMPT.format(date="2026-11-24")}
    return {"answer": asked([system, {"role": "user", "content": task["question"]}], model=MODEL)["said"]}
