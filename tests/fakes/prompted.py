"""An agent with a prompt for `penstock run --callable`, its judge, and an engine that proposes other prompts.

The judge likes prompts with more of the `RULES` in them, and then chance: another text, another reward.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from fakes import asking

from penstock.gateway.model.turn import Transcript
from penstock.trainer.apo.protocol import Candidate, Evidence, Pool

PROMPT = "You answer questions of our customers."
RULES = ("Be kind.", "Be short.")
WORSE = "Say nothing."


def agent(task: dict[str, Any]) -> dict[str, Any]:
    """Its question, and what the model said."""
    text = f"{task['question']} {os.environ['PENSTOCK_ROLLOUT_ID']}"
    return asking.asked([{"role": "system", "content": PROMPT}, {"role": "user", "content": text}])


def reward(task: dict[str, Any], output: dict[str, Any], transcript: Transcript) -> float:
    """Between 0 and 1."""
    told = json.dumps([message.model_dump(mode="json") for message in transcript.messages])
    rules = sum(rule in told for rule in RULES) / len(RULES)
    return 0.6 * rules + 0.2 * (WORSE not in told) + 0.2 * asking.reward(task, output, transcript)


async def propose(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """The best prompt so far with the next rule, and a worse one; nothing more in the same round."""
    if len(pool.candidates) > 1:
        return []
    best = pool.seed.texts["shop"]
    more = [*[rule for rule in RULES if rule not in best][:1], WORSE]
    return [Candidate({"shop": f"{best}\n{one}"}, pool.seed.id, f"it lacks {one!r}") for one in more]
