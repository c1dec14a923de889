"""The nouns of releases: resources and their versions, releases, pins, and the chain of decisions and their reasons.

A *resource* is a part of what agents run on that a release can change: a prompt, a model's weights, the description of
a tool. Its *versions* never change. One of them is *stable*: every new rollout gets it. A *release* moves rollouts from
it to a *candidate*. A *pin* is the version that one rollout was given: decided once, before its first affected call,
and kept.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainSerializer, WrapValidator

from penstock.gateway.model.base import AuthenticatedRequest, Id, Noun, Person
from penstock.gateway.model.release_policy import ReleasePolicy, freeze_policy, thaw_policy
from penstock.gateway.model.resource import Audience, Coverage, ResourceKind, Version

ReleaseStage = Literal[
    "draft", "checked", "replayed", "shadowed", "canary", "promoted", "rolled_back", "aborted", "held"
]
"""The stage of a release: the last of these that it has passed, or `canary` while it runs one, or how it ended."""
Arm = Literal["stable", "candidate"]
ARMS: tuple[Arm, ...] = get_args(Arm)
MOST_COMPANIONS = 19


class Pin(Noun):
    """The version of one resource that a rollout was given, for one of its agents."""

    resource: Id
    """The resource."""
    agent: str = ""
    """Name of the agent; empty where the address gives none."""
    version: Id
    """The version that serves it."""
    release: Id | None = None
    """The release that decided; None where none was live for it."""
    arm: Arm | None = None
    """Its arm in the release."""
    probability: float | None = None
    """Of the candidate, as it was at the assignment."""
    number: int | None = None
    """Its place in the release's order of assignment, from 1."""
    unit: str | None = None
    """Hash of the unit that it belongs to; None where its rollout was assigned by itself."""
    mixed: bool = False
    """True once it fell back to the stable version in the middle, because its release was rolled back. Its rollout has
    seen both versions and is left out of every statistic and of training."""
    forgotten: bool = False
    """True once its rollout was forgotten: it says what a release has counted, and nothing of another rollout of that
    name."""


class PinList(Noun):
    """The versions of resources that a rollout was given."""

    pins: list[Pin]
    """One for each resource and agent that has asked for it."""


class EarlyEvidence(Noun):
    """The early look at an assignment: whether it began with an error, counted long before its outcome is due."""

    seen_ns: int
    """When it was counted."""
    good: float | None
    """1 without an early error, 0 with one; None where it is left out: it has seen both versions, was cancelled, or
    never showed up."""
    counted: int
    """The last assignment whose outcome had been counted then: it gives the order in which decisions were made."""


class Assignment(Noun):
    """A rollout, or a unit of rollouts, that takes part in a release."""

    number: int
    """Its place in the order of assignment, from 1."""
    rollout: Id
    """The rollout; the first one of a unit."""
    unit: str | None = None
    """Hash of the release's salt and the unit's name, hex; None for a rollout that is assigned by itself."""
    arm: Arm
    """Its arm."""
    probability: float
    """Of the candidate, as it was then."""
    stage: str
    """Name of the canary's stage then."""
    assigned_ns: int
    """When."""
    early: EarlyEvidence | None = None
    """What was seen of it early; None while that is awaited, and where the policy has no early guard."""


class UnitMember(Noun):
    """A rollout of a unit."""

    rollout: Id
    """The rollout."""
    assigned_ns: int
    """When it was given the unit's arm."""


class Unit(Noun):
    """A user, a tenant or whatever a release assigns together, with all of its rollouts."""

    number: int
    """Place of its assignment."""
    members: list[UnitMember]
    """The rollouts that are counted, in their order."""


