"""Agents and judges that are functions."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Most of these are agents, which would wait for the import.
    from penstock.gateway.model.rollout import Judgement
    from penstock.gateway.model.turn import Transcript


def double(task: Any) -> dict[str, Any]:
    """A sync agent."""
    print("thinking", end="")
    return {"twice": task["n"] * 2, "reward": 0.25, "url": os.environ["OPENAI_BASE_URL"]}


async def later(task: Any) -> list[Any]:
    """An async agent."""
    await asyncio.sleep(0)
    return [task["n"]]


def broken(task: Any) -> None:
    """An agent that fails."""
    raise RuntimeError(f"cannot do {task['n']}")


def calls(task: Any, output: Any, transcript: Transcript) -> dict[str, Any]:
    """A judge that counts what the tape has."""
    return {"reward": len(transcript.calls), "agreement": output["answers"][-1] == transcript.text, "reason": "counted"}


def answered(task: Any, output: Any) -> float:
    """Wants no transcript, and asks the gateway of its runner."""
    from penstock import SyncClient

    with SyncClient() as client:
        assert client.queue().claimed == 1
    return float(output["twice"] == 2 * task["n"])


async def judged(task: Any, output: Any, transcript: Transcript) -> Judgement:
    """An async judge with an opinion of its own."""
    from penstock.gateway.model.rollout import Judgement

    await asyncio.sleep(0)
    return Judgement(value=0.75, source="judge", reason=f"{transcript.outcome.exit_code}")


def nobody(task: Any, output: Any, transcript: Transcript) -> float:
    """A judge that fails."""
    raise KeyError("answer")
