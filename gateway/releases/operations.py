"""Resources, releases, pins and coverage, as operations inside a write transaction.

Every change of a release is one operation. It names the revision that it was made from, and writes the release, the
next link of its audit chain and, at a promotion, the stable version. Rollouts are pinned here too. The pin is decided
by the release as this transaction sees it; that decides the arm, once, and is durable before the rollout's first
affected call goes out. Counts go over the assignments in their order and leave none out: the early look is kept with
the assignment, the outcome in a record of its own. Neither is ever written twice.

A unit of rollouts is assigned once, with its first rollout; every later one gets that assignment, whatever the split is
by then. Its record holds the rollouts that are counted, so it is bounded.

A release whose record is damaged is left out wherever releases are listed, so that it stops no other and no gateway.
Nobody drives it; rollouts keep the versions that it has given them, and others get the stable ones.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from penstock.gateway.model.base import GATEWAY, parse_record
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    Pin,
    PinList,
    Release,
    Unit,
    UnitMember,
    content_hash,
)
from penstock.gateway.model.resource import (
    Audience,
    Coverage,
    LastMiss,
    ModelVersion,
    NewVersion,
    Resource,
    StableRule,
    StableVersion,
    TemplateError,
    check_candidate,
)
from penstock.gateway.releases.canary.decision import CoverageChange, MoveError, check_move, detect_change, observe
from penstock.gateway.releases.canary.outcomes import (
    Requester,
    are_disjoint,
    audience_includes,
    began_before,
    counts_member,
    pins_on,
    share,
    stable_version,
    unit_of,
)
from penstock.gateway.tape.store import audit_log, keys
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.tape.store.view import TapeView

UNITS: Final = "units"
_log: Final = logging.getLogger("penstock.releases")


class Records(Protocol):
    """A transaction that reads or writes."""

    def get(self, database: str, key: bytes) -> bytes | None: ...


PARSED: Final = 256
_parsed: Final = OrderedDict[bytes, Release]()
"""The newest `PARSED` releases by their records: a record is read again and again. Nobody changes these objects."""


def parse_release(record: bytes) -> Release | None:
    """Return a release from its record; None where the record is damaged. Whoever changes it changes a copy."""
    found = _parsed.get(record)
    if found is None and (found := parse_record(Release, record)) is not None:
        _keep(record, found)
    return found


def _keep(record: bytes, release: Release) -> None:
    _parsed[record] = release
    if len(_parsed) > PARSED:
        _parsed.popitem(last=False)


class DamagedReleaseError(OperationRefusedError):
    """The record of a release cannot be read: nothing can be done with it until the tape is mended."""

    def __init__(self, name: str) -> None:
        super().__init__(
            "conflict", f"release {name}: its record cannot be read; run `penstock check`", "release", name
        )


def release_of(name: str, record: bytes) -> Release:
    """Return a release from its record; raises `DamagedReleaseError`."""
    if (release := parse_release(record)) is None:
        raise DamagedReleaseError(name)
    return release


class LiveReleases:
    """The live releases by name, in memory (a `store.feed`): every call that is pinned asks for them."""

    def __init__(self, audit_key: str | None = None) -> None:
        """`audit_key`: the key that signs entries of audit chains."""
        self.releases: dict[str, Release] = {}
        self.audit_key = audit_key
        self._records: dict[str, bytes] = {}

    def recall(self, view: TapeView) -> None:
        self.releases.clear()
        self._records.clear()
        for name, record in view.scan("releases"):
            self._read(name, record)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Read changed releases. The log tells of releases that begin and end, but not of counts of live ones: each is
        read."""
        told = {record[1:-1].decode("ascii") for record in changes if record.startswith(b"e")}
        for name in told | self.releases.keys():
            record = view.get("releases", name.encode())
            if record is not None and record != self._records.get(name):
                self._read(name.encode(), record)

    def _read(self, name: bytes, record: bytes) -> None:
        release = parse_release(record)
        if release is not None:
            self.put(release, record)
        else:
            _log.error("release %s is left alone, its record cannot be read; run `penstock check`", name.decode())

    def put(self, release: Release, record: bytes) -> None:
        """Store a changed release; one that has ended is dropped."""
        self.releases.pop(release.id, None)
        self._records.pop(release.id, None)
        if release.live:
            self.releases[release.id], self._records[release.id] = release, record


