"""A policy as the tape has it: with all values that decisions depended on, also those that nobody can set."""

from __future__ import annotations

import copy
from typing import Any, cast

from penstock.gateway.model.release_policy import QUARTER, REPLAY_ALPHA, SRM_ALPHA, ReleasePolicy

FIXED: dict[str, Any] = {
    "failed": 0.0,
    "hard_violations": 0,
    "srm_alpha": SRM_ALPHA,
    "adaptive": False,
    "replay": {"alpha": REPLAY_ALPHA},
    "guards": {"latency": {"alpha": QUARTER}, "cost": {"alpha": QUARTER}},
}
"""The values that the tape's policy has and nobody can set: decisions are recomputed from all values that they depended
on."""


def freeze_policy(policy: ReleasePolicy) -> dict[str, Any]:
    """A policy as the tape has it, with the values of `FIXED`."""
    made = policy.model_dump(mode="json")
    _add(made, FIXED)
    made["replay"]["judge"] = made["shadow"]["judge"] = made.pop("judge")
    made["reward_low"], made["reward_high"] = made.pop("reward_range")
    for stage, own in zip(made["stages"], policy.stages, strict=True):
        stage["name"] = own.name
    return made


def thaw_policy(value: Any) -> Any:
    """The values of a policy on the tape that can be set; any value that is no object is returned unchanged."""
    if not isinstance(value, dict):
        return value
    made = copy.deepcopy(cast(dict[str, Any], value))
    _take(made, FIXED)
    replay, shadow = made.get("replay", {}), made.get("shadow", {})
    if "judge" in replay and replay["judge"] == shadow.get("judge"):
        made["judge"] = replay.pop("judge")
        del shadow["judge"]
    if "reward_low" in made and "reward_high" in made:
        made["reward_range"] = [made.pop("reward_low"), made.pop("reward_high")]
    for stage in made.get("stages", ()):
        if stage.get("name") == f"{stage['split'] * 100:g}%":
            del stage["name"]
    return made


def _add(made: dict[str, Any], fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        if not isinstance(value, dict):
            made[name] = value
        elif made.get(name) is not None:
            _add(made[name], cast(dict[str, Any], value))


def _take(made: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Remove the values that equal the fixed ones; others stay, and are refused by validation."""
    for name, value in fixed.items():
        if isinstance(value, dict) and made.get(name) is not None:
            _take(made[name], cast(dict[str, Any], value))
        elif made.get(name) == value:
            made.pop(name, None)