class RolloutEvidence(Noun):
    """The outcome of a rollout as of the moment when it was counted."""

    rollout: Id
    """The rollout; the first one of a unit."""
    left_out: str | None = None
    """Why it is not counted; None where it is."""
    reward: float | None = None
    """Goodness in [0, 1]; None when no reward had come by the deadline. Of a unit the mean of its rollouts' that have
    one, and so with the guards."""
    raw_reward: float | None = None
    """The reward itself; None for a unit."""
    guards: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    """Goodness by guard, in [0, 1]; None where it is not known."""
    violations: int = 0
    """Hard violations."""
    group: str | None = None
    """The task that its rollout repeats; None for a unit."""
    span: str | None = None
    """ATTEMPT#SEQUENCE of the reward's span; None for a unit."""


class AssignmentEvidence(RolloutEvidence):
    """The outcome of an assignment as of the moment when it was counted; decisions are made from this and nothing
    else."""

    number: int
    """Its place in the order of assignment."""
    seen_ns: int
    """When it was counted."""
    parts: list[RolloutEvidence] = Field(default_factory=list[RolloutEvidence])
    """What was seen of each rollout of a unit, in their order; empty for a rollout that is assigned by itself."""


class AuditTrailEntry(Noun):
    """One link of the audit chain."""

    number: int
    """From 1."""
    at_ns: int
    """When."""
    who: str
    """Who did it, as was claimed; `gateway` for what was decided by the rules."""
    key: str = ""
    """Name of the key that it was asked for with; empty for the rules, and where the gateway has no keys."""
    action: str
    """What was done: `start`, `check`, `replay`, `shadow`, `canary`, `advance`, `approve`, `promote`, `roll_back`,
    `hold`, `resume`, `abort`."""
    before: ReleaseStage | None
    """Stage before; None for the first."""
    after: ReleaseStage
    """Stage after."""
    step: int = 0
    """Which stage of the canary it is in after it, from 0."""
    split: float = 0.0
    """Share of new rollouts that get the candidate after it."""
    why: str = ""
    """In a sentence."""
    assignment: int | None = None
    """The assignment that was counted last when it was decided."""
    early: int = 0
    """The assignment that was looked at early last when it was decided."""
    evidence: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Figures behind it: e-values, means and numbers by arm, what a check found."""
    config: str = ""
    """SHA-256 of the release's policy, candidate, audience and of what its versions say; hex."""
    previous: str = ""
    """Hash of the entry before it; empty for the first."""
    hash: str = ""
    """SHA-256 of the previous hash and of this entry without it, as canonical JSON; hex."""
    signature: str = ""
    """HMAC-SHA256 of the hash by the gateway's audit key; hex. Empty where it has none."""

    def sealed(self, previous: str, key: str | None = None) -> AuditTrailEntry:
        """The entry as a link after `previous`, signed where there is a key."""
        linked = self.model_copy(update={"previous": previous})
        found = linked.digest()
        return linked.model_copy(update={"hash": found, "signature": "" if key is None else signature(found, key)})

    def digest(self) -> str:
        """The hash that the entry must have."""
        return digest(self.previous, self.model_dump(mode="json", exclude={"hash", "signature"}))


FrozenPolicy = Annotated[ReleasePolicy, WrapValidator(thaw_policy), PlainSerializer(freeze_policy)]
"""A policy as it was when a release began, with the values that were fixed then."""


