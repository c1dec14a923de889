"""Rules on how long rollouts stay, and the state of their removal."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import Noun
from penstock.gateway.model.times import NOTATION, nanoseconds
from penstock.gateway.model.toml import Section

# Records of forgotten rollouts, and holds that keep rollouts from being forgotten.


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


class RetentionRule(Section):
    """`[[retention]]`: after how long the gateway forgets which rollouts."""

    filter: str = ""
    """Which rollouts, by what `penstock rollouts` lists of them, such as `mode:online -reward>0.5`; empty is all."""
    after: str
    """How long after they were last heard of, such as `30d`. Only rollouts that have ended are forgotten."""

    @field_validator("after")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if not nanoseconds(value):
            raise ValueError(f"{value!r} is not a time: {NOTATION}")
        return value

    @property
    def after_ns(self) -> int:
        """The time `after` in nanoseconds."""
        return nanoseconds(self.after) or 0

    def __str__(self) -> str:
        return f"after {self.after}{self.filter and f': {self.filter}'}"


class RetentionStatus(Noun):
    """The retention rules, the size of the tape, and what is still to be deleted of forgotten rollouts."""

    rules: list[RetentionRule] = Field(default_factory=list[RetentionRule])
    """As configured."""
    keep_bytes: int | None = None
    """What the tape may use before the oldest rollouts are forgotten; None where it may grow."""
    used_bytes: int
    """What the tape uses of its file; the rest is used again."""
    file_bytes: int
    """The size of its file, which never shrinks."""
    forgotten: int
    """Rollouts that were forgotten so far."""
    retired: int = 0
    """Those of them that were by a rule or for space, since the gateway started."""
    wiping: int
    """Rollouts that are out of sight, and of which calls are still on the tape."""
    overwriting: bool
    """Whether bytes of what was deleted may still be in the file; zeros are being written over them."""
    in_index: int | None
    """Rollouts that are still in files of the index; None while it does not say."""
    looked_ns: int | None = None
    """When the rules were last applied to all rollouts."""
    stuck: str = ""
    """Why a step has failed; it is tried again."""
    full: str = ""
    """Why the space cannot be had that `keep_bytes` asks for."""

    @property
    def done(self) -> bool:
        """True if nothing is left of the forgotten rollouts."""
        return not self.wiping and not self.overwriting and self.in_index == 0


class RetentionHoldList(Noun):
    """Rollouts that somebody keeps, by name."""

    holds: list[RetentionHold] = Field(default_factory=list[RetentionHold])
    """One each."""


class ForgottenPage(Page):
    """Rollouts that were forgotten, by name."""

    forgotten: list[ForgottenRollout] = Field(default_factory=list[ForgottenRollout])
    """One each."""
