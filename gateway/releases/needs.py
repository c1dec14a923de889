"""The needs for versions. Nobody may remove a version from a server or a disk while a call may still ask for it.

New rollouts need the stable versions and those of live releases; a rollout that is under way needs its own versions.
Whoever keeps weights asks before removing any: the gateway itself for adapters (`adapter_keeper`), a trainer for its
own servers and directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.gateway.model.lifecycle import FINAL
from penstock.gateway.model.release import ARMS
from penstock.gateway.model.resource import Audience, Need
from penstock.gateway.model.summaries import last_seen_ns
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store import Store

QUIET_NS: Final = 3600 * 10**9
"""A rollout that did not come from the queue may be silent for this long and still work: its end is only a guess."""
NAMED: Final = 10
"""Rollouts that are named per version."""


def needs(tape: Store, resource: str, now_ns: int) -> list[Need]:
    """Return the needs for each version of a resource; versions that nobody needs are left out."""
    reader, found = ReleaseReader(tape), dict[str, Need]()
    if (one := reader.resource(resource)) is not None:
        _of(found, one[0].version).audiences.append(Audience())
        for rule in one[0].rules:
            _of(found, rule.version).audiences.append(rule.only)
    for release in reader.releases():
        if resource in release.resources and release.live:
            for arm in ARMS:
                _of(found, release.arm_versions(arm)[resource]).releases.append(release.id)
    for place, rollouts in pinned_versions(tape, now_ns, NAMED).items():
        name, _, version = place.partition("@")
        if name == resource:
            _of(found, version).rollouts.extend(rollouts)
    return list(found.values())


def _of(found: dict[str, Need], version: str) -> Need:
    return found.setdefault(version, Need(version=version))


def pinned_versions(tape: Store, now_ns: int, most: int = 1) -> Mapping[str, list[str]]:
    """Return NAME@VERSION of every version that an unfinished rollout is pinned to, with up to `most` of these
    rollouts."""
    found: dict[str, list[str]] = {}
    for rollout, pins in ReleaseReader(tape).all_pins():
        places = {f"{pin.resource}@{pin.version}" for pin in pins}
        new = [place for place in places if len(found.get(place, ())) < most]
        if new and _unfinished(tape, rollout, now_ns):
            for place in new:
                found.setdefault(place, []).append(rollout)
    return found


def _unfinished(tape: Store, rollout: str, now_ns: int) -> bool:
    found = tape.rollout(rollout)
    if found is None:
        # The first call of the rollout is under way.
        return True
    if found.origin == "queued":
        return found.status not in FINAL
    return now_ns - last_seen_ns(found, tape.attempts(rollout)) < QUIET_NS
