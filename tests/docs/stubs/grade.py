"""The reward function of the documentation, `grade:grade`."""

from __future__ import annotations

from typing import Any


def grade(task: Any, output: Any, transcript: Any) -> float:
    """1 when the answer speaks of the question."""
    assert transcript.calls
    return float(task["question"] in output["answer"])
