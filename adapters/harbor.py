"""The end of an attempt that was a trial of Harbor, from the files of the job's folder. Pure.

Source: harbor 0.26.0, `models/trial/result.py` and `models/verifier/result.py`.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Final

from penstock.gateway.model.queue import Event, FinishRequest
from penstock.gateway.model.rollout import Judgement, Outcome, RewardSource
from penstock.gateway.wire.dialects.loose_json import Json, obj

ENDS: Final = ("succeeded", "failed", "timeout", "cancelled")
"""Ends of an attempt that may be told later."""
REWARD: Final = "reward"
"""The name of a verifier's score that is the reward; the only one is it, whatever its name."""
KEY: Final = "import"
"""Of rewards, so that they are kept once however often they are sent."""
LONGEST_REASON: Final = 2000
LONGEST_LOG: Final = 32_000
"""Most characters of a log that are kept; of a longer one the end."""
TOLD: Final = ("task_name", "trial_name", "task_checksum", "source", "trial_uri")
COUNTED: Final = ("n_input_tokens", "n_cache_tokens", "n_output_tokens", "cost_usd")


def judgement(scores: Json, source: RewardSource = "judge") -> Judgement | None:
    """The reward in a verifier's scores; None where there is no finite number among them."""
    good = {name: float(value) for name, value in scores.items() if _is_number(value)}
    value = good.get(REWARD, next(iter(good.values())) if len(good) == 1 else None)
    more = {name: score for name, score in good.items() if name != REWARD}
    return Judgement(value=value, dimensions=more, source=source, key=KEY) if good else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def trial_end(result: Json, logs: dict[str, str]) -> FinishRequest:
    """The end of the attempt that a trial was. `result`: the trial's result.json; `logs`: texts of its logs by name,
    which become events. A trial without an exception has succeeded, whatever its reward."""
    failed = obj(result.get("exception_info"))
    reason = f"{failed.get('exception_type')}: {failed.get('exception_message')}" if failed else None
    found = judgement(obj(obj(result.get("verifier_result")).get("rewards")))
    told = {name: value for name in TOLD if isinstance(value := result.get(name), str)}
    used = obj(result.get("agent_result"))
    told |= {name: value for name in COUNTED if _is_number(value := used.get(name))}
    events = [Event(name="harbor.result", attributes=told)]
    events += [Event(name=f"harbor.{name}", attributes={"text": text[-LONGEST_LOG:]}) for name, text in logs.items()]
    return FinishRequest(
        status="failed" if failed else "succeeded",
        outcome=Outcome(
            reason=None if reason is None else reason[:LONGEST_REASON],
            duration_ns=_duration(obj(result.get("agent_execution"))),
        ),
        events=[*events],
        rewards=[] if found is None else [found],
    )


def _duration(timing: Json) -> int | None:
    """The nanoseconds of a timing; None where it does not say both ends."""
    try:
        start, end = (datetime.fromisoformat(str(timing[name])) for name in ("started_at", "finished_at"))
        return max(0, int((end - start).total_seconds() * 1e9))
    except (KeyError, ValueError, TypeError):
        return None
