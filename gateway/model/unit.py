"""A unit of rollouts: those of one user, of one tenant, or any others that a release assigns together."""

from __future__ import annotations

from penstock.gateway.model.base import Id, Noun


class UnitMember(Noun):
    """A rollout of a unit."""

    rollout: Id
    """The rollout."""
    assigned_ns: int
    """When it was given the unit's arm."""


class Unit(Noun):
    """A user, a tenant or whatever a release assigns, with all of its rollouts."""

    number: int
    """Place of its assignment."""
    members: list[UnitMember]
    """The rollouts that are counted, in their order."""
