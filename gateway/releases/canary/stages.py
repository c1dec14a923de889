"""The stages of a release and the moves between them: one table, from which the documentation's diagram is drawn. Pure.

`checked`, `replayed` and `shadowed` name the stage that was passed; the next one is under way, unless the release
waits. A stage that the policy skips is passed without being done, and the audit says so. Nothing leaves `promoted`,
`rolled_back` and `aborted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.gateway.model.release import ENDED, ReleaseStage

_STOPPED: Mapping[ReleaseStage, str] = {
    "rolled_back": "harm, a guard, a hard violation, a failed check, or a person",
    "aborted": "a person",
    "held": "a person, no decision, or figures that cannot be trusted",
}
MOVES: Final[Mapping[ReleaseStage, Mapping[ReleaseStage, str]]] = {
    "draft": {"checked": "slots, size, rendering, weights that load", **_STOPPED},
    "checked": {"replayed": "recorded calls were asked again", **_STOPPED},
    "replayed": {"shadowed": "live calls were mirrored", **_STOPPED},
    "shadowed": {"canary": "new rollouts are assigned", **_STOPPED},
    "canary": {
        "canary": "the next split, and then the holdback",
        "promoted": "no loss beyond the margin and no harm in the holdback, or a person",
        **_STOPPED,
    },
    "held": {
        "draft": "resumed",
        "checked": "resumed",
        "replayed": "resumed",
        "shadowed": "resumed",
        "canary": "resumed",
        "promoted": "a person",
        "rolled_back": "a person",
        "aborted": "a person",
    },
    "promoted": {},
    "rolled_back": {},
    "aborted": {},
}
"""For every stage the stages that may follow it, and why."""
NEXT: Final[Mapping[ReleaseStage, ReleaseStage]] = {
    "draft": "checked", "checked": "replayed", "replayed": "shadowed", "shadowed": "canary"
}  # fmt: skip
"""The stage after each one on the way up to the canary."""


class MoveError(ValueError):
    """A release cannot move from its stage to the requested one."""


def check_move(before: ReleaseStage, after: ReleaseStage) -> None:
    """Raises `MoveError`, which names the stages that may follow, if `after` is none of them."""
    if before in ENDED:
        raise MoveError(f"a release that is {before} has ended; start another one")
    if after not in MOVES[before]:
        raise MoveError(f"a release that is {before} cannot become {after}; it may become {', '.join(MOVES[before])}")
