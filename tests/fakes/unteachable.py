"""Agents and judges for `penstock run --callable` of which little can be learnt, each in its own way."""

from __future__ import annotations

import os
from typing import Any

from fakes.asking import agent, asked, reward

__all__ = ["agent", "reward"]


def raises(task: dict[str, Any], output: dict[str, Any], transcript: object) -> float:
    """A judge with an error in it."""
    raise RuntimeError("the key of the grader is missing")


def of_one(task: dict[str, Any]) -> float:
    """A judge that takes too little."""
    return 1.0


def not_a_number(task: dict[str, Any], output: dict[str, Any], transcript: object) -> float:
    """A judge that divides by nothing."""
    return float("nan")


def always_one(task: dict[str, Any], output: dict[str, Any], transcript: object) -> float:
    """A judge that likes everything."""
    return 1.0


def crashes(task: dict[str, Any]) -> dict[str, Any]:
    """An agent that fails after it has asked, so that it is no fault of the machine."""
    _ = agent(task)
    raise ValueError("the tool's answer has no field 'city'")


def asks_another(task: dict[str, Any]) -> dict[str, Any]:
    """An agent that asks the base model."""
    return asked([{"role": "user", "content": task["question"]}], model="base")


def is_short(task: dict[str, Any]) -> dict[str, Any]:
    """An agent that lets the model say one word."""
    return asked([{"role": "user", "content": task["question"]}], max_tokens=1)


def crashes_at_odd_numbers(task: dict[str, Any]) -> dict[str, Any]:
    """An agent that fails in every other rollout of a group."""
    found = agent(task)
    if int(os.environ["PENSTOCK_ROLLOUT_ID"][-1]) % 2:
        raise ValueError("the tool's answer has no field 'city'")
    return found


def peaks_at_two(task: dict[str, Any], output: dict[str, Any], transcript: Any) -> float:
    """A judge that likes the weights of step 2 best when it comes to held-out tasks."""
    if transcript.rollout.mode != "val":
        return reward(task, output, transcript)
    versions: dict[str, str] = transcript.calls[-1].span.versions
    return {"run.0": 0.25, "run.1": 0.5, "run.2": 1.0}.get(versions["policy"], 0.75)


def samples_otherwise_at_odd_numbers(task: dict[str, Any]) -> dict[str, Any]:
    """An agent that asks for another temperature and top_p in every other rollout of a group."""
    odd = int(os.environ["PENSTOCK_ROLLOUT_ID"][-1]) % 2
    more = {"temperature": 0.2, "top_p": 0.9} if odd else {}
    return asked([{"role": "user", "content": f"{task['question']} {os.environ['PENSTOCK_ROLLOUT_ID']}"}], **more)
