"""What marks the calls that were made for a release and for nobody else: replays, shadows, rehearsals. Pure.

Such a call says which one it repeats and for whom. It is on the tape like every other, and out of whatever speaks of
agents: training, costs, discovery of prompts, what a release is measured by.
"""

from __future__ import annotations

from typing import Final

BEGAN: Final = "penstock.session.began"
"""Attribute of a call that begins one: why."""


AMBIGUOUS = "penstock.ambiguous"
"""Attribute of a call without an address that could be another rollout's as well."""


REPLAY_OF, SHADOW_OF, LEG = "penstock.replay_of", "penstock.shadow_of", "penstock.leg"

CAPTURED: Final = "penstock.captured"
"""Of a call: the names of the fields that were added to its request."""
