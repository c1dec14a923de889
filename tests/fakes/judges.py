"""Functions for `--reward`, right and wrong ones."""

from __future__ import annotations

import time
from typing import Any

from penstock.gateway.model.turn import Transcript
from penstock.sidecar.run.reward_judge import ANSWER


def right(task: Any, output: Any, transcript: Transcript) -> float:
    assert task == {"city": "Ulm"}
    assert transcript.text == ANSWER
    return float(output.get("city") == "Ulm")


def reads_the_output(task: Any, output: Any, transcript: Transcript) -> float:
    return output["city"]


async def waits(task: Any, output: Any, transcript: Transcript) -> dict[str, float]:
    return {"tone": 1.0}


def nothing(task: Any, output: Any, transcript: Transcript) -> None:
    return None


def broken(task: Any, output: Any, transcript: Transcript) -> float:
    raise OSError("no grader at port 9")


def infinite(*given: Any) -> float:
    return float("inf")


def slow(task: Any, output: Any) -> float:
    time.sleep(2)
    return 1.0


def of_two(task: Any, output: Any) -> float:
    return float(output["city"] == task["city"])


def of_one(task: Any) -> float:
    return 1.0
