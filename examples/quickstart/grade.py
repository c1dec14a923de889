"""A judge: what is an answer worth?"""

from typing import Any


def grade(task: dict[str, str], output: dict[str, str], transcript: Any) -> float:
    return 1.0 if output["answer"] == task["answer"] else 0.0