class PinRequest(NamedTuple):
    """The pins that a call of a rollout needs."""

    rollout: str
    asker: Requester
    resources: Sequence[str]
    given: Sequence[Pin] = ()
    """Its pins in memory: more than the tape has, if the tape took no pin for a while."""


class ReleaseChange(NamedTuple):
    """A change of a release: its new values, and the link of its audit chain as far as it is known."""

    update: Mapping[str, Any]
    entry: AuditTrailEntry
    now: int


class ReleaseOperations:
    """The operations on resources, releases and pins in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction
        self._live = transaction.follower(LiveReleases)

    # -- resources ---------------------------------------------------------------------------------------------------

    def add_version(self, name: str, new: NewVersion, now: int) -> Resource:
        """Register a version; the first one is stable. Registering an existing version again returns that one."""
        present = self._versions(name)
        sha256 = content_hash(new)
        for version in present:
            if version.sha256 == sha256 and new.version in (None, version.version):
                return version
        version = new.version or _free(present)
        made = Resource(
            **new.model_dump(exclude={"version"}), name=name, version=version, created_ns=now, sha256=sha256
        )
        self._check_version(made, present)
        self._tape.put("resources", _named(name, version), made.model_dump_json().encode())
        if not present:
            self._put_stable(name, StableVersion(version=version))
        if made.content.get("sent"):
            # Its coverage begins anew: agents are known to send another text of it.
            self._tape.delete("coverage", name.encode())
        self._tape.append(b"v" + keys.rollout_key(name))
        return made

    def _check_version(self, made: Resource, present: Sequence[Resource]) -> None:
        if any(version.version == made.version for version in present):
            message = (
                f"{made.qualified_name} is registered with another content; versions never change, choose another name"
            )
            raise OperationRefusedError("conflict", message, "version", made.version)
        if any(version.kind != made.kind for version in present):
            message = f"kind: {made.name!r} is a {present[0].kind}, its versions cannot be a {made.kind}"
            raise OperationRefusedError("invalid", message, "kind", made.kind)
        if made.parent is not None and all(version.version != made.parent for version in present):
            raise OperationRefusedError(
                "invalid", f"parent: {made.name!r} has no version {made.parent!r}", "parent", made.parent
            )
        if made.kind == "model":
            self._check_served(made)
        elif present and not made.content.get("sent"):
            self._check_slots(made, present)

    def _check_slots(self, made: Resource, present: Sequence[Resource]) -> None:
        before = made.parent or self.stable(made.name).version
        earlier, template = next(v for v in present if v.version == before).template, made.template
        assert earlier is not None
        assert template is not None
        try:
            check_candidate(earlier, template)
        except TemplateError as error:
            message = f"content.text: its slots are not those of {made.name}@{before}: {error}"
            raise OperationRefusedError("invalid", message, "content.text") from None

    def _check_served(self, made: Resource) -> None:
        """Refuse to give a name that an engine serves to other weights."""
        mine, name, adapter = _served(made)
        for _, record in list(self._tape.scan("resources")):
            other = Resource.model_validate_json(record)
            if other.kind != "model":
                continue
            theirs, taken, loaded = _served(other)
            if taken == name and loaded != adapter and (both := mine & theirs):
                message = (
                    f"content.served: upstream {min(both)!r} serves {name!r} for {other.qualified_name} already, from "
                    "other weights; give this version a name of its own"
                )
                raise OperationRefusedError("conflict", message, "content.served", name)

    def _versions(self, name: str) -> list[Resource]:
        found = self._tape.scan("resources", keys.rollout_key(name))
        versions = [Resource.model_validate_json(record) for _, record in found]
        return sorted(versions, key=lambda version: version.created_ns)

    def stable(self, name: str) -> StableVersion:
        """Return the stable version of a resource, which new rollouts get."""
        stored = self._tape.get("stable", name.encode())
        if stored is None:
            message = f"there is no resource {name!r}; `penstock resource add {name}` registers one"
            raise OperationRefusedError("not_found", message, "resource", name)
        return StableVersion.model_validate_json(stored)

    def _put_stable(self, name: str, stable: StableVersion) -> None:
        self._tape.put("stable", name.encode(), stable.model_dump_json().encode())

    # -- releases ----------------------------------------------------------------------------------------------------

    def start(self, new: Release, entry: AuditTrailEntry, now: int) -> Release:
        """Begin a release; everything but its name, stable version and chain is given."""
        before = self._tried(new.resource, new.candidate, new.only)
        if new.candidate == before:
            message = f"{new.resource}@{before} is the stable version already: there is nothing to try"
            raise OperationRefusedError("conflict", message, "candidate", new.candidate)
        if new.resource in new.companions:
            message = f"companions: {new.resource!r} is what the release is of, and cannot be its own companion"
            raise OperationRefusedError("invalid", message, "companions", new.resource)
        stable = {name: self._tried(name, version, new.only) for name, version in new.companions.items()}
        self._check_apart(new)
        number = 1 + len(list(self._tape.scan("releases", new.resource.encode() + b"-")))
        while self._tape.get("releases", f"{new.resource}-{number}".encode()) is not None:
            number += 1
        made = new.model_copy(
            update={
                "id": f"{new.resource}-{number}",
                "kind": self._versions(new.resource)[0].kind,
                "stable": before,
                "companions_stable": stable,
                "created_ns": now,
            }
        )
        versions = (it for name in made.resources for it in self._versions(name))
        made.contents = {
            it.qualified_name: content_hash(it) for it in versions if it.qualified_name in made.qualified_versions
        }
        return self._write(made, entry.model_copy(update={"before": None, "config": made.config()}), now)

    def _tried(self, resource: str, version: str, only: Audience) -> str:
        """Return the stable version to which another version is compared. Raises `OperationRefusedError` where that
        one does not exist."""
        stable, versions = self.stable(resource), [one.version for one in self._versions(resource)]
        if version not in versions:
            message = f"{resource!r} has no version {version!r}; it has {', '.join(versions)}"
            raise OperationRefusedError("not_found", message, "candidate", version)
        return _of(stable, only)

    def _check_apart(self, new: Release) -> None:
        for resource in new.resources:
            for other in self._live_releases(resource):
                if not are_disjoint(other.only, new.only):
                    message = (
                        f"release {other.id} is live for the same calls ({other.stage}); end it first, or give each an "
                        "audience of its own (--only)"
                    )
                    raise OperationRefusedError("conflict", message, "resource", resource)

    def change(
        self, name: str, revision: int | None, update: Mapping[str, Any], entry: AuditTrailEntry, now: int
    ) -> Release:
        """Change a release, with the next link of its chain. `revision`: the one on which the decision was based; None
        for a person, whose decision holds whatever happened in between. Promotion makes the candidate stable."""
        return self._changed(self._at(name, revision), ReleaseChange(update, entry, now))

    def count(
        self,
        name: str,
        revision: int,
        looked: Sequence[Assignment],
        seen: Sequence[AssignmentEvidence],
        decided: ReleaseChange | None = None,
    ) -> Release:
        """Keep the early looks at the next assignments and the outcomes of the next ones, both in order, and make the
        change that follows from them."""
        release = self._at(name, revision).model_copy()
        both = (("assigned", "early", looked), ("seen", "counted", seen))
        # A refusal keeps what was put before it, so all are checked first.
        for _, counted, found in both:
            last, numbers = getattr(release, counted), [one.number for one in found]
            if numbers != list(range(last + 1, last + 1 + len(numbers))):
                message = f"release {name}: assignments {numbers} cannot be counted after {last}"
                raise OperationRefusedError("conflict", message, "number")
        if decided is not None:
            self._check(release, decided)
        for database, counted, found in both:
            for one in found:
                self._tape.put(database, keys.numbered_key(name, one.number), one.model_dump_json().encode())
            setattr(release, counted, getattr(release, counted) + len(found))
        if decided is not None:
            return self._apply(release, decided)
        self._put_release(release)
        return release

    def _at(self, name: str, revision: int | None) -> Release:
        """Return a release, if this is its revision."""
        release = self.stored(name)
        if revision is not None and release.revision != revision:
            message = f"release {name} has changed since (revision {release.revision}, not {revision})"
            raise OperationRefusedError("conflict", message, "revision", str(revision))
        return release

    def _check(self, release: Release, change: ReleaseChange) -> None:
        """Raises `OperationRefusedError` for a change that the release's stage does not allow."""
        name, update = release.id, change.update
        after = update.get("stage", release.stage)
        try:
            if "stage" in update:
                check_move(release.stage, after)
        except MoveError as error:
            raise OperationRefusedError("conflict", f"release {name}: {error}", "stage", after) from None
        if after == "promoted" and release.stage == "held" and release.held_in != "canary":
            message = f"release {name} was held in {release.held_in}: nobody has seen its candidate work yet; resume it"
            raise OperationRefusedError("conflict", message, "stage", after)

    def _changed(self, release: Release, change: ReleaseChange) -> Release:
        self._check(release, change)
        return self._apply(release, change)

    def _apply(self, release: Release, change: ReleaseChange) -> Release:
        """Write a change that was checked."""
        update, entry = change.update, change.entry
        after = update.get("stage", release.stage)
        made = release.model_copy(update=dict(update))
        if after == "promoted":
            self._promote(made)
        link = entry.model_copy(update={"before": release.stage, "config": made.config()})
        return self._write(made, link, change.now)

    def _promote(self, release: Release) -> None:
        for resource, version in release.arm_versions("candidate").items():
            stable = self.stable(resource)
            if release.only == Audience():
                stable = StableVersion(version=version)
            else:
                kept = [rule for rule in stable.rules if rule.only != release.only]
                stable.rules = [StableRule(only=release.only, version=version), *kept]
            self._put_stable(resource, stable)

    def _write(self, release: Release, entry: AuditTrailEntry, now: int) -> Release:
        """Write the release and its next link."""
        release.revision += 1
        hidden = self._tape.secrets.text
        release.author = hidden(release.author)
        link = entry.model_copy(
            update={
                "who": entry.who if entry.who == GATEWAY else hidden(entry.who),
                "why": hidden(entry.why),
                "number": release.revision,
                "at_ns": now,
                "after": release.stage,
                "step": release.step,
                "split": release.split,
            }
        ).sealed(release.head, self._live.audit_key)
        release.head, release.changed_ns, release.reason = link.hash, now, link.why
        self._tape.put("audit", keys.numbered_key(release.id, link.number), link.model_dump_json().encode())
        if link.who != GATEWAY:
            audit_log.write_reference(self._tape, release.id, link.number)
        self._put_release(release)
        self._tape.append(b"e" + keys.rollout_key(release.id))
        return release

    def _put_release(self, release: Release) -> None:
        """Write a release without a link of its chain; nobody changes it from now on."""
        record = release.model_dump_json().encode()
        _keep(record, release)
        self._tape.put("releases", release.id.encode(), record)
        self._live.put(release, record)

    def stored(self, name: str) -> Release:
        """Return the release as of this transaction; raises `OperationRefusedError`."""
        stored = self._tape.get("releases", name.encode())
        if stored is None:
            raise OperationRefusedError(
                "not_found", f"there is no release {name!r}; `penstock release list` lists them", "release", name
            )
        return release_of(name, stored)

    def _live_releases(self, resource: str) -> list[Release]:
        return [release for release in self._live.releases.values() if resource in release.resources]

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def pin(self, wanted: PinRequest, now: int) -> list[Pin]:
        """Give a rollout the versions that a call of it needs; return all its pins. A pin stays, unless its release was
        rolled back."""
        known = self._tape.rollout(wanted.rollout)
        if known is not None:
            wanted = wanted._replace(
                asker=wanted.asker._replace(mode=known.rollout.mode, metadata=known.rollout.metadata)
            )
        stored = self._tape.get("pins", keys.rollout_key(wanted.rollout))
        found = [] if stored is None else pins_of(stored)
        pins = [pin for pin in found if not pin.forgotten]
        given = {(pin.resource, pin.agent): pin.model_copy() for pin in wanted.given}
        for pin in pins:
            if given.pop((pin.resource, pin.agent), pin).mixed:
                self._fall_back(pin)
        pins += given.values()
        fixed = {} if known is None else known.rollout.config.versions
        for resource in wanted.resources:
            mine = next((p for p in pins if p.resource == resource and p.agent == wanted.asker.agent), None)
            if mine is not None:
                self._fall_back(mine)
            elif resource in fixed:
                pins.append(Pin(resource=resource, agent=wanted.asker.agent, version=fixed[resource]))
            else:
                pins += self._pin(wanted, resource, pins, fixed, now)
        made = pins_record([*(pin for pin in found if pin.forgotten), *pins])
        if made != stored:
            self._tape.put("pins", keys.rollout_key(wanted.rollout), made)
        return pins

    def _fall_back(self, pin: Pin) -> Pin:
        """Give the stable version after a rollback: the one exception to "one rollout, one arm"."""
        if pin.arm == "candidate" and not pin.mixed:
            release = self._release_of(pin)
            if release is not None and release.stage == "rolled_back":
                pin.version, pin.mixed = release.arm_versions("stable")[pin.resource], True
        return pin

    def _pin(
        self, wanted: PinRequest, resource: str, pins: Sequence[Pin], fixed: Container[str], now: int
    ) -> list[Pin]:
        """Return the pin of a resource, and those of its companions in the release. `pins`: all that the rollout has;
        `fixed`: resources whose versions it names itself."""
        asker = wanted.asker
        for other in pins:
            # Another agent of the rollout is on an arm of a release that also includes this one: it gets the same arm.
            if other.resource == resource and self._covers(other, asker):
                return [self._fall_back(other.model_copy(update={"agent": asker.agent}))]
        live = next((one for one in self._live_releases(resource) if audience_includes(one.only, asker)), None)
        joins = live is not None and not began_before(live, asker, pins, fixed)
        if live is not None and joins and (assignment := self._assigned(live, wanted, now)) is not None:
            return pins_on(live, assignment, asker.agent)
        return [Pin(resource=resource, agent=asker.agent, version=stable_version(self.stable(resource), asker))]

    def _assigned(self, live: Release, wanted: PinRequest, now: int) -> Assignment | None:
        """Assign a rollout to an arm of a release; None where the release takes no more. A unit that has an arm keeps
        it in new rollouts, also while the release is held."""
        unit = unit_of(live, wanted.asker)
        if unit is not None and (known := self._join(live, unit, wanted.rollout, now)) is not None:
            self._put_release(live.model_copy(update={"joined": live.joined + 1}))
            return known
        return self._assign(live, wanted.rollout, unit, now) if live.stage == "canary" else None

    def _join(self, live: Release, unit: str, rollout: str, now: int) -> Assignment | None:
        """Return the assignment of an existing unit, and add a rollout to it; None if the unit is new."""
        stored = self._tape.get(UNITS, unit_key(live.id, unit))
        if stored is None:
            return None
        found = Unit.model_validate_json(stored)
        assigned = self._tape.get("assigned", keys.numbered_key(live.id, found.number))
        assert assigned is not None
        assignment = Assignment.model_validate_json(assigned)
        if counts_member(live, assignment, len(found.members), now):
            found.members.append(UnitMember(rollout=rollout, assigned_ns=now))
            self._tape.put(UNITS, unit_key(live.id, unit), found.model_dump_json().encode())
        return assignment

    def _assign(self, live: Release, rollout: str, unit: str | None, now: int) -> Assignment:
        assignment = Assignment(
            number=live.assigned + 1,
            rollout=rollout,
            unit=unit,
            arm="candidate" if share(live.salt, unit or rollout) < live.split else "stable",
            probability=live.split,
            stage=live.policy.ramp[live.step].name,
            assigned_ns=now,
        )
        self._tape.put("assigned", keys.numbered_key(live.id, assignment.number), assignment.model_dump_json().encode())
        if unit is not None:
            made = Unit(number=assignment.number, members=[UnitMember(rollout=rollout, assigned_ns=now)])
            self._tape.put(UNITS, unit_key(live.id, unit), made.model_dump_json().encode())
        unnamed = live.unnamed + (live.policy.by_unit and unit is None)
        self._put_release(live.model_copy(update={"assigned": assignment.number, "unnamed": unnamed}))
        return assignment

    def _covers(self, pin: Pin, asker: Requester) -> bool:
        release = self._release_of(pin)
        return release is not None and audience_includes(release.only, asker)

    def _release_of(self, pin: Pin) -> Release | None:
        """Return the release of a pin; None where it has none, or one whose record is damaged: its versions stay."""
        record = None if pin.release is None else self._tape.get("releases", pin.release.encode())
        return None if record is None else parse_release(record)