class Release(Noun):
    """An experiment that moves rollouts from the stable version of a resource to a candidate."""

    id: Id
    """Its name: the resource's and a number."""
    resource: Id
    """What it changes."""
    kind: ResourceKind
    """What that is."""
    stable: Id
    """The version it started from."""
    candidate: Id
    """The version it tries."""
    companions: dict[Id, Id] = Field(default_factory=dict[str, str])
    """Versions of other resources that it tries together with the candidate: one assignment gives a rollout all of them
    or none."""
    companions_stable: dict[Id, Id] = Field(default_factory=dict[str, str])
    """The versions of these that it started from."""
    only: Audience = Field(default_factory=Audience)
    """Which calls it speaks to."""
    policy: FrozenPolicy = Field(default_factory=ReleasePolicy)
    """What it may do by itself."""
    stage: ReleaseStage = "draft"
    """How far it has come."""
    step: int = 0
    """Which stage of the canary it is in, from 0; after the last one comes the holdback."""
    split: float = 0.0
    """Share of new rollouts that get the candidate."""
    held_in: ReleaseStage | None = None
    """The stage it was held in, while it is held."""
    waits: str | None = None
    """What it waits for: `approval`, or a check that is under way; None otherwise."""
    baseline: float | None = None
    """Mean goodness of the stable version's rewards before the start, where the margin is a share of it."""
    margin: float = 0.0
    """Loss of goodness that is excluded before it is promoted: the `d` of the statistics."""
    guard_margins: dict[str, float] = Field(default_factory=dict[str, float])
    """The same by guard."""
    salt: str = ""
    """What makes its assignment independent of every other's."""
    contents: dict[str, str] = Field(default_factory=dict[str, str])
    """What each version that it gives to rollouts said when it began: SHA-256 by NAME@VERSION; hex."""
    author: str = ""
    """Who started it."""
    created_ns: int = 0
    """When."""
    changed_ns: int = 0
    """When its stage last changed."""
    revision: int = 0
    """Number of its audit entries; a change names the one it was made from."""
    head: str = ""
    """Hash of its last audit entry."""
    assigned: int = 0
    """How many rollouts, or units of them, were assigned."""
    joined: int = 0
    """Rollouts that were given the arm of a unit that was assigned before."""
    unnamed: int = 0
    """Assigned rollouts that name no unit, though the policy wants one: each is a unit of its own."""
    counted: int = 0
    """The last assignment that was counted."""
    early: int = 0
    """The last assignment that was looked at early."""
    reason: str = ""
    """Why it is where it is, in a sentence."""

    @property
    def live(self) -> bool:
        """True while the release can still change what an agent gets."""
        return self.stage not in ENDED

    @property
    def resources(self) -> tuple[str, ...]:
        """Everything that the release changes; the resource that it is named after comes first."""
        return (self.resource, *self.companions)

    def arm_versions(self, arm: Arm) -> dict[str, str]:
        """The versions that rollouts on an arm get, by the resource's name."""
        if arm == "candidate":
            return {self.resource: self.candidate, **self.companions}
        return {self.resource: self.stable, **self.companions_stable}

    @property
    def qualified_versions(self) -> set[str]:
        """NAME@VERSION of all versions that the release may give to a rollout."""
        return {f"{name}@{version}" for arm in ARMS for name, version in self.arm_versions(arm).items()}

    def config(self) -> str:
        """SHA-256 of the release's configuration; hex."""
        fields = {"resource", "stable", "candidate", "only", "policy", "margin", "guard_margins", "salt", "contents"}
        # Hashes of releases from before there were companions must stay as they are.
        fields |= {"companions", "companions_stable"} if self.companions else set()
        return digest("", self.model_dump(mode="json", include=fields))


ENDED: frozenset[ReleaseStage] = frozenset({"promoted", "rolled_back", "aborted"})
"""Stages that no release leaves."""


class NewRelease(AuthenticatedRequest):
    """The request that starts a release."""

    candidate: Id
    """The version to try."""
    companions: dict[Id, Id] = Field(default_factory=dict[str, str], max_length=MOST_COMPANIONS)
    """Versions of other resources to try together with it, by the resource's name: a prompt with the weights that were
    trained on it."""
    only: Audience = Field(default_factory=Audience)
    """Which calls it speaks to; all unless given."""
    policy: ReleasePolicy = Field(default_factory=ReleasePolicy)
    """What it may do by itself."""
    author: Person = ""
    """Who starts it; `gateway` is what decides by the rules."""
    why: str = Field(default="", max_length=4000)
    """Why, in a sentence."""


