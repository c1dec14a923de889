"""Records of forgotten rollouts, and holds that keep rollouts from being forgotten."""

from __future__ import annotations

from penstock.gateway.model.base import Noun


class ForgottenRollout(Noun):
    """A rollout of which the tape has nothing any more but this."""

    rollout: str
    """Its name."""
    at_ns: int
    """When it was forgotten: Unix time, ns."""
    why: str = ""
    """Why; of retention, the rule."""
    number: int
    """The cursor of its creation."""
    wiped: bool = False
    """Whether its calls are deleted; until then a gateway is at it. `overwritten` of the retention says more."""


class RetentionHold(Noun):
    """That a rollout must be kept: neither retention nor a person forgets it."""

    rollout: str
    """The rollout."""
    at_ns: int
    """Since when: Unix time, ns."""
    who: str
    """Who wants it kept."""
    why: str = ""
    """Why."""
