"""What marks the calls that were made for a release and for nobody else: replays, shadows, rehearsals. Pure.

Such a call says which one it repeats and for whom. It is on the tape like every other, and out of whatever speaks of
agents: training, costs, discovery of prompts, what a release is measured by.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.gateway.model.span import Span

REPLAY_OF, SHADOW_OF, LEG = "penstock.replay_of", "penstock.shadow_of", "penstock.leg"
REHEARSAL: Final = "-rehearsal-a"
"""Before the revision in the name of a rehearsal's run: `RELEASE-rehearsal-aREVISION-NUMBER-LEG`."""
_NAME: Final = re.compile(rf".+{REHEARSAL}[0-9]+-[0-9]+-(?:candidate|incumbent)")


def rehearsed(rollout: str) -> bool:
    """Whether a rollout is a run of a rehearsal, under way or not."""
    return REHEARSAL in rollout and _NAME.fullmatch(rollout) is not None


def own(span: Span) -> bool:
    """Whether a span is of a call that was made for a release, or of a run of a rehearsal: its rewards too."""
    marked = bool(span.attributes) and not {REPLAY_OF, SHADOW_OF}.isdisjoint(span.attributes)
    return marked or rehearsed(span.rollout)