class Forecast(Noun):
    """The likely course of a release whose candidate is equal to the stable version; shares are of the simulated
    releases."""

    played: int = 0
    """Releases that were played with the stable's past; 0 where that says too little, and nothing else is known."""
    past: int = 0
    """Rollouts of the stable version before the start that they were drawn from."""
    mean: float | None = None
    """Mean goodness of their rewards."""
    rollouts: int | None = None
    """Rollouts until it is decided or held: half of the played releases took fewer."""
    per_day: float | None = None
    """Rollouts a day before the start; None where that is not known."""
    days: float | None = None
    """Days until then at this traffic."""
    promoted: float | None = None
    """Share that was promoted."""
    rolled_back: float | None = None
    """Share that was rolled back."""
    held: float | None = None
    """Share that was held, most often because it was undecided at the horizon."""


class ReleaseView(Noun):
    """A release with what its evidence says now."""

    release: Release
    """The release."""
    figures: dict[str, float] = Field(default_factory=dict[str, float])
    """Figures of the evidence by name: e-values, means and numbers by arm."""
    interval: tuple[float, float] | None = None
    """Confidence sequence of candidate less stable, in goodness; for display."""
    waiting: int = 0
    """Assigned rollouts whose outcome is awaited."""
    waiting_early: int = 0
    """Assigned rollouts that are not looked at early yet: a call may still fail before the guard's deadline."""
    oldest: Id | None = None
    """The oldest of those whose outcome is awaited."""
    oldest_ns: int | None = None
    """When it was assigned."""
    warnings: list[str] = Field(default_factory=list[str])
    """What a person should know before trusting the figures, a sentence each."""
    rewarded: int = 0
    """Counted rollouts with a reward on the candidate, of the stage of the canary that it is in; in the holdback, all
    counted rollouts."""
    doing: str | None = None
    """What is under way before the canary: `check`, `replay`, `rehearsal` or `shadow`."""
    done: int = 0
    """How much of that is done."""
    total: int = 0
    """Of how much; 0 when that is not known."""
    coverage: dict[Id, Coverage] = Field(default_factory=dict[str, Coverage])
    """Whom the resources that it changes reach."""


class ReleaseList(Noun):
    """All releases that match, newest first."""

    releases: list[Release]
    """One each."""


class AuditTrail(Noun):
    """All entries of a release, oldest first."""

    entries: list[AuditTrailEntry]
    """The chain."""


class AssignmentPage(Noun):
    """Assignments of a release in order, each with what was seen of it."""

    assignments: list[Assignment]
    """Those of the page."""
    seen: list[AssignmentEvidence]
    """Those of them that were counted."""
    next: int | None = None
    """Number to ask for `after`; None at the end."""


def content_hash(version: Version) -> str:
    """SHA-256 of a version's kind and content, as canonical JSON; hex."""
    return digest("", {"kind": version.kind, "content": version.read().model_dump(mode="json")})


def signature(hash: str, key: str) -> str:
    """The signature of an entry by its hash; hex."""
    return hmac.new(key.encode(), hash.encode(), hashlib.sha256).hexdigest()


def digest(previous: str, value: Any) -> str:
    """SHA-256 of a text and a JSON value in canonical form (sorted keys, no spaces, ASCII); hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


# Messages to webhooks, and their deliveries.
#
# A *delivery* is the message about one change of a release to one webhook. It is on the tape from the change on,
# until long after it was delivered or given up.

ReleaseEvent = Literal[
    "start", "check", "replay", "shadow", "canary", "advance", "wait", "approve", "promote", "roll_back", "hold",
    "resume", "abort",
]  # fmt: skip
"""A change of a release, by its name in the audit chain; a rollback is a `roll_back`, whoever requests it."""
RELEASE_EVENTS: tuple[ReleaseEvent, ...] = get_args(ReleaseEvent)
DeliveryStatus = Literal["waiting", "delivered", "given_up"]
"""The state of a delivery."""


class ReleaseChangeData(Noun):
    """The `data` of a message: one entry of a release's audit chain, and what release that is."""

    release: Id
    """The release."""
    resource: Id
    """What it changes."""
    kind: ResourceKind
    """What that is."""
    stable: Id
    """The version it started from."""
    candidate: Id
    """The version it tries."""
    companions: dict[Id, Id]
    """Versions of other resources that it tries together with the candidate."""
    before: ReleaseStage | None
    """Stage before; None for the first entry."""
    after: ReleaseStage
    """Stage after."""
    canary: str | None
    """Name of the stage of the canary that it is in after it; None while it is in none."""
    split: float
    """Share of new rollouts that get the candidate after it."""
    who: str
    """Who did it, as was claimed; `gateway` for what was decided by the rules."""
    key: str
    """Name of the key that it was asked for with; empty for the rules, and where the gateway has no keys."""
    why: str
    """In a sentence."""
    figures: dict[str, float | str]
    """Figures behind it, by the names that the audit chain has: e-values, means and numbers by arm."""
    number: int
    """Number of the entry in the chain, from 1."""
    hash: str
    """Hash of the entry; hex. `penstock release history --json` shows the same."""


