"""Assigns rollouts to the arms of a release, and tells which calls a release applies to. Pure.

A rollout's *share* is a number in [0, 1) that follows from the release's salt and the rollout's name alone; that of a
unit of rollouts (`gateway.releases.canary.outcomes`) from the salt and the unit's hash. The rollout is on the
candidate's arm when the number is below the split. So no state is needed, two releases are independent of each other,
and a rising split takes no rollout from the candidate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from penstock.gateway.model.base import Mode
from penstock.gateway.model.release import Assignment, Pin, Release
from penstock.gateway.model.resource import Audience, StableVersion


class Requester(NamedTuple):
    """The agent, model and rollout on whose behalf a resource is requested."""

    agent: str
    """Name of the agent; empty where the address gives none."""
    model: str
    """Name of the requested model; empty where there is none."""
    mode: Mode
    """Mode of its rollout."""
    metadata: Mapping[str, Any]
    """The rollout's metadata."""
    baggage: str = ""
    """The call's `baggage` header."""


def share(salt: str, name: str) -> float:
    """The share in [0, 1) of `name` (a rollout, or a unit's hash): the first 8 bytes of SHA-256 of salt and name,
    divided by 2**64. Only the 53 highest bits are used, so that it is below 1."""
    return (int.from_bytes(hashlib.sha256(f"{salt}\0{name}".encode()).digest()[:8]) >> 11) / (1 << 53)


def audience_includes(only: Audience, asker: Requester) -> bool:
    """True if a call belongs to the audience."""
    return (
        _among(asker.agent, only.agents)
        and _among(asker.model, only.models)
        and (not only.modes or asker.mode in only.modes)
        and all(key in asker.metadata and as_text(asker.metadata[key]) == value for key, value in only.metadata.items())
    )


def as_text(value: Any) -> str:
    """A value of the metadata in the form in which `--only` gives it: text, or JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _among(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def are_disjoint(one: Audience, other: Audience) -> bool:
    """True when no call belongs to both: they name different agents, models, modes or values. Wildcards may overlap."""
    return (
        _differ(one.agents, other.agents)
        or _differ(one.models, other.models)
        or bool(one.modes and other.modes and not set(one.modes) & set(other.modes))
        or any(other.metadata.get(key, value) != value for key, value in one.metadata.items())
    )


def _differ(one: Sequence[str], other: Sequence[str]) -> bool:
    if not one or not other:
        return False
    return not any(fnmatchcase(a, b) or fnmatchcase(b, a) or (_wild(a) and _wild(b)) for a in one for b in other)


def _wild(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def began_before(live: Release, asker: Requester, pins: Sequence[Pin], fixed: Container[str]) -> bool:
    """True if a rollout takes no part in a release, because it got a version of one of the release's resources without
    this release. `pins`: the versions that the rollout was given; `fixed`: resources whose versions it names itself."""
    if any(name in fixed for name in live.resources):
        return True
    return any(
        (pin.release is None or bool(live.companions)) and audience_includes(live.only, asker._replace(agent=pin.agent))
        for pin in pins
        if pin.resource in live.resources and pin.release != live.id
    )


def pins_on(release: Release, assignment: Assignment, agent: str) -> list[Pin]:
    """The pins that its assignment gives to a rollout's agent: the resource of the release, and its companions."""
    return [
        Pin(
            resource=name,
            agent=agent,
            version=version,
            release=release.id,
            arm=assignment.arm,
            probability=assignment.probability,
            number=assignment.number,
            unit=assignment.unit,
        )
        for name, version in release.arm_versions(assignment.arm).items()
    ]


def stable_version(stable: StableVersion, asker: Requester) -> str:
    """The version that a call gets when no release is live for it."""
    return next((rule.version for rule in stable.rules if audience_includes(rule.only, asker)), stable.version)
