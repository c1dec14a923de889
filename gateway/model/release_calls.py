"""Calls and runs that were made only for a release."""

from __future__ import annotations

import re
from typing import Final

from penstock.gateway.model.attributes import REPLAY_OF, SHADOW_OF
from penstock.gateway.model.span import Span

REHEARSAL: Final = "-rehearsal-a"
"""Stands before the revision in the name of a rehearsal's run: `RELEASE-rehearsal-aREVISION-NUMBER-LEG`."""


_NAME: Final = re.compile(rf".+{REHEARSAL}[0-9]+-[0-9]+-(?:candidate|incumbent)")


def is_rehearsal(rollout: str) -> bool:
    """True if a rollout is a run of a rehearsal, under way or not."""
    return REHEARSAL in rollout and _NAME.fullmatch(rollout) is not None


def is_release_call(span: Span) -> bool:
    """True if a span is of a call that was made for a release, or of a run of a rehearsal; its rewards count too."""
    marked = bool(span.attributes) and not {REPLAY_OF, SHADOW_OF}.isdisjoint(span.attributes)
    return marked or is_rehearsal(span.rollout)