class WebhookTestData(Noun):
    """The `data` of a test."""

    webhook: str
    """Name of the webhook."""


class WebhookMessage(Noun):
    """The body of a request to a webhook, as Standard Webhooks has it."""

    type: str
    """What has happened, such as `release.roll_back`; `webhook.test` for a test."""
    timestamp: str
    """When that was: RFC 3339, UTC."""
    data: ReleaseChangeData | WebhookTestData
    """More of it."""


class Delivery(Noun):
    """One change of a release that one webhook is told of."""

    number: int
    """From 1, ascending over all webhooks."""
    webhook: str
    """Name of the webhook."""
    id: str
    """Its `webhook-id`: the same each time that it is sent."""
    event: ReleaseEvent
    """What was done to the release."""
    release: Id
    """The release."""
    entry: int
    """Number of the entry in the release's audit chain."""
    made_ns: int
    """When that was done; ns since the epoch."""
    status: DeliveryStatus = "waiting"
    """How far it has come."""
    attempts: int = 0
    """How often it was sent."""
    tried_ns: int | None = None
    """When it was sent last."""
    failing_ns: int | None = None
    """When it was sent in vain for the first time."""
    next_ns: int | None = None
    """When it is sent again, at the earliest; None where it was not sent yet, and when it is over."""
    answer: int | None = None
    """HTTP status of the last answer; None where there was none."""
    error: str = ""
    """Why it was not taken the last time; empty when it was."""


class DeliveryList(Noun):
    """The deliveries of a webhook, newest first."""

    deliveries: list[Delivery]
    """One each."""


class WebhookView(Noun):
    """A webhook of the configuration, and how it goes there."""

    name: str
    """Its name."""
    url: str
    """Where it listens, without what may be secret: scheme, host and port."""
    events: list[ReleaseEvent]
    """Which changes of releases it is told of."""
    waiting: int = 0
    """Deliveries that it has not taken yet."""
    oldest_ns: int | None = None
    """When the oldest of these was made."""
    failing_ns: int | None = None
    """Since when something is sent to it in vain, or was until it was given up; None where it takes what it is told."""
    error: str = ""
    """Why."""
    next_ns: int | None = None
    """When it is tried again."""
    last: Delivery | None = None
    """The last that it has taken."""
    given_up: int = 0
    """Deliveries that were given up, of those that the tape still has."""


class WebhookList(Noun):
    """Webhooks of the configuration, in its order."""

    webhooks: list[WebhookView] = Field(default_factory=list[WebhookView])
    """One each."""


class WebhookTest(Noun):
    """The request that sends a test message to a webhook; it has no fields."""


class WebhookTestResult(Noun):
    """The answer of a webhook to a test message."""

    webhook: str
    """Name of the webhook."""
    id: str
    """Its `webhook-id`."""
    answer: int | None
    """HTTP status of the answer; None where there was none."""
    error: str
    """Why it was not taken; empty when it was."""
    seconds: float
    """From sending it to the answer."""