def pins_of(record: bytes) -> list[Pin]:
    """Return the pins of a record."""
    return PinList.model_validate_json(record).pins


def pins_record(pins: Sequence[Pin]) -> bytes:
    """Return the record of a rollout's pins."""
    return PinList(pins=list(pins)).model_dump_json(exclude_defaults=True).encode()


def assignments(
    tape: Records, release: str, after: int, until: int
) -> Iterator[tuple[Assignment, AssignmentEvidence | None]]:
    """Yield the assignments of a release after one number and up to another, each with its outcome, None while that is
    not counted."""
    for number in range(max(0, after) + 1, until + 1):
        key = keys.numbered_key(release, number)
        if (assigned := tape.get("assigned", key)) is None:
            return
        seen = tape.get("seen", key)
        outcome = None if seen is None else AssignmentEvidence.model_validate_json(seen)
        yield Assignment.model_validate_json(assigned), outcome


def unit_key(release: str, unit: str) -> bytes:
    """Return the key of a unit of a release."""
    return keys.attempt_key(release, unit)


def _named(name: str, version: str) -> bytes:
    return keys.attempt_key(name, version)


def _free(present: Sequence[Resource]) -> str:
    taken = {version.version for version in present}
    return next(name for number in count(len(present) + 1) if (name := f"v{number}") not in taken)


