"""Whole releases without a gateway: rollouts are assigned, seen and decided on as the driver does, at fixed times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.console.views.pages import History
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    EarlyEvidence,
    Release,
    ReleaseStage,
    ReleaseView,
    RolloutEvidence,
)
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.releases.canary.decision import (
    NEXT,
    Canary,
    apply_action,
    apply_early_look,
    decision_of,
    figures,
    interval,
    stage_progress,
    warnings,
)
from penstock.gateway.releases.canary.outcomes import has_early_guard, observation, share, unit_hash, unit_outcome

START = 1_790_000_000 * 10**9
EVERY = 10 * 10**9
"""Time between two rollouts; ns."""
Draw = Callable[[int, str], float | None]
"""The reward of a rollout, by number and arm."""


def steady(stable: float, candidate: float, seed: int = 7) -> Draw:
    """Successes with these probabilities."""
    chance = random.Random(seed)
    return lambda _, arm: float(chance.random() < (candidate if arm == "candidate" else stable))


def seen_alone(seen: AssignmentEvidence, **change: Any) -> RolloutEvidence:
    """What was seen, as that of a rollout of a unit."""
    return RolloutEvidence.model_validate(seen.model_dump(include=set(RolloutEvidence.model_fields)) | change)


@dataclass
class Trial:
    """A release under way."""

    release: Release
    audit: list[AuditTrailEntry] = field(default_factory=list[AuditTrailEntry])
    assigned: list[Assignment] = field(default_factory=list[Assignment])
    seen: list[AssignmentEvidence] = field(default_factory=list[AssignmentEvidence])
    canary: Canary = field(init=False)
    now: int = START

    def __post_init__(self) -> None:
        self.canary = Canary.of(self.release)
        self.enter("start", "draft", "it was started", who="ann")

    @classmethod
    def of(cls, policy: ReleasePolicy | None = None, **more: Any) -> Trial:
        """One that has been started, with a margin of 0.07."""
        given: dict[str, Any] = {"id": "planner-1", "resource": "planner", "kind": "prompt", "stable": "v12"}
        given |= {
            "candidate": "v13",
            "margin": 0.07,
            "salt": "s",
            "created_ns": START,
            "policy": policy or ReleasePolicy(),
        }
        return cls(Release.model_validate(given | more))

    def enter(self, action: str, stage: ReleaseStage, why: str, who: str = GATEWAY, **change: Any) -> None:
        """Moves the release, with a link of its chain."""
        at, evidence = change.pop("assignment", None), change.pop("evidence", {})
        early = change.pop("early", 0)
        before = self.release.stage if self.audit else None
        made = self.release.model_copy(update={"stage": stage} | change)
        made.revision += 1
        connection = AuditTrailEntry(
            number=made.revision, at_ns=self.now, who=who, action=action, before=before, after=stage, step=made.step,
            split=made.split, why=why, assignment=at, early=early, evidence=evidence, config=made.config(),
        ).sealed(made.head)  # fmt: skip
        made.head, made.changed_ns, made.reason = connection.hash, self.now, why
        self.release = made
        self.audit.append(connection)

    def prepare(self, **evidence: dict[str, Any]) -> Trial:
        """Up to the canary."""
        while (after := NEXT.get(self.release.stage)) is not None:
            self.now += 60 * 10**9
            split = self.release.policy.stages[0].split if after == "canary" else 0.0
            self.enter("prepare", after, f"{after} in time", split=split, evidence=evidence.get(after, {"ok": True}))
        return self

    def person(self, action: str, stage: ReleaseStage, why: str = "I say so", **change: Any) -> Trial:
        """What somebody does; the canary hears of it as it does in a gateway."""
        counted = self.release.counted
        self.enter(action, stage, why, "ann", assignment=counted, early=self.release.early, **change)
        if (verdict := apply_action(self.canary, action)) is not None and (
            found := decision_of(verdict, counted)
        ) is not None:
            self._decide(found.action, found.verdict.reason, dict(found.verdict.figures))
        return self

    def run(self, rollouts: int, draw: Draw) -> Trial:
        """So many rollouts, or fewer if it ends before: each is assigned, and seen at once."""
        for _ in range(rollouts):
            if self.release.stage != "canary":
                break
            self.assign()
            if has_early_guard(self.release):
                self.look_early()
            self.count(draw)
        return self

    def assign(self) -> None:
        """The next rollout."""
        self.now += EVERY
        number, split = self.release.assigned + 1, self.release.split
        unit = unit_hash(self.release.salt, f"user {number}") if self.release.policy.by_unit else None
        arm = "candidate" if share(self.release.salt, unit or f"r{number}") < split else "stable"
        stage = self.release.policy.ramp[self.release.step].name
        self.assigned.append(
            Assignment(
                number=number,
                rollout=f"r{number}",
                unit=unit,
                arm=arm,
                probability=split,
                stage=stage,
                assigned_ns=self.now,
            )
        )
        self.release.assigned = number

    def look_early(self, good: float | None = 1.0) -> None:
        """What is known early of the next one, and what follows."""
        at = self.release.early
        early = EarlyEvidence(seen_ns=self.now, good=good, counted=self.release.counted)
        self.assigned[at] = self.assigned[at].model_copy(update={"early": early})
        self.release.early = at + 1
        verdict = apply_early_look(self.canary, self.assigned[at])
        if verdict is not None and (found := decision_of(verdict, self.release.counted)) is not None:
            self._decide(found.action, found.verdict.reason, dict(found.verdict.figures))

    def count(self, draw: Draw, left_out: str | None = None) -> None:
        """What is seen of the next one, and what follows."""
        one = self.assigned[len(self.seen)]
        reward = None if left_out else draw(one.number, one.arm)
        guards: dict[str, float | None] = {"error": 1.0 if one.number % 9 else 0.0, "violation": 1.0}
        seen = AssignmentEvidence(
            number=one.number, rollout=one.rollout, seen_ns=self.now, reward=reward, raw_reward=reward, guards=guards,
            left_out=left_out,
        )  # fmt: skip
        if one.unit is not None:
            parts = [seen_alone(seen), seen_alone(seen, rollout=f"{one.rollout}-2")]
            seen = unit_outcome(self.release.policy, one, parts, self.now)
        self.seen.append(seen)
        self.release.counted = one.number
        if (
            left_out is None
            and (found := decision_of(self.canary.step(observation(one, seen)), one.number)) is not None
        ):
            self._decide(found.action, found.verdict.reason, dict(found.verdict.figures))

    def _decide(self, action: str, why: str, evidence: dict[str, float]) -> None:
        if action == "wait" and self.release.waits:
            return
        step = self.release.step + 1
        stages = self.release.policy.ramp
        updates: dict[str, tuple[ReleaseStage, dict[str, Any]]] = {
            "advance": ("canary", {"step": step, "split": stages[min(step, len(stages) - 1)].split, "waits": None}),
            "promote": ("promoted", {"split": 0.0, "waits": None}),
            "roll_back": ("rolled_back", {"split": 0.0, "waits": None}),
            "hold": ("held", {"held_in": "canary"}),
            "wait": ("canary", {"waits": "approval"}),
        }
        stage, update = updates[action]
        at = {"assignment": self.release.counted, "early": self.release.early}
        self.enter(action, stage, why, evidence=evidence, **at, **update)

    @property
    def view(self) -> ReleaseView:
        """As the API answers it."""
        waiting = self.assigned[len(self.seen) :]
        return ReleaseView(
            release=self.release,
            figures=figures(self.canary.evidence),
            interval=interval(self.canary.evidence.latest.reward),
            warnings=list(warnings(self.release.policy, self.canary.evidence.latest)),
            waiting=len(waiting),
            waiting_early=self.release.assigned - self.release.early if has_early_guard(self.release) else 0,
            oldest=waiting[0].rollout if waiting else None,
            oldest_ns=waiting[0].assigned_ns if waiting else None,
            rewarded=stage_progress(self.release, self.canary.evidence),
        )

    @property
    def history(self) -> History:
        """All that the tape has of it."""
        return History.of(self.release, self.audit, self.assigned, self.seen)