def _served(resource: Resource) -> tuple[frozenset[str], str, str | None]:
    """Return (upstreams, the name there, adapter or None)."""
    content = resource.read()
    assert isinstance(content, ModelVersion)
    return frozenset(content.upstreams), content.name(resource.name, resource.version), content.adapter


def _of(stable: StableVersion, only: Audience) -> str:
    """Return the version that an audience gets now."""
    return next((rule.version for rule in stable.rules if rule.only == only), stable.version)


# -- coverage ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CoverageDelta:
    """Additions to the coverage of a resource."""

    matched: int = 0
    """Calls in which its text was recognised."""
    missed: Counter[str] = field(default_factory=Counter[str])
    """Calls with a text that is nearly its own, by reason."""
    rollouts: list[bool] = field(default_factory=list[bool])
    """For each rollout that has not called before, in order: True if its text was recognised."""
    last: LastMiss | None = None
    """The last of these misses."""


CoverageUpdates = Mapping[str, tuple[Coverage, CoverageChange | None]]
"""The coverage by the resource's name, and its turn if it has just fallen or come back."""


class CoverageOperations:
    """The operations on coverage in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def add(self, added: Mapping[str, CoverageDelta], now: int) -> CoverageUpdates:
        """Add calls to the coverage, rollout by rollout."""
        return {name: self._add(name, one, now) for name, one in added.items() if self._is_there(name)}

    def _is_there(self, name: str) -> bool:
        return self._tape.get("stable", name.encode()) is not None

    def _add(self, name: str, added: CoverageDelta, now: int) -> tuple[Coverage, CoverageChange | None]:
        stored = self._tape.get("coverage", name.encode())
        coverage = Coverage(since_ns=now) if stored is None else Coverage.model_validate_json(stored)
        coverage.matched += added.matched
        coverage.missed = dict(Counter(coverage.missed) + added.missed)
        if added.last is not None and not self._forgotten(added.last.rollout):
            coverage.last = added.last
        turned: CoverageChange | None = None
        for matched in added.rollouts:
            observe(coverage, matched)
            turned = detect_change(coverage, now) or turned
        self._tape.put("coverage", name.encode(), coverage.model_dump_json(exclude_defaults=True).encode())
        if turned is not None:
            self._tape.append(b"v" + keys.rollout_key(name))
        return coverage, turned

    def _forgotten(self, rollout: str) -> bool:
        """True if a rollout was forgotten since it called: its text must not come back."""
        key = keys.rollout_key(rollout)
        return self._tape.get("forgotten", key) is not None and self._tape.rollout(rollout) is None
